"""Where the daemon listens: loopback TCP beside the unix socket, and nowhere else."""

import socket
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from builders import chain, rows, spec
from service.harness import DEADLINE_S, DaemonProcess

from kvstore_client import BlockRows, ClientOptions, KVClient

KV = spec()
HASHES = chain(4, of=KV)


@pytest.fixture
def port() -> int:
    """One that is free, or was a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


def test_a_client_that_comes_by_tcp_stores_and_loads_over_shared_memory(
    make_daemon: Callable[..., DaemonProcess], port: int
) -> None:
    make_daemon(tcp_port=port)
    out = np.zeros((4, KV.block_bytes), np.uint8)
    with KVClient(f"127.0.0.1:{port}", KV, options=ClientOptions(timeout_s=DEADLINE_S)) as client:
        client.wait_ready(DEADLINE_S)
        with client.store(HASHES) as write:
            write.put_blocks(rows(KV, HASHES))
        with client.match(HASHES) as match:
            assert client.load(match, into=BlockRows(out)).wait().num_loaded == 4
    assert np.array_equal(out, rows(KV, HASHES))


def test_a_second_daemon_on_one_port_does_not_start(make_daemon: Callable[..., DaemonProcess], port: int) -> None:
    make_daemon(tcp_port=port)
    second = subprocess.run(
        [sys.executable, "-m", "kvstore_server.cli", "serve", "--unix-socket", "", "--tcp-port", str(port)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert second.returncode == 2
    assert f"127.0.0.1:{port}: expected an address that is free" in second.stderr


def test_an_address_that_others_could_reach_is_refused() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "kvstore_server.cli", "serve", "--tcp-host", "0.0.0.0"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert result.returncode == 2
    assert "tcp_host" in result.stderr
    assert "loopback" in result.stderr
