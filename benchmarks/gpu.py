"""How fast is the gpu tier? Its copies in and out beside plain cudaMemcpy of the same bytes; the time of a new slab.

    python benchmarks/gpu.py --size-mib 1024 --rounds 5 --json

Needs the extra kvstore[gpu] and a CUDA device; without one nothing is measured, and the exit code is 1. Device memory
of twice the size is taken, and as much page-locked host memory as the size. Each figure is the median of the rounds,
in which plain copies and the tier's take turns. Blocks lie side by side in host memory, so that the tier joins their
copies, or scattered, so that each is one of its own. Out of the tier includes the check of every block's xxh3.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.hashing import pack, unpack
from kvstore.transport.cuda import CudaDevice, Device, DeviceFailed
from kvstore.transport.memory import address_of, hash_pieces
from kvstore.types import ByteArray, IntArray
from kvstore_server.commands.measure import aligned_memory, bench_chain, bench_spec, parents_of, random_bytes, timed
from kvstore_server.config import Settings
from kvstore_server.tiers.gpu import GpuTier
from kvstore_server.tiers.pinning import PageLock
from kvstore_server.tiers.slab import slab_of

BLOCK_KIB = (64, 512, 4096)


@dataclass(frozen=True, slots=True)
class Plain:
    """One copy at a time: target, source, size in bytes."""

    copy_in: Callable[[int, int, int], None]
    copy_out: Callable[[int, int, int], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=int, default=0, help="number of the CUDA device")
    parser.add_argument("--size-mib", type=int, default=1024, help="of one copy; a multiple of 4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        device = CudaDevice(arguments.device)
        figures = measure(
            device, cuda_copies(), size_bytes=arguments.size_mib << 20, rounds=arguments.rounds, block_kib=BLOCK_KIB
        )
    except (InvalidRequest, DeviceFailed) as error:
        sys.exit(f"benchmarks/gpu.py: nothing was measured: {error}")
    print(json.dumps(figures) if arguments.json else "\n".join(f"{name:40}{value}" for name, value in figures.items()))


def cuda_copies() -> Plain:
    from cupy.cuda import runtime

    return Plain(
        lambda target, source, size: runtime.memcpy(target, source, size, runtime.memcpyHostToDevice),
        lambda target, source, size: runtime.memcpy(target, source, size, runtime.memcpyDeviceToHost),
    )


def measure(
    device: Device, plain: Plain, *, size_bytes: int, rounds: int, block_kib: tuple[int, ...]
) -> dict[str, object]:
    """All figures; the device is closed."""
    page_lock = PageLock()
    memory = aligned_memory(size_bytes)
    random_bytes(memory)
    page_lock.lock(memory)
    figures: dict[str, object] = {
        "device": device.name,
        "host_memory": "a page lock was refused" if page_lock.num_failed else page_lock.reason,
        "size_mib": size_bytes >> 20,
        "rounds": rounds,
    }
    on_device = device.allocate(size_bytes)
    slab_bytes = Settings().slab_bytes
    tier = GpuTier(device, capacity_bytes=size_bytes, slab_bytes=slab_bytes)
    for kib in block_kib:
        figures |= measure_blocks(tier, plain, on_device, memory, block_bytes=kib << 10, rounds=rounds)
    device.free(on_device)
    page_lock.unlock(memory)
    tier.close()
    return figures


def measure_blocks(
    tier: GpuTier, plain: Plain, on_device: int, memory: ByteArray, *, block_bytes: int, rounds: int
) -> dict[str, object]:
    """The figures for blocks of this size, named after it; the tier is empty again."""
    spec, kib = bench_spec("gpu", block_bytes), block_bytes >> 10
    num_blocks, on_host = memory.size // block_bytes, address_of(memory)
    chain = bench_chain(spec, num_blocks, seed=kib)
    hashes, parents = unpack(pack(chain)), parents_of(chain)
    found: list[IntArray] = []
    allocate_s = timed(lambda: found.append(tier.allocate(spec, num_blocks)))
    (slots,) = found
    assert len(slots) == num_blocks
    slabs = {slab_of(slot) for slot in slots.tolist()}
    figures: dict[str, object] = {f"{kib}_kib_open_slab_ms": round(allocate_s / len(slabs) * 1e3, 3)}

    def read(addresses: IntArray) -> None:
        good, _ = tier.read(spec, slots=slots, hashes=hashes, addresses=addresses)
        assert good.all()

    begins = on_host + block_bytes * np.arange(num_blocks)
    checksums = hash_pieces(begins, np.full(num_blocks, block_bytes))[:, None]
    side_by_side = np.arange(num_blocks)
    scattered = np.random.default_rng(0).permutation(num_blocks)
    for name, order in (("side_by_side", side_by_side), ("scattered", scattered)):
        works: dict[str, Callable[[], None]] = {
            "plain_in": partial(plain.copy_in, on_device, on_host, memory.size),
            "in": partial(
                tier.write,
                spec,
                slots=slots,
                hashes=hashes,
                parents=parents,
                addresses=begins[order],
                checksums=checksums[order],
            ),
            "plain_out": partial(plain.copy_out, on_host, on_device, memory.size),
            "out": partial(read, begins[order]),
        }
        rounds_s = [{work: timed(run) for work, run in works.items()} for _ in range(rounds)]
        for work in works:
            median_s = statistics.median(seconds[work] for seconds in rounds_s)
            figures[f"{kib}_kib_{name}_{work}_gb_s"] = round(memory.size / median_s / 1e9, 2)
    tier.free(slots)
    for slab in slabs:
        tier.close_slab(slab)
        tier.delete_slab(slab)
        tier.slab_deleted(slab)
    return figures


if __name__ == "__main__":
    main()
