"""What do the codecs of the disk tier save of real keys and values, and how fast are they?

    python benchmarks/codec.py [--block-tokens 128] [--path FOLDER] [--json]
    python benchmarks/codec.py --file KV.bin --dtype bfloat16 --block-bytes 1048576 [--path FOLDER] [--json]

The first computes the keys and values of the demo's text with the demo's model (`kvstore[demo]` and its weights). The
second takes those of another model: the blocks of a file, end to end, as an engine would store them. For each type of
number and codec: the ratio of bytes, the share of the room on disk that is saved (docs/spec/disk.md), and GB/s of plain
bytes in one thread, each the median over the blocks. With `--path`, also through a disk tier of four threads in that
folder: compressed and written, and read again, 256 MiB in batches of 64. docs/benchmarks/codec.md has results.
"""

import argparse
import json
import mmap
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstore.hashing import chain, pack, unpack
from kvstore.spec import KVSpec
from kvstore.transport.memory import address_of, hash_pieces
from kvstore.types import AnyArray
from kvstore_server.commands.demo import handbook, model
from kvstore_server.tiers.codec import COMPRESSING, Codec, compress, decompress, item_bytes
from kvstore_server.tiers.disk import DiskTier
from kvstore_server.tiers.records import RecordLayout

TIER_BYTES: Final = 256 << 20
BATCH_BYTES: Final = 64 << 20
ROUNDS: Final = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--block-bytes", type=int, default=1 << 20)
    parser.add_argument("--block-tokens", type=int, default=128)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.file is not None:
        by_dtype = {arguments.dtype: blocks_of(arguments.file, arguments.block_bytes)}
    else:
        by_dtype = computed(arguments.block_tokens)
    rows = [measured(dtype, codec, blocks) for dtype, blocks in by_dtype.items() for codec in COMPRESSING]
    tiers = (
        [] if arguments.path is None else [row for each in by_dtype.items() for row in by_tier(*each, arguments.path)]
    )
    if arguments.json:
        print(json.dumps({"codecs": rows, "tiers": tiers}))
    else:
        print("\n\n".join(table(some) for some in (rows, tiers) if some))


def spec_of(dtype: str, block_bytes: int) -> KVSpec:
    return KVSpec.uniform(
        model="bench",
        revision="r1",
        dtype=dtype,
        block_tokens=1,
        layers=1,
        bytes_per_part=block_bytes,
        layout="bench",
    )


def measured(dtype: str, codec: Codec, blocks: AnyArray) -> dict[str, Any]:
    """Of `[num_blocks, block_bytes]`."""
    block_bytes = blocks.shape[1]
    layout = RecordLayout.of(spec_of(dtype, block_bytes))
    sizes, compress_s, decompress_s = [], [], []
    target = np.zeros(block_bytes, np.uint8)
    for block in blocks:
        began = time.perf_counter()
        chunk = compress(codec, block.data, item_bytes=item_bytes(dtype))
        compressed = time.perf_counter()
        decompress(chunk, target.data)
        decompress_s.append(time.perf_counter() - compressed)
        compress_s.append(compressed - began)
        sizes.append(min(len(chunk), block_bytes))
        assert (target == block).all(), "not what was compressed"
    return {
        "dtype": dtype,
        "codec": str(codec),
        "blocks": len(blocks),
        "block_bytes": block_bytes,
        "ratio": round(block_bytes / statistics.mean(sizes), 3),
        "saved_on_disk": round(1 - float(layout.rooms_for(np.array(sizes)).mean()) / layout.data_bytes, 3),
        "compress_gbps": round(block_bytes / statistics.median(compress_s) / 1e9, 2),
        "decompress_gbps": round(block_bytes / statistics.median(decompress_s) / 1e9, 2),
    }


def by_tier(dtype: str, blocks: AnyArray, path: Path) -> list[dict[str, Any]]:
    """For each codec, `none` first: the medians of the rounds, in which the codecs take turns; the first warms up."""
    block_bytes = blocks.shape[1]
    room_bytes = -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    count = TIER_BYTES // room_bytes
    source, target = (np.frombuffer(mmap.mmap(-1, count * room_bytes), np.uint8).reshape(count, -1) for _ in range(2))
    source[:, :block_bytes] = blocks[np.arange(count) % len(blocks)]
    target[:] = 1
    spec = spec_of(dtype, block_bytes)
    seconds: dict[Codec, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=path) as folder:
        tiers = {codec: opened(Path(folder) / codec, codec, spec) for codec in (Codec.NONE, *COMPRESSING)}
        for number in range(ROUNDS + 1):
            for codec, tier in tiers.items():
                took = round_trip(tier, spec, source, target)
                assert (target[:, :block_bytes] == source[:, :block_bytes]).all(), "not what was written"
                target[:] = 1
                if number:
                    seconds.setdefault(codec, []).append(took)
        for tier in tiers.values():
            tier.close()
    return [
        {
            "dtype": dtype,
            "codec": str(codec),
            "write_gbps": round(count * block_bytes / statistics.median(write_s for write_s, _ in took) / 1e9, 2),
            "read_gbps": round(count * block_bytes / statistics.median(read_s for _, read_s in took) / 1e9, 2),
        }
        for codec, took in seconds.items()
    ]


def opened(directory: Path, codec: Codec, spec: KVSpec) -> DiskTier:
    tier = DiskTier(
        directory,
        capacity_bytes=2 * TIER_BYTES,
        slab_bytes=BATCH_BYTES,
        reserve_bytes=0,
        num_threads=4,
        codec=lambda _: codec,
    )
    tier.recover()
    tier.open_space(spec)
    return tier


def round_trip(tier: DiskTier, spec: KVSpec, source: AnyArray, target: AnyArray) -> tuple[float, float]:
    """Seconds to compress and write all of it, and to read it; nothing of it is left on disk."""
    count, room_bytes = source.shape
    hashes = unpack(pack(chain(spec.namespace, range(count), block_tokens=1)))
    sources, targets = (address_of(memory) + room_bytes * np.arange(count) for memory in (source, target))
    # Taken when a block is stored, and so no part of a write.
    checksums = hash_pieces(sources, np.full(count, spec.block_bytes)).reshape(-1, 1)
    slots = np.empty(count, np.int64)
    step = max(1, BATCH_BYTES // room_bytes)
    batches = [slice(first, first + step) for first in range(0, count, step)]
    began = time.perf_counter()
    for batch in batches:
        packed = tier.pack(spec, addresses=sources[batch])
        slots[batch] = tier.allocate_for(spec, packed)
        tier.write(
            spec,
            slots=slots[batch],
            hashes=hashes[batch],
            parents=hashes[batch],
            addresses=sources[batch],
            checksums=checksums[batch],
            packed=packed,
        )
    written = time.perf_counter()
    for batch in batches:
        good, _ = tier.read(spec, slots=slots[batch], hashes=hashes[batch], addresses=targets[batch])
        assert good.all(), f"read {good.sum()} of {len(good)} blocks"
    read = time.perf_counter()
    tier.forget(spec, hashes)
    tier.free(slots)
    return written - began, read - written


def blocks_of(path: Path, block_bytes: int) -> AnyArray:
    """`[num_blocks, block_bytes]`; what is left at the end of the file is not used."""
    data = np.fromfile(path, np.uint8)
    assert len(data) >= block_bytes, f"{path}: expected at least {block_bytes} bytes, got {len(data)}"
    return data[: len(data) // block_bytes * block_bytes].reshape(-1, block_bytes)


def computed(block_tokens: int) -> dict[str, AnyArray]:
    """By the name of a type: blocks of the demo's model, `[num_blocks, block_bytes]`."""
    model.check_packages()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model.prepare(None, progress=lambda line: print(line, file=sys.stderr))
    tokens = AutoTokenizer.from_pretrained(folder).encode(handbook.HANDBOOK, add_special_tokens=False)
    num_tokens = len(tokens) // block_tokens * block_tokens
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        layers = network(torch.tensor([tokens[:num_tokens]]), use_cache=True).past_key_values.layers
    # [layer, 2, head, token, dim], then blocks first, as the adapter for Transformers stores them.
    held = torch.stack([torch.cat([layer.keys, layer.values]) for layer in layers])
    held = held.unflatten(3, (-1, block_tokens)).permute(3, 0, 1, 2, 4, 5).contiguous()
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}
    return {name: held.to(dtype).flatten(1).view(torch.uint8).numpy() for name, dtype in dtypes.items()}


def table(rows: list[dict[str, Any]]) -> str:
    widths = {name: max(len(name), *(len(str(row[name])) for row in rows)) for name in rows[0]}
    lines = [dict(zip(widths, widths, strict=True)), *rows]
    return "\n".join("  ".join(str(line[name]).ljust(width) for name, width in widths.items()) for line in lines)


if __name__ == "__main__":
    main()
