"""The codecs by themselves, and how a namespace comes by one."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from builders import chain, spec
from disk_faults import compressible, filled, memory
from structlog.testing import capture_logs

from kvstore.errors import InvalidRequest
from kvstore.spec import KVSpec
from kvstore.types import ByteArray
from kvstore_server.tiers import packing
from kvstore_server.tiers.codec import NUMBERS, Codec, Sample, choose, compress, decompress, item_bytes, load_blosc2
from kvstore_server.tiers.packing import Packer
from kvstore_server.tiers.records import RecordLayout

CODECS = [Codec.LZ4, Codec.ZSTD]
PLAIN = compressible(spec(layers=4, bytes_per_part=64 << 10))


def numbers(size_bytes: int) -> ByteArray:
    """bfloat16 numbers between 1 and 2, of which half of the bytes are alike."""
    held = np.random.default_rng(size_bytes).integers(0, 256, size_bytes, dtype=np.uint8)
    held[1::2] = 0x3F
    return held


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bfloat16", 2),
        ("float16", 2),
        ("fp16", 2),
        ("bf16", 2),
        ("torch.bfloat16", 2),
        ("Float32", 4),
        ("fp32", 4),
        ("float64", 8),
        ("fp8", 1),
        ("fp8_e4m3", 1),
        ("float8_e5m2", 1),
        ("uint8", 1),
        ("int4", 1),
        ("float160", 1),
        ("half", 1),
        ("auto", 1),
    ],
)
def test_the_size_of_an_element_is_in_the_name_of_its_type(dtype: str, expected: int) -> None:
    assert item_bytes(dtype) == expected


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("element", [1, 2, 4, 8])
@pytest.mark.parametrize("size_bytes", [1, 33, 4096, 100_003])
def test_what_was_compressed_comes_back_and_nothing_beside_it_is_written(
    codec: Codec, element: int, size_bytes: int
) -> None:
    for held in (numbers(size_bytes), np.random.default_rng(1).integers(0, 256, size_bytes, dtype=np.uint8)):
        chunk = compress(codec, held.data, item_bytes=element)
        assert len(chunk) <= size_bytes + 32
        target = np.full(size_bytes + 200, 7, np.uint8)
        decompress(chunk, target[100:-100].data)
        assert (target[100:-100] == held).all()
        assert (target[:100] == 7).all()
        assert (target[-100:] == 7).all()


@pytest.mark.parametrize("codec", CODECS)
def test_numbers_shrink_if_the_size_of_an_element_is_known(codec: Codec) -> None:
    held = numbers(1 << 20)
    assert len(compress(codec, held.data, item_bytes=2)) < 0.6 * len(held)


def test_a_chunk_of_another_size_or_none_at_all_is_refused() -> None:
    chunk = compress(Codec.ZSTD, numbers(5000).data, item_bytes=2)
    target = np.full(10_000, 7, np.uint8)
    for source, size_bytes in (
        (chunk, 4999),  # it would be written past the end
        (chunk, 5001),
        (chunk[:-1], 5000),
        (chunk + b"x", 5000),
        (b"", 5000),
        (b"short", 5000),
        (bytes(100), 5000),
    ):
        with pytest.raises(ValueError, match=r"another size|16 bytes"):
            decompress(source, target[:size_bytes].data)
    assert (target == 7).all()


def test_other_threads_run_while_one_compresses() -> None:
    """The package keeps the interpreter's lock unless told otherwise; the answer is what it was told before."""
    assert load_blosc2().set_releasegil(True) is True


@pytest.fixture
def no_blosc2(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    load_blosc2.cache_clear()
    monkeypatch.setitem(sys.modules, "blosc2", None)
    yield
    load_blosc2.cache_clear()


@pytest.mark.usefixtures("no_blosc2")
def test_without_blosc2_the_error_says_what_to_install() -> None:
    with pytest.raises(InvalidRequest, match=r"blosc2 is not installed; pip install 'kvstore\[codec\]'"):
        compress(Codec.LZ4, b"x", item_bytes=1)
    with pytest.raises(InvalidRequest, match=r"pip install"):
        decompress(b"x", memoryview(bytearray(1)))


@pytest.mark.parametrize(
    ("lz4", "zstd", "expected"),
    [
        ((0.20, 2.0), (0.30, 2.0), Codec.ZSTD),  # both keep up: the one that saves more
        ((0.20, 2.0), (0.30, 0.99), Codec.LZ4),  # two threads at 0.99 are not twice as fast as the disk at 1
        ((0.20, 0.99), (0.30, 0.99), Codec.NONE),
        ((0.20, 1.0), (0.30, 0.99), Codec.LZ4),  # exactly twice is enough
        ((0.09, 9.0), (0.09, 9.0), Codec.NONE),  # not worth it
        ((0.10, 9.0), (0.09, 9.0), Codec.LZ4),
        ((0.20, 8.0), (0.20, 9.0), Codec.ZSTD),  # the same saved: the faster one
        ((0.20, 9.0), (0.20, 8.0), Codec.LZ4),
    ],
)
def test_the_codec_that_saves_most_of_those_that_keep_up_with_the_disk_is_chosen(
    lz4: tuple[float, float], zstd: tuple[float, float], expected: Codec
) -> None:
    samples = {Codec.LZ4: Sample(*lz4), Codec.ZSTD: Sample(*zstd)}
    assert choose(samples, read_bytes_per_s=1.0, num_threads=2) is expected


class _Auto:
    """A packer whose every namespace is `auto`, over a disk of the given speed."""

    def __init__(self, read_bytes_per_s: float | None) -> None:
        self.measured = 0
        self.asked: list[KVSpec] = []
        self._read_bytes_per_s = read_bytes_per_s
        self.packer = Packer(
            codec_of=self._codec,
            each=lambda work, parts: [work(part) for part in parts] and None,
            num_threads=1,
            read_bytes_per_s=self._measure,
        )

    def pack(self, kv: KVSpec, num_blocks: int) -> list[int]:
        """The codecs of so many blocks, as numbers."""
        held, addresses = filled(kv, chain(num_blocks, seed=5))
        packed = self.packer.pack(RecordLayout.of(kv), addresses)
        assert len(held) == len(packed)
        return packed.codecs.tolist()

    def _codec(self, kv: KVSpec) -> Codec:
        self.asked.append(kv)
        return Codec.AUTO

    def _measure(self) -> float | None:
        self.measured += 1
        return self._read_bytes_per_s


def test_auto_measures_once_a_namespace_and_says_what_it_chose() -> None:
    auto = _Auto(1.0)
    with capture_logs() as logs:
        first, second = auto.pack(PLAIN, 8), auto.pack(PLAIN, 3)
    (line,) = logs
    assert (line["event"], line["model"], line["blocks"]) == ("disk.codec", "model", 8)
    assert line["codec"] in CODECS
    assert first + second == [NUMBERS[line["codec"]]] * 11
    assert 0.3 < line["zstd_saved"] < 0.6
    assert {"lz4_saved", "lz4_gbps", "zstd_gbps", "disk_gbps", "threads"} <= line.keys()
    assert (auto.measured, len(auto.asked)) == (1, 1)
    assert 0 not in auto.pack(compressible(spec(layers=4, bytes_per_part=64 << 10, model="other")), 8)
    assert (auto.measured, len(auto.asked)) == (1, 2)


def test_auto_leaves_blocks_plain_where_a_codec_would_slow_the_disk_down_or_save_nothing() -> None:
    assert _Auto(1e15).pack(PLAIN, 8) == [0] * 8
    assert _Auto(1.0).pack(spec(layers=4, bytes_per_part=64 << 10), 8) == [0] * 8  # random


def test_auto_does_not_judge_by_less_than_a_mebibyte() -> None:
    auto = _Auto(1.0)
    assert auto.pack(PLAIN, 3) == [0] * 3
    assert auto.measured == 0
    assert 0 not in auto.pack(PLAIN, 4)


def test_auto_on_a_disk_that_cannot_be_measured_is_none() -> None:
    auto = _Auto(None)
    with capture_logs() as logs:
        assert auto.pack(PLAIN, 8) == [0] * 8
        assert auto.pack(PLAIN, 8) == [0] * 8
    assert [(line["codec"], line["reason"]) for line in logs] == [(Codec.NONE, "the disk was not measured")]
    assert auto.measured == 1


def test_blocks_larger_than_blosc2_can_count_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_BYTES", PLAIN.block_bytes - 1)
    assert _Auto(1.0).pack(PLAIN, 4) == [0] * 4


def test_blocks_of_one_page_stay_plain() -> None:
    auto = _Auto(1.0)
    tiny = compressible(spec(layers=1, bytes_per_part=4096))
    assert auto.pack(tiny, 512) == [0] * 512
    assert auto.asked == []


def test_plain_blocks_are_neither_moved_nor_read() -> None:
    kv = spec()
    packer = Packer(codec_of=lambda _: Codec.NONE, each=lambda *_: None, num_threads=1, read_bytes_per_s=lambda: None)
    _, addresses = memory(kv, 3)
    packed = packer.pack(RecordLayout.of(kv), addresses)
    assert packed.addresses is addresses
    assert packed.sizes.tolist() == [kv.block_bytes] * 3
    assert packed.codecs.tolist() == [0] * 3
    assert len(packed[1:]) == len(packed[np.array([True, False, True])]) == 2


def test_the_benchmark_measures_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "codec.py"
    found = importlib.util.spec_from_file_location("benchmarks_codec", path)
    assert found is not None
    assert found.loader is not None
    benchmark = importlib.util.module_from_spec(found)
    found.loader.exec_module(benchmark)
    monkeypatch.setattr(benchmark, "TIER_BYTES", 1 << 20)
    monkeypatch.setattr(benchmark, "ROUNDS", 1)
    numbers(700_000).tofile(tmp_path / "kv.bin")
    arguments = ["--file", str(tmp_path / "kv.bin"), "--block-bytes", "100000", "--path", str(tmp_path), "--json"]
    monkeypatch.setattr(sys, "argv", ["codec.py", *arguments])
    benchmark.main()
    figures = json.loads(capsys.readouterr().out)
    assert [(row["codec"], row["blocks"]) for row in figures["codecs"]] == [("lz4", 7), ("zstd", 7)]
    assert all(row["ratio"] > 1.5 for row in figures["codecs"])
    assert [row["codec"] for row in figures["tiers"]] == ["none", "lz4", "zstd"]
    assert [path.name for path in tmp_path.iterdir()] == ["kv.bin"]
