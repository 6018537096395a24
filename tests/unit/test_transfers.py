"""Who uses a client's regions, when they are quiet, and whose turn it is."""

import asyncio
from typing import cast

import numpy as np
import pytest

from kvstore.transport.ucx import Op
from kvstore.types import Memory
from kvstore_server import transfers
from kvstore_server.transfers import POST_BYTES, POST_DESCRIPTORS, Peer, Transfers, posts
from kvstore_server.values import Pieces, RemoteRegion


def test_regions_are_quiet_when_every_use_that_began_before_is_over() -> None:
    """Covers: A19."""

    async def test() -> None:
        peer = Peer(lambda reason: None)
        first, second, other = peer.use(1), peer.use(1), peer.use(2)
        quiet = asyncio.create_task(peer.quiet([1]))
        every = asyncio.create_task(peer.quiet())
        first()
        await asyncio.sleep(0)
        assert not quiet.done()
        second()
        await quiet
        assert not every.done()
        other()
        await every
        await peer.quiet([1, 2, 3])
        assert repr(peer).endswith("[0 uses of its regions]>")

    asyncio.run(test())


def test_a_peer_is_given_up_once() -> None:
    reasons: list[str] = []
    peer = Peer(reasons.append)
    peer.give_up("stuck")
    peer.give_up("broken")
    assert (peer.over, reasons) == ("stuck", ["stuck"])
    left = Peer(reasons.append)
    left.leave("its session has ended")
    left.give_up("broken")
    assert reasons == ["stuck"]


class _Agent:
    """Begins what it is asked to; nothing is over before it is let go on."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = "none"
        self.begun: list[str] = []
        self.told: list[tuple[object, object]] = []  # of each peer and transfer: device id, and memory
        self.over: set[str] = set()

    def register(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def add_peer(self, *_: object, device_id: int, memory: Memory, **__: object) -> None:
        self.told.append((device_id, memory))

    def begin(self, _: Op, peer: str, *, device_id: int, memory: Memory, **__: object) -> "_Transfer":
        self.begun.append(peer)
        self.told.append((device_id, memory))
        return _Transfer(self, peer)


class _Transfer:
    def __init__(self, agent: _Agent, peer: str) -> None:
        self._agent, self._peer = agent, peer

    def poll(self) -> bool:
        return self._peer in self._agent.over

    def release(self) -> None:
        pass


class _NoTrial:
    async def of(self, *_: object) -> None:
        pass

    async def stop(self) -> None:
        pass


def test_peers_that_take_nothing_in_do_not_keep_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers: A19, C7. Few transfers are under way at once, but those that do not move are not counted for long."""
    monkeypatch.setattr(transfers, "Agent", _Agent)
    monkeypatch.setattr(transfers, "TURN_S", 0.01)
    monkeypatch.setattr(transfers, "Trial", lambda device: _NoTrial())
    pieces = Pieces(*np.zeros((2, 4), np.int64), np.full(4, POST_BYTES))

    async def test() -> None:
        moving = Transfers(device="none", num_drivers=1, patience_s=60)
        agent = cast(_Agent, moving._agent)
        peers = [Peer(lambda reason: None) for _ in range(4)]
        region = RemoteRegion(number=1, address=0, size_bytes=4 * POST_BYTES)
        tasks = []
        for peer in peers[:3]:
            tasks.append(asyncio.create_task(moving.move(Op.WRITE, peer, region, pieces, [])))
        await asyncio.sleep(0)
        agent.over.add(peers[3].name)
        await moving.move(Op.WRITE, peers[3], region, pieces, [])
        assert [agent.begun.count(peer.name) for peer in peers] == [4, 4, 4, 4]
        agent.over.update(peer.name for peer in peers)
        await asyncio.gather(*tasks)
        await moving.close()

    asyncio.run(test())


def test_what_a_region_is_of_is_told_when_it_is_added_and_whenever_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "Agent", _Agent)
    monkeypatch.setattr(transfers, "Trial", lambda device: _NoTrial())

    async def test() -> None:
        moving = Transfers(device="none", num_drivers=1, patience_s=60)
        agent, peer = cast(_Agent, moving._agent), Peer(lambda reason: None)
        agent.over.add(peer.name)
        for number, memory in enumerate(Memory):
            region = RemoteRegion(number, address=0, size_bytes=64, memory=memory)
            await moving.add(peer, b"", region)
            await moving.move(Op.READ, peer, region, Pieces(*np.zeros((2, 1), np.int64), np.full(1, 64)), [])
        assert agent.told == [(0, Memory.HOST)] * 2 + [(1, Memory.CUDA)] * 2
        await moving.close()

    asyncio.run(test())


def test_posts_are_of_bounded_bytes_and_descriptors_and_cover_everything() -> None:
    sizes = np.array([POST_BYTES // 2] * 3 + [2 * POST_BYTES] + [1] * (2 * POST_DESCRIPTORS), np.int64)
    runs = list(posts(sizes))
    assert [run.start for run in runs[1:]] == [run.stop for run in runs[:-1]]
    assert (runs[0].start, runs[-1].stop) == (0, len(sizes))
    for run in runs:
        assert run.stop - run.start == 1 or sizes[run].sum() <= POST_BYTES
        assert run.stop - run.start <= POST_DESCRIPTORS
    assert list(posts(sizes[:0])) == []
