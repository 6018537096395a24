"""`kvstore pin` and `kvstore unpin`, as an operator types them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from builders import chain, spec
from click.testing import CliRunner, Result
from service.harness import DaemonProcess, store

from kvstore.spec import KVSpec
from kvstore.types import BlockHash
from kvstore.wire import MAX_HASHES
from kvstore_client import KVClient
from kvstore_server.cli import main
from kvstore_server.commands import pin as command

KV = spec(layers=2, bytes_per_part=16384)
HASHES = chain(6, of=KV)
ABSENT = chain(3, of=KV, seed=1)

Connect = Callable[..., KVClient]


def kvstore(*arguments: str, text: str = "") -> Result:
    return CliRunner().invoke(main, list(arguments), input=text)


def in_hex(hashes: Sequence[BlockHash]) -> str:
    return "".join(f"{block_hash.hex()}\n" for block_hash in hashes)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of the blocks that are stored."""
    path = tmp_path / "hashes.txt"
    path.write_text(in_hex(HASHES))
    return path


@pytest.fixture
def arguments(daemon: DaemonProcess, connect: Connect, file: Path) -> list[str]:
    """Of a command that works: the daemon has the blocks of the file."""
    store(connect(daemon, KV), HASHES)
    return [daemon.address, "--namespace", KV.namespace.hex(), "--hashes", str(file)]


def test_blocks_are_kept_from_eviction_until_they_are_unpinned(
    make_daemon: Callable[..., DaemonProcess], connect: Connect, file: Path
) -> None:
    daemon = make_daemon(cpu_capacity="1MiB")
    client = connect(daemon, KV)
    store(client, HASHES)
    where = [daemon.address, "--namespace", KV.namespace.hex(), "--hashes", str(file)]

    def others_come(seeds: range) -> int:
        """How many of the blocks are stored after that."""
        for seed in seeds:
            store(client, chain(20, of=KV, seed=seed))
        return client.match(HASHES, lease="").num_blocks

    assert kvstore("pin", *where).output == "6 blocks pinned, 0 not stored\n"
    assert others_come(range(1, 5)) == 6
    assert daemon.stats().blocks_pinned == 6
    assert kvstore("unpin", *where).output == "6 blocks unpinned, 0 not stored\n"
    assert daemon.stats().blocks_pinned == 0
    assert others_come(range(5, 9)) == 0


def test_blocks_that_are_not_stored_are_counted_and_no_error(arguments: list[str], file: Path) -> None:
    file.write_text(in_hex(HASHES[:4] + ABSENT))
    result = kvstore("pin", *arguments, "--json")
    assert json.loads(result.output) == {"blocks_pinned": 4, "blocks_missing": 3}
    assert result.exit_code == 0
    result = kvstore("unpin", *arguments, "--json")
    assert json.loads(result.output) == {"blocks_unpinned": 4, "blocks_missing": 3}


def test_hashes_come_from_standard_input_in_any_case_and_count_once(
    arguments: list[str], daemon: DaemonProcess
) -> None:
    text = f"\n  {in_hex(HASHES[:2]).upper()}\n{in_hex(HASHES[1:3])}"
    assert kvstore("pin", *arguments[:-1], "-", text=text).output == "3 blocks pinned, 0 not stored\n"
    assert daemon.stats().blocks_pinned == 3


def test_many_hashes_go_in_several_requests(
    arguments: list[str], daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.BATCH_HASHES <= MAX_HASHES
    monkeypatch.setattr(command, "BATCH_HASHES", 4)
    requests = []
    monkeypatch.setattr(command, "pack", lambda hashes: requests.append(len(hashes)) or b"".join(hashes))
    assert kvstore("pin", *arguments).output == "6 blocks pinned, 0 not stored\n"
    assert daemon.stats().blocks_pinned == 6
    assert requests == [4, 2]


def beginning(kv: KVSpec, other: KVSpec) -> int:
    """How many hex digits their namespaces have in common."""
    pairs = zip(kv.namespace.hex(), other.namespace.hex(), strict=True)
    return next(number for number, (one, another) in enumerate(pairs) if one != another)


def test_the_first_digits_of_a_namespace_are_enough_if_they_tell_it_from_the_others(
    arguments: list[str], daemon: DaemonProcess, connect: Connect
) -> None:
    digits = KV.namespace.hex()
    models = (spec(model=f"model-{number}") for number in range(1000))
    other = next(kv for kv in models if beginning(KV, kv) == 1)
    connect(daemon, other)

    assert kvstore("pin", daemon.address, "--namespace", digits[:2].upper(), *arguments[3:]).exit_code == 0
    assert daemon.stats().blocks_pinned == 6

    result = kvstore("unpin", daemon.address, "--namespace", digits[0], *arguments[3:])
    assert result.exit_code == 2
    assert f"expected digits of only one, got '{digits[0]}' of " in result.output
    assert digits[:12] in result.output
    assert other.namespace.hex()[:12] in result.output
    assert "give more of them" in result.output
    assert daemon.stats().blocks_pinned == 6


def test_an_unknown_namespace_is_told_which_there_are(arguments: list[str], daemon: DaemonProcess) -> None:
    unknown = "0" if KV.namespace.hex()[0] != "0" else "1"
    result = kvstore("pin", daemon.address, "--namespace", unknown, *arguments[3:])
    assert result.exit_code == 2
    assert f"known there ({KV.namespace.hex()[:12]}…), got '{unknown}'" in result.output
    assert "kvstore status" in result.output


@pytest.mark.parametrize("text", ["", "model", "3f 9c", "0" * 65])
def test_a_namespace_that_is_no_hex_is_refused(arguments: list[str], daemon: DaemonProcess, text: str) -> None:
    result = kvstore("pin", daemon.address, "--namespace", text, *arguments[3:])
    assert result.exit_code == 2
    assert f"namespace: expected 1 to 64 hex digits, got {text!r}" in result.output
    assert daemon.stats().blocks_pinned == 0


@pytest.mark.parametrize("line", ["3f9c", "0" * 63, "0" * 66, "g" * 64, " ".join(["00"] * 21), "\udcff" * 64])
def test_a_line_that_is_no_hash_is_named_and_nothing_is_pinned(
    arguments: list[str], daemon: DaemonProcess, file: Path, line: str
) -> None:
    file.write_text(f"{in_hex(HASHES[:2])}\n{line}\n{in_hex(HASHES[2:])}", errors="surrogateescape")
    result = kvstore("pin", *arguments)
    assert result.exit_code == 2
    assert f"{file}:4: expected a block hash of 64 hex digits, got" in result.output
    assert "one hash a line" in result.output
    assert daemon.stats().blocks_pinned == 0


def test_a_file_without_hashes_is_refused(arguments: list[str], file: Path) -> None:
    file.write_text("\n\n")
    result = kvstore("pin", *arguments)
    assert result.exit_code == 2
    assert f"{file}: expected at least one block hash, got none" in result.output


def test_where_no_daemon_is_the_error_says_what_to_do(file: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'none.sock'}"
    result = kvstore("pin", address, "--namespace", "3f9c", "--hashes", str(file))
    assert result.exit_code == 2
    assert f"{address}: no daemon answers there; start one with `kvstore serve`" in result.output


@pytest.mark.parametrize(("token", "says"), [("", "token"), ("team", "all tenants"), ("root", "6 blocks pinned")])
def test_where_tokens_are_asked_for_one_for_all_tenants_is_needed(
    make_daemon: Callable[..., DaemonProcess], connect: Connect, file: Path, tmp_path: Path, token: str, says: str
) -> None:
    (tmp_path / "kvstore.toml").write_text('[tokens]\nteam = ["team-a"]\nroot = ["*"]\n')
    (tmp_path / "token").write_text(f"{token}\n")
    daemon = make_daemon(config=tmp_path / "kvstore.toml")
    store(connect(daemon, KV, token="root"), HASHES)
    where = [daemon.address, "--namespace", KV.namespace.hex(), "--hashes", str(file)]
    result = kvstore("pin", *where, "--token-file", str(tmp_path / "token"))
    assert says in result.output
    assert result.exit_code == (0 if token == "root" else 2)
    assert daemon.stats().blocks_pinned == (6 if token == "root" else 0)


@pytest.mark.parametrize("name", ["pin", "unpin"])
def test_the_help_has_an_example(name: str) -> None:
    assert f"Example: kvstore {name} --namespace 3f9c --hashes" in kvstore(name, "--help").output
