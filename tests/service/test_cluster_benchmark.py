"""A small run of the benchmark of several daemons beside one: what it says is for larger runs on a quiet machine."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "cluster.py"


def test_the_command_prints_what_it_measured() -> None:
    sizes = ["--rounds", "3", "--blocks", "200", "--part-bytes", "4096"]
    run = subprocess.run([sys.executable, BENCHMARK, *sizes, "--json"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert (result["daemons"], result["rounds"], result["blocks"]) == (3, 3, 200)
    assert set(result["match"]) == {"one", "cluster", "ratio"}
    for name in ("one", "cluster"):
        assert 0 < result["match"][name]["p50_ms"] <= result["match"][name]["p99_ms"]
        for what in ("store", "load"):
            assert 0 <= result[what][name]["median"] <= result[what][name]["best"]
