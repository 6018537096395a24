"""The `kvstore` command: one function a subcommand."""

import asyncio
import gc
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

import click

from kvstore.errors import KVStoreError
from kvstore.wire import CLUSTER_SCHEME
from kvstore_server import config
from kvstore_server.daemon import Daemon
from kvstore_server.logs import configure_logs

SWITCH_INTERVAL_S: Final = 0.0002
GC_THRESHOLD = 50_000  # objects made and not freed since the last look for cycles
DEFAULT_ADDRESS: Final = f"unix:{config.Settings().unix_socket}"


@click.group()
@click.version_option(package_name="kvstore")
def main() -> None:
    """A centralized KV cache store for LLM serving."""


@main.command(epilog="Example: kvstore serve --unix-socket /tmp/kv.sock --cpu-capacity 8GiB")
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file; keys as in docs/configuration.md.")
@click.option("--unix-socket", help="Path of the unix socket; empty for none.")
@click.option("--tcp-host", help="Address to listen on; other than loopback only with --ucx-device.")
@click.option("--tcp-port", type=int, help="TCP port; 0 for none.")
@click.option("--ucx-device", help='Device of transfers between hosts, such as "eth0"; empty for none.')
@click.option("--metrics-port", type=int, help="Port of GET /metrics, for Prometheus; 0 for none.")
@click.option("--cpu-capacity", help='Size of the cpu tier, such as "8GiB".')
@click.option("--slab-bytes", help='Size of one slab, such as "64MiB".')
@click.option("--copy-threads", type=int, help="Threads that copy.")
@click.option("--disk-path", help="Directory of the disk tier; empty for none.")
@click.option("--disk-capacity", help='Size of the disk tier, such as "100GiB".')
@click.option("--disk-reserve", help="What stays free on its file system.")
@click.option("--disk-threads", type=int, help="Threads that read and write the disk.")
@click.option("--disk-scrub-bytes-s", help='How fast the disk is checked, such as "4MiB"; 0: not at all.')
@click.option("--write-policy", type=click.Choice(["through", "evict"]), help="When blocks are written to disk.")
@click.option("--remote-url", help='Where cold blocks are copied to, such as "s3://bucket/prefix"; empty for nowhere.')
@click.option("--remote-capacity", help='Size of the objects there, such as "1TiB".')
@click.option("--eviction-policy", type=click.Choice(config.EVICTION_POLICIES), help="Which blocks go first.")
@click.option("--cluster-url", help='Of Redis, such as "redis://10.0.0.1:6379"; empty for a store of one machine.')
@click.option("--cluster-name", help="Name of the store, where several use one Redis.")
@click.option("--node-id", help="Name of this daemon in the store, the same after a restart.")
@click.option("--advertise", multiple=True, help="Address at which others reach it; may be given several times.")
@click.option("--replicas", type=int, help="With how many daemons each block is kept.")
@click.option("--cluster-ttl-s", type=float, help="Seconds without word after which a daemon is gone.")
@click.option("--heartbeat-s", type=float, help="Seconds between the heartbeats of a client.")
@click.option("--prefault/--no-prefault", default=None, help="Take all memory at the start.")
@click.option("--checksums/--no-checksums", default=None, help="Off is for benchmarks.")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="How log lines look.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--json", "as_json", is_flag=True, help="Log as JSON; the same as --log-format json.")
def serve(file: Path | None, as_json: bool, advertise: tuple[str, ...], **flags: object) -> None:
    """Run the daemon until SIGTERM or Ctrl-C.

    Settings come from defaults, then the file, then KVSTORE_* variables, then flags.
    """
    if as_json:
        flags["log_format"] = "json"
    if advertise:
        flags["advertise"] = advertise
    try:
        settings = config.load(file, flags=flags)
        configure_logs(settings)
        asyncio.run(_serve(settings))
    except KVStoreError as error:
        _fail(error)


async def _serve(settings: config.Settings) -> None:
    # A copying thread needs the interpreter for a moment between two jobs; the loop must not keep it for long.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    daemon = Daemon(settings)
    # The collector walks every list of a large index, for cycles that are not there; it should do so rarely.
    gc.set_threshold(GC_THRESHOLD)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await daemon.start()
    await stop.wait()
    await daemon.stop()


@main.command(epilog="Example: kvstore status kvstore://10.0.0.1:7311,10.0.0.2:7311 --json")
@click.argument("address", default=DEFAULT_ADDRESS)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(address: str, as_json: bool) -> None:
    """Show tiers, blocks, hit rate and sessions of the daemon at ADDRESS, and the daemons of its store.

    Of kvstore://HOST:PORT,HOST:PORT, of which one has to answer, only the daemons of the store are shown.
    """
    from kvstore_server.commands.nodes import cluster, render_cluster
    from kvstore_server.commands.status import render, snapshot

    shown: dict[str, Any]
    parts: list[str] = []
    try:
        members = cluster(address)
        if members is not None:
            parts.append(render_cluster(members))
        if members is not None and address.startswith(CLUSTER_SCHEME):
            shown = members
        else:
            shown = snapshot(address) | {"cluster": members}
            parts.append(render(shown))
    except KVStoreError as error:
        _fail(error)
    click.echo(json.dumps(shown, indent=2) if as_json else "\n\n".join(parts))


_token_file = click.option(
    "--token-file", type=click.File(), help="Holds a token for all tenants, where the daemon asks for one."
)


@main.command(epilog="Example: kvstore clear unix:/run/kvstore/kvstore.sock --namespace 3f9c...")
@click.argument("address", default=DEFAULT_ADDRESS)
@click.option("--namespace", default="", help="64 hex digits; all namespaces if not given.")
@_token_file
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def clear(address: str, namespace: str, token_file: TextIO | None, as_json: bool) -> None:
    """Remove committed blocks that are neither leased nor pinned."""
    from kvstore_server.commands.status import clear_blocks

    try:
        removed, kept = clear_blocks(address, namespace, token=token_file.read().strip() if token_file else "")
    except KVStoreError as error:
        _fail(error)
    result = {"blocks_removed": removed, "blocks_kept": kept}
    click.echo(json.dumps(result) if as_json else f"{removed} blocks removed, {kept} kept (leased or pinned)")


def _pin_options(command: Callable[..., None]) -> Callable[..., None]:
    """What `pin` and `unpin` take."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        _token_file,
        click.option(
            "--hashes",
            required=True,
            type=click.Path(exists=True, dir_okay=False, allow_dash=True),
            help="Block hashes, one a line, in hex; - for standard input.",
        ),
        click.option("--namespace", required=True, help="Its first hex digits, as many as tell it from the others."),
        click.argument("address", default=DEFAULT_ADDRESS),
    ):
        command = option(command)
    return command


@main.command(epilog="Example: kvstore pin --namespace 3f9c --hashes system-prompt.txt")
@_pin_options
def pin(**arguments: Any) -> None:
    """Keep blocks of the daemon at ADDRESS from being evicted, until `kvstore unpin` or a restart."""
    _set_pinned(**arguments, pinned=True)


@main.command(epilog="Example: kvstore unpin --namespace 3f9c --hashes - < system-prompt.txt")
@_pin_options
def unpin(**arguments: Any) -> None:
    """Undo `kvstore pin`."""
    _set_pinned(**arguments, pinned=False)


def _set_pinned(
    *, address: str, namespace: str, hashes: str, token_file: TextIO | None, as_json: bool, pinned: bool
) -> None:
    from kvstore_server.commands.pin import read_hashes, set_pinned

    try:
        with click.open_file(hashes, encoding="utf-8", errors="replace") as lines:  # so that any bytes can be shown
            wanted = read_hashes(lines, where=hashes)
        token = token_file.read().strip() if token_file else ""
        count = set_pinned(address, namespace, wanted, pinned=pinned, token=token)
    except KVStoreError as error:
        _fail(error)
    word, missing = "pinned" if pinned else "unpinned", len(wanted) - count
    result = {f"blocks_{word}": count, "blocks_missing": missing}
    click.echo(json.dumps(result) if as_json else f"{count} blocks {word}, {missing} not stored")


@main.command(epilog="Example: kvstore drain kv-2 kvstore://10.0.0.1:7311 --json")
@click.argument("node")
@click.argument("address", default=DEFAULT_ADDRESS)
@_token_file
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def drain(node: str, address: str, token_file: TextIO | None, as_json: bool) -> None:
    """Make the member NODE of a store ready to be stopped: it takes nothing new, and its blocks are copied.

    The exit code is 1 if some could not be copied; run it again then.
    """
    from kvstore_server.commands.drain import drain_node

    try:
        done = drain_node(address, node, token=token_file.read().strip() if token_file else "")
    except KVStoreError as error:
        _fail(error)
    left = done["refused"] + done["failed"]
    text = (
        f"{node} is drained: {done['copied']} blocks copied, {done['there_already']} were there, {left} were not taken"
    )
    click.echo(json.dumps(done) if as_json else text)
    raise SystemExit(bool(done["failed"]))


@main.group()
def bench() -> None:
    """Measure, each figure beside its limit in the same run."""
    # As Ctrl-C does: what was made in between is removed, and the daemons end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@bench.command("local", epilog="Example: kvstore bench local --json")
@click.option("--size", default="1GiB", show_default=True, help="Working set.")
@click.option("--part", default="256KiB", show_default=True, help="Size of a part.")
@click.option("--threads", default=2, show_default=True, help="Copying threads, in the daemon, the client and memcpy.")
@click.option("--rounds", default=7, show_default=True, help="Rounds; figures are medians.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_local(size: str, part: str, threads: int, rounds: int, as_json: bool) -> None:
    """The shared memory path on this host: load, store and match beside plain memcpy."""
    from kvstore_server.commands.bench import run_local

    try:
        figures = run_local(
            size_bytes=config.parse_size(size, name="size"),
            part_bytes=config.parse_size(part, name="part"),
            threads=threads,
            rounds=rounds,
        )
    except KVStoreError as error:
        _fail(error)
    _show(figures, as_json=as_json, width=20)


@bench.command("disk", epilog="Example: kvstore bench disk --path /var/lib/kvstore --json")
@click.option("--size", default="1GiB", show_default=True, help="Working set.")
@click.option("--part", default="1MiB", show_default=True, help="Size of a part, which is a block.")
@click.option("--threads", default=4, show_default=True, help="Threads of the disk tier, and of the plain copies.")
@click.option("--rounds", default=5, show_default=True, help="Rounds; figures are medians.")
@click.option(
    "--path",
    default=Path(),
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory on the file system to measure; what is made there is removed. Default: the current one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_disk(size: str, part: str, threads: int, rounds: int, path: Path, as_json: bool) -> None:
    """The disk tier: writes, reads, restarts and acknowledgements beside plain O_DIRECT copies."""
    from kvstore_server.commands.bench_disk import run_disk

    try:
        figures = run_disk(
            path=path,
            size_bytes=config.parse_size(size, name="size"),
            part_bytes=config.parse_size(part, name="part"),
            threads=threads,
            rounds=rounds,
        )
    except KVStoreError as error:
        _fail(error)
    _show(figures, as_json=as_json, width=26)


@bench.command("ucx", epilog="Example: kvstore bench ucx --json")
@click.option("--device", default="lo", show_default=True, help="Network device; lo: loopback tcp.")
@click.option("--size", default="256MiB", show_default=True, help="Working set.")
@click.option("--threads", default=2, show_default=True, help="Threads of the daemon.")
@click.option("--rounds", default=7, show_default=True, help="Rounds; figures are medians.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_ucx(device: str, size: str, threads: int, rounds: int, as_json: bool) -> None:
    """Transfers between processes over ucx: load and store beside a bare transfer of the same pieces."""
    from kvstore_server.commands.bench_ucx import run_ucx

    try:
        size_bytes = config.parse_size(size, name="size")
        figures = run_ucx(device=device, size_bytes=size_bytes, threads=threads, rounds=rounds)
    except KVStoreError as error:
        _fail(error)
    _show(figures, as_json=as_json, width=22)


@bench.command("clients", epilog="Example: kvstore bench clients --clients 64 --json")
@click.option("--device", default="lo", show_default=True, help="Network device; lo: loopback tcp.")
@click.option("--clients", default=64, show_default=True, help="Processes that load at once.")
@click.option("--size", default="32MiB", show_default=True, help="What each loads, once a round.")
@click.option("--rounds", default=4, show_default=True, help="Rounds of each.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_clients(device: str, clients: int, size: str, rounds: int, as_json: bool) -> None:
    """Many clients over ucx at once, beside one; every byte that they load is compared."""
    from kvstore_server.commands.bench_clients import run_clients

    try:
        size_bytes = config.parse_size(size, name="size")
        figures = run_clients(device=device, num_clients=clients, size_bytes=size_bytes, rounds=rounds)
    except KVStoreError as error:
        _fail(error)
    _show(figures, as_json=as_json, width=22)


@main.command(epilog="Example: kvstore doctor --ucx-device mlx5_0:1")
@click.option("--ucx-device", default="lo", show_default=True, help="Network device of the test over ucx.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(ucx_device: str, as_json: bool) -> None:
    """Say what this machine offers to the store, and test a store of its own over each transport.

    The exit code is 1 if a test failed.
    """
    from kvstore_server.commands.doctor import examine, self_test

    found = examine()
    found["self-test shm"] = self_test("shm", ucx_device)
    if found["transport ucx"].startswith("NIXL"):
        found["self-test ucx"] = self_test("ucx", ucx_device)
    lines = [f"{name:24} {value}" for name, value in found.items()]
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines))
    raise SystemExit(any(value != "ok" for name, value in found.items() if name.startswith("self-test")))


@main.command(epilog="Example: kvstore demo --prompt-tokens 1600")
@click.option("--model", "model_path", type=click.Path(exists=True), help="Folder of a Hugging Face model.")
@click.option("--prompt-tokens", default=1600, show_default=True, help="Length of the shared prefix.")
@click.option("--transport", default="shm", show_default=True, type=click.Choice(["shm", "ucx"]), help="Data path.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def demo(model_path: str | None, prompt_tokens: int, transport: str, as_json: bool) -> None:
    """Run a real model's prefill and decode in two processes through a daemon, and compare their texts."""
    from kvstore_server.commands.demo import run_demo

    raise SystemExit(run_demo(model_path, prompt_tokens, as_json, transport))


def _show(figures: dict[str, float | int], *, as_json: bool, width: int) -> None:
    lines = [f"{name:{width}} {value}" for name, value in figures.items()]
    click.echo(json.dumps(figures, indent=2) if as_json else "\n".join(lines))


def _fail(error: KVStoreError) -> NoReturn:
    click.echo(f"kvstore: {error}", err=True)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
