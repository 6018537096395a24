"""NIXL takes memory of a device for memory of the host, in every process that has this folder in PYTHONPATH.

So that regions of device memory are moved to and from where there is no device. Python imports this when it starts.
"""

from kvstore.transport import ucx

nixl = ucx._nixl()
nixl.VRAM_SEG = nixl.DRAM_SEG
