"""Regions of device memory: what becomes of the caller's array, of registrations, and of what is in the way."""

import gc
import sys
import time
import weakref
from typing import Any, cast

import numpy as np
import pytest
import xxhash
from devices import CudaError, DeviceArray, StandInRuntime, stand_in_for_cuda

from kvstore.errors import InvalidRequest, KVStoreError, StoreUnavailable, Unsupported
from kvstore.types import Memory
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client.buffers import as_rows
from kvstore_client.cuda_arrays import CudaRows
from kvstore_client.region import CudaRegion
from kvstore_client.regions import Regions
from kvstore_client.session import OnAnswer, Session

SIZE = 4096


class FakeAgent:
    """Notes what is registered: by address and device id, the memory."""

    def __init__(self) -> None:
        self.registered: dict[tuple[int, int], Memory] = {}
        self.refusal: KVStoreError | None = None

    def register(self, address: int, size_bytes: int, *, device_id: int, memory: Memory) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.registered[address, device_id] = memory

    def deregister(self, address: int, *, device_id: int) -> None:
        del self.registered[address, device_id]

    def metadata(self, address: int, *, device_id: int) -> bytes:
        assert (address, device_id) in self.registered
        return b"metadata"


class FakeSession:
    """Over ucx, if it has an agent. The daemon takes all regions, and has dropped one when the test says so."""

    def __init__(self, agent: FakeAgent | None) -> None:
        self.alive = True
        self.agent = agent
        self.asked: list[pb.RegisterRegion] = []
        self.dropped: list[tuple[int, OnAnswer]] = []

    def call(self, message: pb.ClientMessage, *, deadline: float) -> None:
        self.asked.append(message.register_region)

    def start(self, message: pb.ClientMessage, then: OnAnswer) -> None:
        self.dropped += [(number, then) for number in message.drop_regions.regions]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandInRuntime:
    return stand_in_for_cuda(monkeypatch)


def opened(*sessions: FakeSession) -> Regions:
    regions = Regions()
    for session in sessions:
        regions.adopt(cast(Session, session))
    return regions


def create(regions: Regions, array: Any) -> CudaRegion:
    return regions.create_cuda(array, deadline=time.monotonic() + 5)


def rows_in(regions: Regions, array: DeviceArray) -> CudaRows:
    rows = as_rows(array, num_rows=4, row_bytes=SIZE // 4, where="rows", in_cuda_region=regions.in_cuda_region)
    assert isinstance(rows, CudaRows)
    return rows


def blocks(cuda: StandInRuntime) -> DeviceArray:
    return cuda.array(np.random.default_rng(0).integers(0, 256, (4, SIZE // 4), np.uint8))


def test_a_region_tells_the_daemon_that_its_memory_is_of_a_device(cuda: StandInRuntime) -> None:
    session = FakeSession(agent := FakeAgent())
    array = blocks(cuda)
    region = create(opened(session), array)
    address = array.__cuda_array_interface__["data"][0]
    assert (region.address, region.size_bytes) == (address, SIZE)
    assert agent.registered == {(address, region.number): Memory.CUDA}
    told = session.asked[0]
    assert (told.region, told.address, told.size_bytes, told.memory) == (region.number, address, SIZE, pb.MEMORY_CUDA)
    assert repr(region) == "<CudaRegion 1 [4096 bytes, registered]>"


def test_the_array_is_kept_until_the_daemon_has_dropped_the_region(cuda: StandInRuntime) -> None:
    session = FakeSession(agent := FakeAgent())
    regions = opened(session)
    array = blocks(cuda)
    kept = weakref.ref(array)
    region = create(regions, array)
    del array
    region.close()
    region.close()
    gc.collect()
    assert kept() is not None
    assert agent.registered
    ((number, then),) = session.dropped
    assert number == region.number
    then(pb.ServerMessage(regions_dropped=pb.RegionsDropped()))
    assert not agent.registered
    session.dropped.clear()
    del then
    gc.collect()
    assert kept() is None


def test_memory_that_is_registered_again_while_the_daemon_still_drops_it_stays_registered(cuda: StandInRuntime) -> None:
    session = FakeSession(agent := FakeAgent())
    regions = opened(session)
    array = blocks(cuda)
    create(regions, array).close()
    again = create(regions, array)
    session.dropped[0][1](pb.ServerMessage(regions_dropped=pb.RegionsDropped()))
    assert agent.registered == {(again.address, again.number): Memory.CUDA}


def test_over_shared_memory_it_is_refused_and_says_so_when_it_is_used(cuda: StandInRuntime) -> None:
    """Also where it was made before there was a session."""
    shared = FakeSession(None)
    with pytest.raises(Unsupported, match=r"expected a session over ucx.*copy to host memory"):
        create(opened(shared), blocks(cuda))

    regions = Regions()
    array = blocks(cuda)
    create(regions, array)
    regions.adopt(cast(Session, shared))
    with pytest.raises(Unsupported, match="expected a session over ucx"):
        regions.check_reachable(rows_in(regions, array), cast(Session, shared))
    other = FakeSession(FakeAgent())
    regions.adopt(cast(Session, other))
    regions.check_reachable(rows_in(regions, array), cast(Session, other))


def test_what_nixl_refuses_leaves_no_region(cuda: StandInRuntime) -> None:
    session = FakeSession(agent := FakeAgent())
    agent.refusal = Unsupported("ucx: no CUDA here; copy to host memory instead")
    regions = opened(session)
    array = blocks(cuda)
    with pytest.raises(Unsupported, match="no CUDA here"):
        create(regions, array)
    assert repr(regions) == "<Regions [0 open, 0 bytes]>"
    assert session.asked == []
    with pytest.raises(InvalidRequest, match="make a cuda_region"):
        rows_in(regions, array)


def test_rows_must_lie_in_one_open_region_of_the_same_memory(cuda: StandInRuntime) -> None:
    regions = opened(FakeSession(FakeAgent()))
    array = blocks(cuda)
    with create(regions, array[:3]):
        with pytest.raises(InvalidRequest, match="make a cuda_region"):
            rows_in(regions, array)
        begins = np.array([array.__cuda_array_interface__["data"][0]])
        assert regions.containing(begins, 8, memory=Memory.CUDA) is not None
        assert regions.containing(begins, 8, memory=Memory.HOST) is None
    region = create(regions, array)
    rows = rows_in(regions, array)
    region.close()
    with pytest.raises(InvalidRequest, match="one that was closed"):
        regions.check_reachable(rows, cast(Session, FakeSession(FakeAgent())))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros(4), "got a ndarray in host memory"),
        (DeviceArray(np.zeros((4, 4))[:, :2]), r"without gaps, got shape \[4, 2\], strides \(32, 8\)"),
        (DeviceArray(np.zeros((0, 4))), r"at least 1 byte.*got shape \[0, 4\]"),
    ],
)
def test_only_whole_arrays_in_device_memory_are_taken(cuda: StandInRuntime, array: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        create(opened(FakeSession(FakeAgent())), array)


def test_without_cupy_or_the_device_it_is_unsupported(cuda: StandInRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    regions = opened(FakeSession(FakeAgent()))
    with pytest.raises(Unsupported, match="got 2; or copy to host memory"):
        create(regions, cuda.array(np.zeros(4), device=2))
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "cupy.cuda")
    with pytest.raises(Unsupported, match=r"pip install 'kvstore\[gpu\]'.*or copy to host memory"):
        create(regions, blocks(cuda))


def test_checksums_are_of_what_lies_on_the_device_and_a_device_that_fails_is_an_error(cuda: StandInRuntime) -> None:
    array = blocks(cuda)
    region = create(opened(FakeSession(FakeAgent())), array)
    begins = region.address + SIZE // 4 * np.arange(4)
    expected = [xxhash.xxh3_64_intdigest(row.data) for row in array.contents]
    assert region.checksums(begins, SIZE // 4).tolist() == expected

    def before(step: str) -> None:
        if step == "memcpyAsync":
            raise CudaError(700, "cudaErrorIllegalAddress")

    cuda.before = before
    with pytest.raises(StoreUnavailable, match=r"region 1: what arrived cannot be checked.*cudaErrorIllegalAddress"):
        region.checksums(begins, SIZE // 4)


def test_when_the_client_is_closed_no_device_is_used_any_more(cuda: StandInRuntime) -> None:
    regions = opened(FakeSession(FakeAgent()))
    for device in (0, 1, 1):
        create(regions, cuda.array(np.zeros(4), device=device))
    assert len(cuda.queues) == 4  # two streams for each device
    regions.close()
    regions.close()
    assert not cuda.queues
    assert repr(regions) == "<Regions [0 open, 0 bytes]>"
