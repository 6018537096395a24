"""Regions of device memory and a real daemon: what is moved, what is refused, and that all else goes on.

There is no device here, so a NIXL that takes memory of a device for the host's stands for one that has CUDA, in the
daemon and in this process, and no code of ours may touch it. In what is marked `gpu` nothing stands for anything.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import chain, rows, spec
from devices import StandInRuntime, cuda_device, stand_in_for_cuda
from service.harness import NO_UCX, DaemonProcess, RawStream, store
from service.test_cluster import DATA as CLUSTER_DATA
from service.test_cluster import HASHES as CLUSTER_HASHES
from service.test_cluster import House, open_client
from service.test_ucx_safety import Liar
from tellers import Teller

from kvstore.errors import BlockCorrupt, InvalidRequest, Unsupported
from kvstore.transport import memory, ucx
from kvstore.types import AnyArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client import BlockRows, KVClient, Outcome

pytestmark = pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX)

KV = spec(layers=3, bytes_per_part=8192)
HASHES = chain(6, of=KV)
DATA = rows(KV, HASHES)

Connect = Callable[..., KVClient]
MakeDaemon = Callable[..., DaemonProcess]


@pytest.fixture
def transport() -> str:
    return "ucx"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandInRuntime:
    """CUDA in this process, and NIXL has none."""
    return stand_in_for_cuda(monkeypatch)


@pytest.fixture
def nixl_with_cuda(cuda: StandInRuntime, monkeypatch: pytest.MonkeyPatch) -> StandInRuntime:
    """Here, and in daemons that are started from now on. Their bytes go to and from where NIXL alone may touch them."""
    nixl = ucx._nixl()
    monkeypatch.setattr(nixl, "VRAM_SEG", nixl.DRAM_SEG)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("vram_as_dram")), prepend=os.pathsep)
    cuda.is_hidden = False  # from NIXL, which reads and writes in a thread of this process
    move = memory._move

    def watched(targets: AnyArray | None, sources: AnyArray, sizes: AnyArray, checksums: AnyArray | None) -> None:
        touched = sources.tolist() + ([] if targets is None else targets.tolist())
        assert not any(map(cuda.holds, touched)), "memory of a device was touched"
        move(targets, sources, sizes, checksums)

    monkeypatch.setattr(memory, "_move", watched)
    return cuda


@pytest.fixture
def client(nixl_with_cuda: StandInRuntime, make_daemon: MakeDaemon, connect: Connect) -> KVClient:
    return connect(make_daemon(), KV)


def part_of(array: Any, part: int) -> Any:
    return array[:, 8192 * part : 8192 * (part + 1)]


@pytest.mark.parametrize("source", ["rows", "parts", "buffers", "every other row"])
def test_bytes_are_stored_from_wherever_they_lie_on_a_device(
    client: KVClient, nixl_with_cuda: StandInRuntime, source: str
) -> None:
    data = np.zeros((12, KV.block_bytes), np.uint8)
    data[::2] = DATA
    array = nixl_with_cuda.array(data if source == "every other row" else DATA)
    client.cuda_region(array)
    with client.store(HASHES) as write:
        if source == "parts":
            for part in (2, 0, 1):
                write.put(part, part_of(array, part))
        else:
            put = {"rows": array, "buffers": [array[block] for block in range(6)]}
            write.put_blocks(put.get(source, array[::2]))
    assert write.outcomes == [Outcome.STORED] * 6
    target = np.zeros_like(DATA)
    assert client.load(HASHES, into=BlockRows(target)).wait().num_loaded == 6
    assert (target == DATA).all()


@pytest.mark.parametrize("target", ["rows", "parts", "buffers", "every other row", "some parts"])
def test_bytes_are_loaded_to_wherever_they_are_wanted_on_a_device(
    client: KVClient, nixl_with_cuda: StandInRuntime, target: str
) -> None:
    store(client, HASHES)
    array = nixl_with_cuda.array(np.zeros((12, KV.block_bytes), np.uint8))
    client.cuda_region(array)
    wanted = np.zeros((12, KV.block_bytes), np.uint8)
    wanted[: len(DATA)] = DATA
    into: Any = BlockRows(array[:6])
    parts = None
    if target == "parts":
        into = [part_of(array[:6], part) for part in range(3)]
    elif target == "buffers":
        into = BlockRows([array[block] for block in range(6)])
    elif target == "every other row":
        into = BlockRows(array[::2])
        wanted[:] = 0
        wanted[::2] = DATA
    elif target == "some parts":
        parts = [0, 2]
        into = {part: part_of(array[:6], part) for part in parts}
        wanted[:, 8192:16384] = 0
    result = client.load(HASHES, into=into, parts=parts).wait()
    assert (result.num_loaded, result.errors) == (6, {})
    assert (array.contents == wanted).all()


@pytest.mark.parametrize("integrity", ["header", "always"])
def test_a_byte_that_arrives_differently_on_a_device_makes_the_block_a_miss(
    nixl_with_cuda: StandInRuntime, make_daemon: MakeDaemon, connect: Connect, integrity: str
) -> None:
    client = connect(make_daemon(), KV, integrity=integrity)
    store(client, HASHES)
    array = nixl_with_cuda.array(np.zeros_like(DATA))
    client.cuda_region(array)

    def before(step: str) -> None:  # the first copy to be checked: all of a part has arrived
        if step == "memcpyAsync":
            nixl_with_cuda.before = lambda step: None
            array.contents[3, 100] ^= 1

    nixl_with_cuda.before = before
    result = client.load(HASHES, into=BlockRows(array), parts=[0]).wait()
    assert (result.num_loaded, list(result.errors)) == (3, [3])
    assert isinstance(result.errors[3], BlockCorrupt)
    assert client.statistics().checksum_failures == 1


def test_a_region_can_be_closed_and_its_memory_be_made_another(
    client: KVClient, nixl_with_cuda: StandInRuntime
) -> None:
    array = nixl_with_cuda.array(np.zeros_like(DATA))
    for seed in range(1, 8):
        hashes = chain(6, of=KV, seed=seed)
        with client.cuda_region(array):
            array.contents[:] = rows(KV, hashes)
            with client.store(hashes) as write:
                write.put_blocks(array)
            array.contents[:] = 0
            assert client.load(hashes, into=BlockRows(array)).wait().num_loaded == 6
            assert (array.contents == rows(KV, hashes)).all()
    with pytest.raises(InvalidRequest, match="make a cuda_region"):
        client.load(hashes, into=BlockRows(array))
    with client.store(HASHES) as write:
        with pytest.raises(InvalidRequest, match="make a cuda_region"):
            write.put_blocks(array)
        write.put_blocks(DATA)
    assert write.outcomes == [Outcome.STORED] * 6


def test_a_region_is_registered_with_the_daemon_that_was_started_again(
    nixl_with_cuda: StandInRuntime, make_daemon: MakeDaemon, connect: Connect
) -> None:
    daemon = make_daemon()
    client = connect(daemon, KV)
    array = nixl_with_cuda.array(DATA)
    client.cuda_region(array)
    daemon.kill()
    daemon.start()
    client.wait_ready(20)
    with client.store(HASHES) as write:
        write.put_blocks(array)
    assert write.outcomes == [Outcome.STORED] * 6


def test_members_of_a_cluster_each_move_their_blocks(
    nixl_with_cuda: StandInRuntime, make_daemon: MakeDaemon, stack: ExitStack
) -> None:
    house = House(make_daemon, stack.enter_context(closing(Teller())))
    client = open_client(house, stack, transport="ucx")
    source, target = (nixl_with_cuda.array(data) for data in (CLUSTER_DATA, np.zeros_like(CLUSTER_DATA)))
    with pytest.raises(InvalidRequest, match="make a cuda_region"):
        client.load(CLUSTER_HASHES, into=BlockRows(target))
    client.cuda_region(source)
    client.cuda_region(target)
    with client.store(CLUSTER_HASHES) as write:
        write.put_blocks(source)
    assert write.outcomes == [Outcome.STORED] * len(CLUSTER_HASHES)
    assert all(house.counts("blocks_committed"))
    result = client.load(CLUSTER_HASHES, into=BlockRows(target)).wait()
    assert (result.num_loaded, result.errors) == (len(CLUSTER_HASHES), {})
    assert (target.contents == CLUSTER_DATA).all()


def test_rows_whose_region_is_closed_while_they_are_put_are_not_touched(
    client: KVClient, nixl_with_cuda: StandInRuntime
) -> None:
    array = nixl_with_cuda.array(DATA)
    region = client.cuda_region(array)
    write = client.store(HASHES)
    source = write._rows(array, KV.block_bytes, "put_blocks")
    region.close()
    with pytest.raises(InvalidRequest, match="one that was closed"):
        write._move(source, write.parts, [0, 8192, 16384], None)
    assert store(client, chain(1, of=KV, seed=2)) == [Outcome.STORED]


# What is refused.


def test_where_nixl_has_no_cuda_a_region_is_refused_and_the_client_goes_on(
    cuda: StandInRuntime, daemon: DaemonProcess, connect: Connect
) -> None:
    client = connect(daemon, KV)
    cuda.is_hidden = False
    array = cuda.array(DATA)
    with pytest.raises(
        Unsupported, match=r"expected NIXL to register 147456 bytes of a CUDA device.*host memory instead"
    ):
        client.cuda_region(array)
    assert daemon.stats().sessions[0].region_bytes == 0
    with client.store(HASHES) as write:
        with pytest.raises(InvalidRequest, match="copy it to the host first, or make a cuda_region of it"):
            write.put_blocks(array)
        write.put_blocks(DATA)
    assert write.outcomes == [Outcome.STORED] * 6
    target = np.zeros_like(DATA)
    assert client.load(HASHES, into=BlockRows(target)).wait().num_loaded == 6
    assert (target == DATA).all()


def test_over_shared_memory_a_region_is_refused_and_the_client_goes_on(
    cuda: StandInRuntime, daemon: DaemonProcess, connect: Connect
) -> None:
    client = connect(daemon, KV, transport="shm")
    with pytest.raises(Unsupported, match="expected a session over ucx"):
        client.cuda_region(cuda.array(DATA))
    assert store(client, HASHES) == [Outcome.STORED] * 6


def test_a_region_that_was_made_before_there_was_a_session_is_refused_when_it_is_used_over_shared_memory(
    cuda: StandInRuntime, daemon: DaemonProcess, connect: Connect
) -> None:
    daemon.kill()
    client = connect(daemon, KV, ready=False, transport="shm")
    array = cuda.array(DATA)
    client.cuda_region(array)
    daemon.start()
    client.wait_ready(20)
    with client.store(HASHES) as write:
        with pytest.raises(Unsupported, match="expected a session over ucx"):
            write.put_blocks(array)
        write.put_blocks(DATA)
    assert write.outcomes == [Outcome.STORED] * 6
    with pytest.raises(Unsupported, match="expected a session over ucx"):
        client.load(HASHES, into=BlockRows(array))
    assert not client.statistics().bytes_loaded


@pytest.mark.parametrize("kind", [2, 7, -1])
def test_memory_of_a_kind_that_is_not_known_is_refused_and_the_number_can_be_used(
    daemon: DaemonProcess, connect: Connect, raw: Callable[..., RawStream], stack: ExitStack, kind: int
) -> None:
    client = connect(daemon, KV)
    liar = Liar(stack, raw(daemon, KV))
    status = liar.register(memory=kind)
    assert (status.code, f"0 (HOST), 1 (CUDA), got {kind}" in status.message) == (InvalidRequest.code, True)
    assert daemon.stats().sessions[-1].region_bytes == 0
    assert liar.register().code == 0
    assert store(client, HASHES) == [Outcome.STORED] * 6


def test_memory_that_is_registered_as_that_of_the_host_is_not_a_devices(
    daemon: DaemonProcess, connect: Connect, raw: Callable[..., RawStream], stack: ExitStack
) -> None:
    client = connect(daemon, KV)
    liar = Liar(stack, raw(daemon, KV))
    status = liar.register(memory=pb.MEMORY_CUDA)
    assert (status.code, "(CUDA)" in status.message) == (InvalidRequest.code, True)
    assert liar.register().code == 0
    assert store(client, HASHES) == [Outcome.STORED] * 6


def test_a_daemon_without_ucx_refuses_memory_of_a_device(
    make_daemon: MakeDaemon, raw: Callable[..., RawStream]
) -> None:
    stream = raw(make_daemon(ucx_device=""), KV)
    request = pb.RegisterRegion(region=1, size_bytes=64, address=4096, metadata=b"x", memory=pb.MEMORY_CUDA)
    assert stream.ask(register_region=request).status.code == Unsupported.code


# On a device.


@pytest.fixture
def cupy() -> Any:
    cuda_device().close()
    return pytest.importorskip("cupy", reason="CuPy is not installed (kvstore[gpu])")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["blocks", "layers"])
def test_blocks_are_stored_from_a_device_and_loaded_to_it(
    daemon: DaemonProcess, connect: Connect, cupy: Any, layout: str
) -> None:
    """As whole blocks, and as an engine lays them out: a layer after the other, `[layers, num_blocks, part_bytes]`."""
    client = connect(daemon, KV)
    data = DATA if layout == "blocks" else np.ascontiguousarray(DATA.reshape(6, 3, -1).transpose(1, 0, 2))
    source, target = cupy.asarray(data), cupy.zeros_like(cupy.asarray(data))
    cupy.cuda.Device().synchronize()
    with client.cuda_region(source), client.cuda_region(target):
        with client.store(HASHES) as write:
            if layout == "blocks":
                write.put_blocks(source)
            else:
                for part in range(3):
                    write.put(part, source[part])
        assert write.outcomes == [Outcome.STORED] * 6
        into = BlockRows(target) if layout == "blocks" else target
        result = client.load(HASHES, into=into).wait()
        assert (result.num_loaded, result.errors) == (6, {})
    assert (cupy.asnumpy(target) == data).all()
    on_host = np.zeros_like(DATA)
    assert client.load(HASHES, into=BlockRows(on_host)).wait().num_loaded == 6
    assert (on_host == DATA).all()
