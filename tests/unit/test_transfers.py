"""Who uses a client's regions, and when they are quiet."""

import asyncio

import numpy as np

from kvstore_server.transfers import POST_BYTES, POST_DESCRIPTORS, Peer, posts


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


def test_posts_are_of_bounded_bytes_and_descriptors_and_cover_everything() -> None:
    sizes = np.array([POST_BYTES // 2] * 3 + [2 * POST_BYTES] + [1] * (2 * POST_DESCRIPTORS), np.int64)
    runs = list(posts(sizes))
    assert [run.start for run in runs[1:]] == [run.stop for run in runs[:-1]]
    assert (runs[0].start, runs[-1].stop) == (0, len(sizes))
    for run in runs:
        assert run.stop - run.start == 1 or sizes[run].sum() <= POST_BYTES
        assert run.stop - run.start <= POST_DESCRIPTORS
    assert list(posts(sizes[:0])) == []
