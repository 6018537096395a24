"""Prefill and decode on one machine: `pd.py up` starts a store, two vLLM servers and a proxy; `pd.py down` stops them.

    python examples/vllm_pd/pd.py up --model MODEL     # then talk OpenAI to http://127.0.0.1:8000/v1
    python examples/vllm_pd/pd.py down

With `--transport ucx` store, prefill and decode are on a host each: network namespaces on a switch (README.md).

Ports are `--port` (proxy) and the two behind it. Logs and process ids lie in `--folder`.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from kvstore.errors import Unsupported
from kvstore_server.commands.hosts import DEVICE, Hosts

HERE = Path(__file__).parent
START_S = 300.0
STOP_S = 30.0
STORE_PORT = 7311  # where the store is on a host of its own


def up(arguments: argparse.Namespace) -> None:
    """All four answer. If one does not, all are stopped."""
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.pid")):
        sys.exit(f"{folder}: something runs from there already; run `pd.py down` first")
    hosts = make_hosts(arguments) if arguments.transport == "ucx" else None
    proxy, prefill, decode = (arguments.port + index for index in range(3))
    urls = {}
    try:
        start(folder, "store", store(arguments, hosts))
        for name, port, role in (("prefill", prefill, "kv_producer"), ("decode", decode, "kv_consumer")):
            start(folder, name, engine(arguments, hosts, name, port, role))
            urls[name] = f"http://{hosts.address(name) if hosts else '127.0.0.1'}:{port}"
        dispatch = ["--port", str(proxy), "--dispatch", arguments.dispatch]
        behind = ["--prefill", urls["prefill"], "--decode", urls["decode"]]
        start(folder, "proxy", [sys.executable, str(HERE / "proxy.py"), *behind, *dispatch])
        urls["proxy"] = f"http://127.0.0.1:{proxy}"
        for name, url in urls.items():
            wait_for(folder, name, f"{url}/health")
    except BaseException:
        down(arguments)
        raise
    print(f"prefill: {urls['prefill']}, decode: {urls['decode']} (logs in {folder})")
    print(f"ready: {urls['proxy']}/v1")


def make_hosts(arguments: argparse.Namespace) -> Hosts:
    """The hosts of store, prefill and decode, which this machine reaches; a file says to `down` that they are there."""
    hosts = hosts_on(arguments.network)
    try:
        hosts.make()
        hosts.join()
    except Unsupported as error:
        sys.exit(f"--transport ucx: {error}")
    (arguments.folder / "network").write_text(arguments.network)
    return hosts


def hosts_on(network: str) -> Hosts:
    return Hosts(f"kv-{network}", "store", "prefill", "decode", network=network)


def store(arguments: argparse.Namespace, hosts: Hosts | None) -> list[str]:
    """The command of the daemon."""
    where = hosts.command("store") if hosts else ()
    tcp = ("--tcp-host", hosts.address("store"), "--tcp-port", str(STORE_PORT)) if hosts else ("--tcp-port", "0")
    return [
        *(*where, sys.executable, "-m", "kvstore_server.cli", "serve"),
        *("--unix-socket", str(arguments.folder / "kvstore.sock"), *tcp, "--cpu-capacity", arguments.capacity),
        *(("--ucx-device", DEVICE) if hosts else ()),
    ]


def engine(arguments: argparse.Namespace, hosts: Hosts | None, name: str, port: int, role: str) -> list[str]:
    """The command of one vLLM server. `python -m` works whatever name vLLM was installed under."""
    where, host, options = (), "127.0.0.1", {"address": f"unix:{arguments.folder / 'kvstore.sock'}"}
    if hosts:
        where, host = hosts.command(name), hosts.address(name)
        options = {"address": f"{hosts.address('store')}:{STORE_PORT}", "transport": "ucx", "ucx_device": DEVICE}
    transfer = {
        "kv_connector": "KVStoreConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": options,
    }
    return [
        *(*where, sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", arguments.model, "--host", host, "--port", str(port)),
        *("--kv-transfer-config", json.dumps(transfer)),
        *arguments.engine_arguments,
    ]


def start(folder: Path, name: str, command: list[str]) -> None:
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    (folder / f"{name}.pid").write_text(str(process.pid))


def wait_for(folder: Path, name: str, url: str) -> None:
    deadline = time.monotonic() + START_S
    pid = int((folder / f"{name}.pid").read_text())
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if os.waitpid(pid, os.WNOHANG) != (0, 0):
                break
            time.sleep(0.5)
    sys.exit(f"{name} did not come up; see {folder / (name + '.log')}")


def down(arguments: argparse.Namespace) -> None:
    """None of them runs, and their hosts are gone; the store goes last, so that nobody loses it before. Idempotent."""
    for name in ("proxy", "decode", "prefill", "store"):
        file = arguments.folder / f"{name}.pid"
        if file.exists():
            stop(int(file.read_text()))
            file.unlink()
    network = arguments.folder / "network"
    if network.exists():
        hosts_on(network.read_text()).remove()
        network.unlink()


def stop(pid: int) -> None:
    """The process and those that it started have ended, or were killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline:
            try:
                os.killpg(pid, number)
            except ProcessLookupError:
                return
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # where `up` stops what it started
            time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("up", "down"))
    parser.add_argument("--model", help="a folder, or a name on the hub")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--capacity", default="2GiB", help="memory of the store")
    parser.add_argument("--dispatch", choices=("auto", "concurrent", "sequential"), default="auto")
    parser.add_argument("--transport", choices=("shm", "ucx"), default="shm")
    parser.add_argument("--network", default="198.18.77", help="of the hosts for ucx, without the last number")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "kvstore-vllm-pd")
    arguments, arguments_of_engines = parser.parse_known_args()
    arguments.engine_arguments = arguments_of_engines  # whatever else is given goes to both vLLM servers
    if arguments.command == "up":
        if not arguments.model:
            parser.error("up needs --model")
        up(arguments)
    else:
        down(arguments)


if __name__ == "__main__":
    main()
