"""The simulation of placement: by hand for a small trace, and its figures where the traces are."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kvstore.errors import InvalidRequest

REPOSITORY = Path(__file__).parents[2]
TRACES = Path(os.environ.get("KVSTORE_TRACES", REPOSITORY.parent / "shared" / "traces"))


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, REPOSITORY / "benchmarks" / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, name, module)  # where others, and its dataclasses, look for its names
    found.loader.exec_module(module)
    return module


@pytest.fixture
def placement(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    load("hit_rate", monkeypatch)
    return load("placement", monkeypatch)


def mooncake(path: Path, requests: list[list[int]]) -> Path:
    lines = [json.dumps({"hash_ids": blocks, "input_length": 512 * len(blocks)}) for blocks in requests]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_every_block_is_placed_once_with_its_segment(placement: ModuleType, tmp_path: Path) -> None:
    blocks = [[0, 1, 2, 3], [0, 1, 2, 4, 5], [0, 6]]
    requests = [placement.Request(np.array(numbers), 256, 256 * len(numbers)) for numbers in blocks]
    found = placement.balance(requests, num_nodes=1, block_tokens=16)  # two blocks of the trace are a segment
    assert (found.blocks, found.segments, found.busiest, found.busiest_asked) == (7 * 16, 3, 1.0, 1.0)
    requests = placement.read(mooncake(tmp_path / "trace.jsonl", blocks))
    for block_tokens in (16, 512):
        found = placement.balance(requests, num_nodes=1, block_tokens=block_tokens)
        assert (found.blocks, found.segments) == (7 * 512 // block_tokens, 7)
    many = [[number] for number in range(4000)]
    found = placement.balance(placement.read(mooncake(tmp_path / "many.jsonl", many)), num_nodes=8, block_tokens=16)
    assert found.segments == 4000
    assert 1.0 < found.busiest < 1.15
    assert found.moved == pytest.approx(1 / 9, abs=0.02)
    with pytest.raises(InvalidRequest, match="block-tokens"):
        placement.balance(requests, num_nodes=8, block_tokens=3)


def test_the_command_prints_what_it_found(
    placement: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = mooncake(tmp_path / "trace.jsonl", [[0, 1, 2]])
    monkeypatch.setattr(sys, "argv", ["placement.py", "--trace", str(trace), "--nodes", "1", "--json"])
    placement.main()
    assert json.loads(capsys.readouterr().out)["blocks"] == 96


def test_a_daemon_that_joins_takes_its_part_of_a_trace_and_no_more(placement: ModuleType) -> None:
    trace = TRACES / "mooncake" / "conversation_trace.jsonl"
    if not trace.exists():
        pytest.skip(f"{trace} is not there; set KVSTORE_TRACES to the folder of the traces")
    requests = placement.read(trace)
    for block_tokens in (16, 512):
        found = placement.balance(requests, num_nodes=8, block_tokens=block_tokens)
        assert found.moved <= 1 / 9 + 0.02
        assert found.busiest <= 1.25
