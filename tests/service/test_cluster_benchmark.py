"""Small runs of the benchmarks of several daemons: what they say is for larger runs on a quiet machine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from service.redis_server import needs_redis

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZES = ["--rounds", "3", "--blocks", "200", "--part-bytes", "4096"]


def result_of(name: str, *more: str) -> dict[str, Any]:
    command = [sys.executable, BENCHMARKS / name, *SIZES, *more, "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def test_several_daemons_beside_one() -> None:
    result = result_of("cluster.py")
    assert (result["daemons"], result["rounds"], result["blocks"]) == (3, 3, 200)
    assert set(result["match"]) == {"one", "cluster", "ratio"}
    for name in ("one", "cluster"):
        assert 0 < result["match"][name]["p50_ms"] <= result["match"][name]["p99_ms"]
        for what in ("store", "load"):
            assert 0 <= result[what][name]["median"] <= result[what][name]["best"]


@needs_redis
def test_redis_down_beside_redis_there() -> None:
    result = result_of("cluster_redis.py", "--phases", "2")
    assert (result["phases"], result["rounds"], result["wrong_bytes"]) == (2, 3, 0)
    for step in ("store", "match", "load"):
        assert set(result[step]) == {"with", "without", "ratio"}
        for name in ("with", "without"):
            assert 0 < result[step][name]["p50_ms"] <= result[step][name]["p99_ms"]
