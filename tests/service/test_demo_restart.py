"""The demo's restart, without its model: what was stored before kill -9 is read from disk after it."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from builders import chain, rows, spec
from service.harness import DEADLINE_S, store

from kvstore_client import BlockRows, ClientOptions, KVClient, Outcome
from kvstore_server.commands.demo.model import DemoFailed
from kvstore_server.commands.demo.processes import Children
from kvstore_server.commands.demo.restart import ask, kill_and_restart, wait_until_durable

KV = spec(layers=3, bytes_per_part=8192)
HASHES = chain(40, of=KV)
FLAGS = ("--cpu-capacity", "8MiB", "--slab-bytes", "1MiB", "--disk-capacity", "16MiB", "--no-prefault")


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("d")


@pytest.fixture
def children(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Children]:
    """The parameter is what the disk keeps free. The user's folder for temporary files is `tmp_path`."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    reserve = ("--disk-reserve", getattr(request, "param", "0"))
    children = Children(folder, Path("no model"), daemon_flags=(*FLAGS, *reserve))
    yield children
    children.end()


def connect(children: Children) -> KVClient:
    client = KVClient(children.address, KV, options=ClientOptions(timeout_s=DEADLINE_S))
    client.wait_ready(DEADLINE_S)
    return client


def test_the_next_daemon_reads_from_disk_what_the_killed_one_stored(children: Children) -> None:
    daemon = children.start_daemon()
    with closing(connect(children)) as writer:
        assert store(writer, HASHES) == [Outcome.STORED] * 40

        restart, successor = kill_and_restart(children, daemon)

    with pytest.raises(DemoFailed, match=f"daemon: the process ended with status -{signal.SIGKILL:d}"):
        daemon.check()
    assert (restart.num_written, restart.num_restored) == (40, 40)
    assert restart.disk_io in ("O_DIRECT", "buffered")
    target = np.zeros((40, KV.block_bytes), np.uint8)
    with closing(connect(children)) as reader:
        assert reader.load(HASHES, into=BlockRows(target)).wait().num_loaded == 40
    assert (target == rows(KV, HASHES)).all()
    assert ask(children, successor, timeout_s=DEADLINE_S).counters.blocks_risen == 40


def test_what_killed_and_ended_daemons_leave_is_in_the_folder_of_the_run(
    children: Children, folder: Path, tmp_path: Path
) -> None:
    daemon = children.start_daemon()
    ask(children, daemon, timeout_s=DEADLINE_S)

    kill_and_restart(children, daemon)
    children.end()

    assert list(tmp_path.iterdir()) == []
    assert {"daemon.log", "disk"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("children", ["1000TiB"], indirect=True)
def test_blocks_that_cannot_be_written_fail_the_demo_with_the_reason_and_the_daemon_lives(children: Children) -> None:
    daemon = children.start_daemon()
    with closing(connect(children)) as writer:
        store(writer, HASHES)

        with pytest.raises(DemoFailed, match=r"40 of 40 blocks were not written to disk; free some space in [^;]*"):
            kill_and_restart(children, daemon)

    daemon.check()


def test_a_daemon_that_does_not_answer_fails_the_demo_at_the_deadline(children: Children) -> None:
    daemon = children.start_daemon()
    ask(children, daemon, timeout_s=DEADLINE_S)
    os.kill(daemon.pid, signal.SIGSTOP)

    with pytest.raises(DemoFailed, match="daemon: no answer within 0 s"):
        ask(children, daemon, timeout_s=0.2)

    os.kill(daemon.pid, signal.SIGCONT)
    assert wait_until_durable(children, daemon) == 0
