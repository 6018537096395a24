"""The `kvstore` command: one function a subcommand."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import click

from kvstore.errors import KVStoreError
from kvstore_server import config
from kvstore_server.daemon import Daemon
from kvstore_server.logs import configure_logs


@click.group()
@click.version_option(package_name="kvstore")
def main() -> None:
    """A centralized KV cache store for LLM serving."""


@main.command(epilog="Example: kvstore serve --unix-socket /tmp/kv.sock --cpu-capacity 8GiB")
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file; keys as in docs/configuration.md.")
@click.option("--unix-socket", help="Path of the unix socket; empty for none.")
@click.option("--tcp-host", help="Loopback address to listen on.")
@click.option("--tcp-port", type=int, help="TCP port; 0 for none.")
@click.option("--cpu-capacity", help='Size of the cpu tier, such as "8GiB".')
@click.option("--slab-bytes", help='Size of one slab, such as "64MiB".')
@click.option("--copy-threads", type=int, help="Threads that copy.")
@click.option("--heartbeat-s", type=float, help="Seconds between the heartbeats of a client.")
@click.option("--prefault/--no-prefault", default=None, help="Take all memory at the start.")
@click.option("--checksums/--no-checksums", default=None, help="Off is for benchmarks.")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="How log lines look.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--json", "as_json", is_flag=True, help="Log as JSON; the same as --log-format json.")
def serve(file: Path | None, as_json: bool, **flags: object) -> None:
    """Run the daemon until SIGTERM or Ctrl-C.

    Settings come from defaults, then the file, then KVSTORE_* variables, then flags.
    """
    if as_json:
        flags["log_format"] = "json"
    try:
        settings = config.load(file, flags=flags)
        configure_logs(settings)
        asyncio.run(_serve(settings))
    except KVStoreError as error:
        _fail(error)


async def _serve(settings: config.Settings) -> None:
    daemon = Daemon(settings)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await daemon.start()
    await stop.wait()
    await daemon.stop()


def _fail(error: KVStoreError) -> None:
    click.echo(f"kvstore: {error}", err=True)
    raise SystemExit(2)


def _show(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


if __name__ == "__main__":
    main()
