"""Whatever clients do and however they end, the daemon is as before: no lease, write, byte or descriptor is left."""

from collections.abc import Callable

import numpy as np
import pytest
from builders import chain, rows, spec
from service.harness import DEADLINE_S, Child, DaemonProcess, RawStream, eventually

from kvstore.hashing import pack
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client import BlockRows, ClientOptions, KVClient

FIELDS = {"layers": 3, "bytes_per_part": 8192}
KV = spec(**FIELDS)  # type: ignore[arg-type]
HASHES = chain(4, of=KV)
DATA = rows(KV, HASHES)


def load_and_forget(daemon: DaemonProcess, child, raw) -> None:
    with KVClient(daemon.address, KV) as client:
        client.wait_ready(DEADLINE_S)
        client.load(HASHES, into=BlockRows(np.zeros_like(DATA))).wait()
        client.match(HASHES)


def view_and_forget(daemon: DaemonProcess, child, raw) -> None:
    with KVClient(daemon.address, KV) as client:
        client.wait_ready(DEADLINE_S)
        load = client.load(HASHES, view=True)
        load.wait()
        load.view(0, 0)


def store_and_abort(daemon: DaemonProcess, child, raw) -> None:
    with KVClient(daemon.address, KV) as client:
        client.wait_ready(DEADLINE_S)
        write = client.store(chain(4, of=KV, seed=1))
        write.put(0, DATA[:, :8192])
        write.abort()


def store_and_leave(daemon: DaemonProcess, child, raw) -> None:
    with KVClient(daemon.address, KV) as client:
        client.wait_ready(DEADLINE_S)
        region = client.region(DATA.size)
        write = client.store(chain(4, of=KV, seed=1))
        write.put(0, region.array.reshape(4, -1)[:, :8192])


def writer_is_killed(daemon: DaemonProcess, child, raw) -> None:
    writer = child("write", address=daemon.address, fields=FIELDS, length=4, seed=1)
    writer.step()
    writer.go_on()
    writer.step()
    writer.kill()


def reader_is_killed(daemon: DaemonProcess, child, raw) -> None:
    reader = child("read", address=daemon.address, fields=FIELDS, length=4)
    reader.step()
    reader.kill()


def cut_stream(daemon: DaemonProcess, child, raw) -> None:
    stream = raw(daemon, KV)
    stream.ask(store=pb.Store_(hashes=pack(chain(4, of=KV, seed=1))))
    stream.ask(load=pb.Load(hashes=pack(chain(4, of=KV, seed=1)), lease="a", follow=True))
    stream.ask(match=pb.Match(hashes=pack(HASHES), lease="b"))
    stream.start(match=pb.Match(hashes=pack(HASHES), lease="c"))
    stream.close()


def refused_hello(daemon: DaemonProcess, child, raw) -> None:
    stream = raw(daemon)
    stream.start(hello=pb.Hello(protocol_version=9))
    stream.end()


@pytest.mark.parametrize(
    "scenario",
    [
        load_and_forget,
        view_and_forget,
        store_and_abort,
        store_and_leave,
        writer_is_killed,
        reader_is_killed,
        cut_stream,
        refused_hello,
    ],
)
def test_nothing_is_left_of_a_client(
    shared: DaemonProcess,
    stack,
    child: Callable[..., Child],
    raw: Callable[..., RawStream],
    scenario: Callable[..., None],
) -> None:
    """Covers: C1, C2, C3, C5, C9."""
    with KVClient(shared.address, KV, options=ClientOptions(timeout_s=DEADLINE_S)) as client:
        client.wait_ready(DEADLINE_S)
        with client.store(HASHES) as write:
            write.put_blocks(DATA)
    eventually(shared.is_idle)
    used = shared.stats().tiers[0].used_bytes
    assert used == DATA.size
    before = shared.num_fds()

    scenario(shared, child, raw)

    stack.close()
    eventually(shared.is_idle)
    assert shared.stats().tiers[0].used_bytes == used
    assert shared.stats().blocks_committed == 4
    eventually(lambda: shared.num_fds() <= before, "descriptors are flat")


def test_descriptors_stay_flat_over_200_connections(shared: DaemonProcess, stack) -> None:
    """Covers: C9."""

    def connect_and_leave(times: int) -> None:
        for _ in range(times):
            with KVClient(shared.address, KV, options=ClientOptions(timeout_s=DEADLINE_S)) as client:
                client.wait_ready(DEADLINE_S)
                with client.region(4096):
                    client.match(HASHES)

    connect_and_leave(5)
    eventually(shared.is_idle)
    before = shared.num_fds()
    connect_and_leave(200)
    eventually(shared.is_idle)
    eventually(lambda: shared.num_fds() <= before, "descriptors are flat")
    assert len(shared.admin.Namespaces(pb.NamespacesRequest()).namespaces) == 0


def test_regions_that_are_closed_are_given_back(shared: DaemonProcess, connect: Callable[..., KVClient]) -> None:
    """Covers: C7."""
    client = connect(shared, KV)
    with client.region(8192):
        pass
    eventually(lambda: shared.stats().sessions[0].region_bytes == 0)
    before = shared.num_fds()
    for _ in range(50):
        with client.region(8192) as region:
            region.array[:] = 1
    eventually(lambda: shared.stats().sessions[0].region_bytes == 0)
    eventually(lambda: shared.num_fds() <= before)
