"""The demo over ucx, without its model: on hosts of their own where they can be made, and these are gone at its end."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from builders import spec
from service.harness import DEADLINE_S, NO_UCX, Child, eventually, made_hosts

from kvstore.errors import Unsupported
from kvstore_server.commands.demo.processes import Children
from kvstore_server.commands.demo.restart import ask
from kvstore_server.commands.demo.way import HOSTS, way_by
from kvstore_server.commands.hosts import Hosts

NAMESPACES = Path("/run/netns")
FLAGS = ("--cpu-capacity", "64MiB", "--slab-bytes", "1MiB", "--disk-capacity", "64MiB", "--disk-reserve", "0")
with_ucx = pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Not made; skips the test where they cannot be."""
    with made_hosts(*HOSTS) as hosts:
        hosts.remove()
        yield hosts


@pytest.fixture
def transport() -> str:
    return "ucx"


def there(prefix: str) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"{prefix}-*")]


@with_ucx
def test_daemon_and_engines_are_on_hosts_of_their_own(
    hosts: Hosts, tmp_path_factory: pytest.TempPathFactory, child: Callable[..., Child]
) -> None:
    way = way_by("ucx", hosts)
    assert hosts.namespace("store") in way.says
    children = Children(tmp_path_factory.mktemp("d"), Path("no model"), daemon_flags=FLAGS, way=way)
    try:
        daemon = children.start_daemon()
        ask(children, daemon, timeout_s=DEADLINE_S)
        fields = {"layers": 2, "bytes_per_part": 8192}
        client = child("round_trip", prefix=way.to_engines, address=way.address, fields=fields, length=8, seed=1)
        assert client.step() == "stored 8 loaded 8 wrong 0"
        assert ask(children, daemon, timeout_s=DEADLINE_S).counters.bytes_stored == 8 * spec(**fields).block_bytes
    finally:
        children.end()


def test_where_there_is_no_ip_the_way_is_loopback_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    way = way_by("ucx", Hosts("kv-none", *HOSTS))
    assert "loopback, and not between network namespaces (network namespaces: there is no `ip` here" in way.says
    assert (way.to_daemon, way.to_engines, way.address) == ((), (), "")
    assert way.daemon_flags[-2:] == ("--ucx-device", "lo")


def test_hosts_that_cannot_all_be_made_leave_none(hosts: Hosts) -> None:
    prefix = f"{hosts.namespace('')}broken"
    with pytest.raises(Unsupported, match=r"address add no\.address"):
        Hosts(prefix, *HOSTS, network="no.address").make()
    assert there(prefix) == []


def test_hosts_that_are_there_already_stay_as_they_are(hosts: Hosts) -> None:
    hosts.make()
    with pytest.raises(Unsupported, match="it is there already"):
        hosts.make()
    assert len(there(hosts.namespace("").rstrip("-"))) == 3


@with_ucx
@pytest.mark.skipif(not find_spec("transformers"), reason="the demo's packages are not installed")
@pytest.mark.parametrize("early", [True, False], ids=["while hosts are made", "while engines start"])
def test_a_demo_that_is_interrupted_leaves_no_host(hosts: Hosts, tmp_path: Path, early: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-m", "kvstore_server.cli", "demo", "--transport", "ucx", "--model", str(tmp_path)]
    # Whoever runs the tests in the background of a shell has it ignored, and so would all that they start.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    demo = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heeds)
    assert demo.stderr is not None
    try:
        if early:
            eventually(lambda: there(f"kvstore-demo-{demo.pid}") or demo.poll() is not None)
        else:
            assert any(line.startswith("starting the daemon") for line in demo.stderr)
            assert len(there(f"kvstore-demo-{demo.pid}")) == 3
        demo.send_signal(signal.SIGINT)
        _, said = demo.communicate(timeout=DEADLINE_S)
    finally:
        demo.kill()
    assert demo.returncode == 130, said
    assert there(f"kvstore-demo-{demo.pid}") == []
