"""Clients of another host that lie, about who they are and what they may touch: refused, and the daemon goes on.

One daemon for all of them, which is to live on after each.
"""

import json
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
from builders import chain, rows, spec
from service.harness import NO_UCX, Child, DaemonProcess, RawStream, eventually, store

from kvstore.errors import BlockMissing, InvalidRequest, StoreFull, StoreUnavailable, Unsupported
from kvstore.hashing import pack
from kvstore.transport.ucx import MAX_METADATA_BYTES, Agent
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import pack_u32, pack_u64, unpack_u64
from kvstore_client import KVClient, Outcome

pytestmark = pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX)

FIELDS: dict[str, Any] = {"layers": 2, "bytes_per_part": 8192}
KV = spec(**FIELDS)
HASHES = chain(4, of=KV)
DATA = rows(KV, HASHES)
SIZE = DATA.size
DAEMON_FLAGS = {"ucx_device": "lo"}

Connect = Callable[..., KVClient]
Raw = Callable[..., RawStream]


@pytest.fixture
def transport() -> str:
    return "ucx"


@pytest.fixture
def daemon(shared: DaemonProcess) -> DaemonProcess:
    return shared


class Liar:
    """A session, and an agent with the name that it was given, or another."""

    def __init__(self, stack: ExitStack, stream: RawStream, *, name: str = "") -> None:
        self.stream = stream
        self.name = name or stream.welcome.ucx.agent_name  # type: ignore[attr-defined]
        self.agent = stack.enter_context(closing(Agent(self.name, device="lo")))
        self.memory = np.full(SIZE, 3, np.uint8)
        self.secret = np.full(SIZE, 9, np.uint8)  # which it never registers
        self.address = self.memory.ctypes.data
        self.agent.register(self.address, SIZE, device_id=1)
        self.metadata = self.agent.metadata(self.address, device_id=1)

    def register(self, **fields: Any) -> pb.Status:
        told = {"region": 1, "size_bytes": SIZE, "address": self.address, "metadata": self.metadata}
        return self.stream.ask(register_region=pb.RegisterRegion(**told | fields)).status

    def fetch(self, located: pb.Located, places: list[int], **fields: Any) -> pb.ServerMessage:
        told = {
            "hashes": pack(HASHES),
            "generations": located.generations,
            "parts": pack_u32([0]),
            "region": 1,
            "offsets": pack_u64(places),
        }
        return self.stream.ask(fetch=pb.Fetch(**told | fields))

    def locate(self) -> pb.Located:
        return self.stream.ask(load=pb.Load(hashes=pack(HASHES), lease="a")).located


@pytest.fixture
def honest(daemon: DaemonProcess, connect: Connect) -> KVClient:
    """Another client, which has stored something."""
    client = connect(daemon, KV)
    assert store(client, HASHES) == [Outcome.STORED] * 4
    return client


@pytest.fixture
def liar(daemon: DaemonProcess, honest: KVClient, raw: Raw, stack: ExitStack) -> Liar:
    return Liar(stack, raw(daemon, KV))


def all_right(client: KVClient, daemon: DaemonProcess) -> bool:
    """The other client's blocks can be loaded, and stores go on."""
    target = np.zeros_like(DATA)
    loaded = client.load(HASHES, into=target.reshape(4, 2, -1).transpose(1, 0, 2)).wait()
    others = chain(2, of=KV, seed=daemon.stats().counters.blocks_stored)
    return loaded.num_loaded == 4 and (target == DATA).all() and store(client, others) == [Outcome.STORED] * 2


def test_a_daemon_tells_a_client_a_name_and_nothing_about_its_memory(daemon: DaemonProcess, raw: Raw) -> None:
    first, second = (raw(daemon, KV).welcome.ucx for _ in range(2))  # type: ignore[attr-defined]
    assert [field.name for field, _ in first.ListFields()] == ["agent_name"]
    assert len(first.agent_name) == 32
    assert first.agent_name != second.agent_name


def test_a_daemon_without_ucx_says_so(make_daemon: Callable[..., DaemonProcess], raw: Raw) -> None:
    """Covers: G3."""
    daemon = make_daemon(ucx_device="")
    stream = raw(daemon, KV)
    assert not stream.welcome.HasField("ucx")  # type: ignore[attr-defined]
    request = pb.RegisterRegion(region=1, size_bytes=SIZE, address=4096, metadata=b"x")
    status = stream.ask(register_region=request).status
    assert (status.code, "ucx_device" in status.message) == (Unsupported.code, True)


def test_metadata_with_another_name_is_refused_and_the_agent_of_that_name_stays(
    daemon: DaemonProcess, honest: KVClient, raw: Raw, stack: ExitStack
) -> None:
    """Covers: A19. Taken in, it would put the agent out that has the name."""
    session = honest._link.channel.current
    assert session is not None
    liar = Liar(stack, raw(daemon, KV), name=session.agent_name)

    status = liar.register()

    assert status.code == InvalidRequest.code
    assert "agent name" in status.message
    assert all_right(honest, daemon)


@pytest.mark.parametrize("what", ["address", "size", "device"])
def test_metadata_that_does_not_describe_the_region_is_refused(
    daemon: DaemonProcess, honest: KVClient, liar: Liar, what: str
) -> None:
    fields: dict[str, Any] = {"address": liar.secret.ctypes.data}
    if what == "size":
        fields = {"size_bytes": SIZE + 1}
    elif what == "device":
        fields = {"region": 2}
    status = liar.register(**fields)
    assert status.code == InvalidRequest.code
    assert "describe" in status.message
    assert all_right(honest, daemon)


def test_forged_metadata_names_memory_of_the_liar_only(daemon: DaemonProcess, honest: KVClient, liar: Liar) -> None:
    """With the address changed in the metadata, too, the daemon writes to memory of the liar's own that it never
    registered: over tcp nobody checks that, and nobody else is harmed."""
    before, after = (memory.ctypes.data.to_bytes(8, "little") for memory in (liar.memory, liar.secret))
    forged = liar.metadata.replace(before, after)
    assert forged != liar.metadata
    assert liar.register(address=liar.secret.ctypes.data, metadata=forged).code == 0
    liar.fetch(liar.locate(), [0, 8192, 16384, 24576])
    assert (liar.secret[:8192] == DATA[0][:8192]).all()
    assert all_right(honest, daemon)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"metadata": b""}, InvalidRequest),
        ({"metadata": b"garbage" * 99}, InvalidRequest),
        ({"metadata": bytes(MAX_METADATA_BYTES + 1)}, InvalidRequest),
        ({"size_bytes": 0}, InvalidRequest),
        ({"address": 0}, InvalidRequest),
        ({"address": (1 << 63) - 1}, InvalidRequest),
        ({"address": (1 << 64) - 1}, InvalidRequest),
        ({"size_bytes": 1 << 50}, StoreFull),
    ],
)
def test_a_region_that_makes_no_sense_is_refused_and_its_id_can_be_used_again(
    daemon: DaemonProcess, liar: Liar, fields: dict[str, Any], code: type
) -> None:
    assert liar.register(**fields).code == code.code
    assert daemon.stats().sessions[-1].region_bytes == 0
    assert liar.register().code == 0
    again = liar.register()
    assert (again.code, "in use" in again.message) == (InvalidRequest.code, True)


def test_regions_that_overlap_can_each_be_used_and_one_that_is_dropped_takes_no_other_along(
    daemon: DaemonProcess, honest: KVClient, liar: Liar
) -> None:
    """Covers: E13."""
    inner = liar.address + 8192
    liar.agent.register(inner, SIZE - 8192, device_id=2)
    second = {
        "region": 2,
        "address": inner,
        "size_bytes": SIZE - 8192,
        "metadata": liar.agent.metadata(inner, device_id=2),
    }
    assert liar.register().code == liar.register(**second).code == 0
    located = liar.locate()
    places = [0, 8192, 16384, 24576]
    for _ in range(2):  # what is dropped already is dropped
        assert liar.stream.ask(drop_regions=pb.DropRegions(regions=[1])).HasField("regions_dropped")

    assert liar.fetch(located, places).status.code == BlockMissing.code
    assert not liar.fetch(located, places, region=2).fetched.errors
    assert (liar.memory[8192:40960].reshape(4, -1) == DATA[:, :8192]).all()
    assert (liar.memory[:8192] == 3).all()
    assert liar.register().code == 0
    assert not liar.fetch(located, places).fetched.errors
    assert (liar.memory[:32768].reshape(4, -1) == DATA[:, :8192]).all()
    assert all_right(honest, daemon)


@pytest.mark.slow
def test_metadata_with_a_broken_address_of_its_agent_is_refused_and_the_daemon_lives(
    daemon: DaemonProcess, honest: KVClient, liar: Liar
) -> None:
    """Covers: A19. UCX ends its process when it meets some of these."""
    begin = liar.metadata.index(b"UCX|") + 4
    ended = 0
    for place in [*range(begin, begin + 12), *range(begin + 12, begin + 60, 8)]:
        broken = bytearray(liar.metadata)
        broken[place] ^= 0xFF
        status = liar.register(metadata=bytes(broken))
        if status.code == 0:  # a byte that does not matter
            liar.stream.ask(drop_regions=pb.DropRegions(regions=[1]))
        else:
            assert status.code in (InvalidRequest.code, StoreUnavailable.code), status
        ended += "end a process" in status.message
    assert ended, "no byte ended a process: then there is nothing that this test guards"
    assert daemon.running
    assert all_right(honest, daemon)


@pytest.mark.parametrize("offset", [SIZE - 8191, SIZE, 1 << 40, (1 << 63) - 1])
def test_ranges_outside_a_region_are_refused_and_nothing_is_moved(
    daemon: DaemonProcess, honest: KVClient, liar: Liar, offset: int
) -> None:
    assert liar.register().code == 0
    located = liar.locate()
    status = liar.fetch(located, [0, 0, 0, offset]).status
    assert (status.code, "within the region" in status.message) == (InvalidRequest.code, True)
    assert (liar.memory == 3).all()
    new = chain(1, of=KV, seed=5)
    write = liar.stream.ask(store=pb.Store_(hashes=pack(new))).reserved
    part = pb.StorePart(
        write_id=write.write_id, blocks=pack_u32([0]), parts=pack_u32([0]), region=1, offsets=pack_u64([offset])
    )
    assert liar.stream.code(store_part=part) == InvalidRequest.code
    assert all_right(honest, daemon)


def test_only_what_the_daemon_located_is_delivered(daemon: DaemonProcess, honest: KVClient, liar: Liar) -> None:
    assert liar.register().code == 0
    located = liar.locate()
    generations = unpack_u64(located.generations, name="generations")
    places = [0, 8192, 16384, 24576]
    wrong = liar.fetch(located, places, generations=pack_u64(generations + 1)).fetched
    assert {error.index: error.status.code for error in wrong.errors} == dict.fromkeys(range(4), BlockMissing.code)
    unknown = liar.fetch(located, places, hashes=pack(chain(4, of=KV, seed=9))).fetched
    assert len(unknown.errors) == 4
    assert (liar.memory == 3).all()
    for fields in ({"parts": pack_u32([2])}, {"generations": b""}, {"hashes": b"x"}, {"offsets": b""}):
        assert liar.fetch(located, places, **fields).status.code == InvalidRequest.code
    assert liar.fetch(located, places, region=7).status.code == BlockMissing.code
    assert not liar.fetch(located, places).fetched.errors


def test_blocks_of_another_namespace_cannot_be_fetched(
    daemon: DaemonProcess, honest: KVClient, raw: Raw, stack: ExitStack, liar: Liar
) -> None:
    located = liar.locate()
    other = Liar(stack, raw(daemon, spec(**FIELDS, tenant="other")))
    assert other.register().code == 0
    fetched = other.fetch(located, [0, 8192, 16384, 24576]).fetched
    assert len(fetched.errors) == 4
    assert (other.memory == 3).all()


def test_a_client_out_of_reach_is_refused_when_it_registers(
    daemon: DaemonProcess, honest: KVClient, raw: Raw, child: Callable[..., Child]
) -> None:
    """Covers: D10."""
    peer = child("agent", size_bytes=4096, number=1)
    peer.step()
    stream = raw(daemon, KV)
    peer.go_on(stream.welcome.ucx.agent_name)  # type: ignore[attr-defined]
    address, metadata = json.loads(peer.step())
    peer.send(signal.SIGSTOP)
    region = pb.RegisterRegion(region=1, size_bytes=4096, address=address, metadata=bytes.fromhex(metadata))
    status = stream.ask(register_region=region).status
    assert (status.code, "reach" in status.message) == (StoreUnavailable.code, True)
    peer.send(signal.SIGCONT)
    eventually(lambda: stream.ask(register_region=region).status.code == 0)
    assert all_right(honest, daemon)
