"""`kvstore doctor`: what it finds, and a store of its own that it tests."""

import json
import subprocess
import sys

import pytest
from service.harness import NO_UCX


def doctor(*arguments: str) -> tuple[int, dict[str, str]]:
    command = [sys.executable, "-m", "kvstore_server.cli", "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    found: dict[str, str] = json.loads(done.stdout)
    return done.returncode, found


def test_it_tests_a_store_over_each_transport_there_is() -> None:
    """Covers: G3."""
    code, found = doctor()
    tests = {name: value for name, value in found.items() if name.startswith("self-test")}
    assert tests == dict.fromkeys(["self-test shm"] if NO_UCX else ["self-test shm", "self-test ucx"], "ok")
    assert code == 0
    for name in ("memlock limit", "network devices", "RDMA devices", "GPUDirect", "transport shm", "transport ucx"):
        assert found[name], name


@pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX)
def test_a_device_that_is_not_there_fails_its_test_and_is_named() -> None:
    code, found = doctor("--ucx-device", "nowhere0")
    assert code == 1
    assert found["self-test shm"] == "ok"
    assert "nowhere0" in found["self-test ucx"]
