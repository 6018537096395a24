"""Page-locks slabs for the GPU's copy engine, where there is a CUDA driver; does nothing elsewhere.

Uses the driver library itself, so that the core needs no CUDA package. Not run on a GPU yet.
Source: CUDA driver API, cuMemHostRegister.
"""

import ctypes

from kvstore.types import ByteArray

_PORTABLE = 0x01  # CU_MEMHOSTREGISTER_PORTABLE: locked for all contexts of the process


class PageLock:
    """Locks memory that a GPU copies from and to. `reason` says in words whether and why not."""

    def __init__(self, *, wanted: bool = True) -> None:
        self._driver: ctypes.CDLL | None = None
        self.num_failed = 0
        if not wanted:
            self.reason = "off in the configuration"
            return
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            self.reason = "no CUDA driver on this machine"
            return
        device, context = ctypes.c_int(), ctypes.c_void_p()
        for name, arguments in (
            ("cuInit", (0,)),
            ("cuDeviceGet", (ctypes.byref(device), 0)),
            ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
            ("cuCtxSetCurrent", (context,)),
        ):
            status = getattr(driver, name)(*arguments)
            if status:
                self.reason = f"{name} failed with CUDA error {status}"
                return
        self._driver = driver
        self.reason = "page-locked with CUDA"

    def lock(self, memory: ByteArray) -> None:
        """The memory is page-locked, where there is CUDA; a failure is counted and costs only speed."""
        if self._driver is not None:
            address, size = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.size)
            if self._driver.cuMemHostRegister_v2(address, size, _PORTABLE):
                self.num_failed += 1

    def unlock(self, memory: ByteArray) -> None:
        """Undoes `lock`."""
        if self._driver is not None:
            self._driver.cuMemHostUnregister(ctypes.c_void_p(memory.ctypes.data))
