"""The replay of traces: by hand for small ones, and against figures of another simulator where the traces are."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[2]
TRACES = Path(os.environ.get("KVSTORE_TRACES", REPOSITORY.parent / "shared" / "traces"))


@pytest.fixture(scope="module")
def hit_rate() -> ModuleType:
    found = importlib.util.spec_from_file_location("hit_rate", REPOSITORY / "benchmarks" / "hit_rate.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["hit_rate"] = module  # where its dataclasses look for their names
    found.loader.exec_module(module)
    return module


def mooncake(path: Path, requests: list[tuple[list[int], int]]) -> Path:
    """A trace of requests, each of blocks and a number of tokens."""
    lines = [
        json.dumps({"timestamp": 0, "hash_ids": blocks, "input_length": tokens, "output_length": 1})
        for blocks, tokens in requests
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_hit_is_what_leads_and_is_counted_in_tokens(hit_rate: ModuleType, tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "trace.jsonl", [([0, 1, 2], 1100), ([0, 1, 2], 1100), ([0, 3], 600)])
    result = hit_rate.replay(hit_rate.read(trace), policy="lru", capacity_blocks=10)
    assert result.hit_rate == round(100 * (1100 + 512) / 2800, 2)
    assert (result.requests, result.blocks, result.unique_blocks) == (3, 8, 4)


def test_in_a_small_cache_the_end_of_the_oldest_chain_goes(hit_rate: ModuleType, tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "trace.jsonl", [([0, 1, 2], 1536), ([5, 6], 1024), ([0, 1, 2], 1536)])
    for capacity, hit in ((5, 1536), (4, 1024), (3, 512), (2, 0)):
        result = hit_rate.replay(hit_rate.read(trace), policy="lru", capacity_blocks=capacity)
        assert result.hit_rate == round(100 * hit / 4096, 2), capacity


def test_sessions_start_together_and_share_nothing(hit_rate: ModuleType, tmp_path: Path) -> None:
    def request(at: float, blocks: list[int]) -> dict[str, object]:
        return {"t": at, "type": "n", "model": "m", "in": 64 * len(blocks), "hash_ids": blocks}

    nested = {"t": 5.0, "type": "subagent", "requests": [request(1.0, [1, 2]), request(4.0, [1, 2, 3])]}
    for name, requests in (("a", [request(0.0, [1]), nested, request(8.0, [1, 2, 3])]), ("b", [request(7.0, [1, 2])])):
        session = {"id": name, "block_size": 64, "requests": requests}
        (tmp_path / f"trace_{name}.json").write_text(json.dumps(session))
    requests = hit_rate.read(tmp_path)
    assert [request.blocks.tolist() for request in requests] == [[0], [0, 1], [3, 4], [0, 1, 2], [0, 1, 2]]
    assert hit_rate.replay(requests, policy="lfu", capacity_blocks=10).hit_rate == round(100 * (1 + 2 + 3) / 11, 2)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_the_command_prints_what_it_measured(
    hit_rate: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    policy: str,
) -> None:
    trace = mooncake(tmp_path / "trace.jsonl", [([0], 512), ([0], 512)])
    arguments = ["hit_rate.py", str(trace), "--policy", policy, "--capacity-blocks", "4", "--json"]
    monkeypatch.setattr(sys, "argv", arguments)
    hit_rate.main()
    assert json.loads(capsys.readouterr().out) == {
        "policy": policy,
        "capacity_blocks": 4,
        "hit_rate": 50.0,
        "requests": 2,
        "blocks": 2,
        "unique_blocks": 1,
    }


CONVERSATION = "mooncake/conversation_trace.jsonl"
SYNTHETIC = "mooncake/synthetic_trace.jsonl"
SESSIONS = "claude-code-weka"


@pytest.mark.parametrize(
    ("trace", "capacity", "expected"),
    [
        (CONVERSATION, 10_000, 21.6),
        (SYNTHETIC, 10_000, 43.2),
        (SESSIONS, 20_000, 83.5),
    ],
)
def test_lru_gives_what_another_simulator_gave(
    hit_rate: ModuleType, trace: str, capacity: int, expected: float
) -> None:
    result = hit_rate.replay(_trace(hit_rate, trace), policy="lru", capacity_blocks=capacity)
    assert result.hit_rate == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(("capacity", "lru", "least"), [(4_000, 8.82, 3.0), (100_000, 37.08, -0.1)])
def test_lfu_pays_where_memory_is_tight_and_costs_nothing_where_it_is_not(
    hit_rate: ModuleType, capacity: int, lru: float, least: float
) -> None:
    result = hit_rate.replay(_trace(hit_rate, CONVERSATION), policy="lfu", capacity_blocks=capacity)
    assert result.hit_rate >= lru + least


def _trace(hit_rate: ModuleType, name: str) -> list[object]:
    if not (TRACES / name).exists():
        pytest.skip(f"{TRACES / name} is not there; set KVSTORE_TRACES to the folder of the traces")
    requests: list[object] = hit_rate.read(TRACES / name)
    return requests
