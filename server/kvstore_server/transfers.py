"""Moves bytes between the daemon's slots and the memory of clients on other hosts, by ucx; decides nothing.

Threads post pieces of a movement and poll those under way, sleeping in between; the loop never waits for the library.
A piece that was posted is polled until it is over, whatever becomes of its session: only then is its memory quiet. So
a peer that stops, and neither goes on nor breaks off, keeps the slots of the requests from being used again that its
last `PEER_POSTS` pieces belong to.
"""

import asyncio
import contextlib
import secrets
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Final

import numpy as np
import structlog

from kvstore.errors import KVStoreError, StoreBug, StoreUnavailable
from kvstore.transport.memory import address_of
from kvstore.transport.ucx import Agent, Op, Transfer, cut
from kvstore.types import AnyArray, ByteArray, IntArray
from kvstore_server.threads import in_thread
from kvstore_server.trial import Trial
from kvstore_server.values import Pieces, RemoteRegion

log = structlog.get_logger()

POST_BYTES: Final = 8 << 20  # of one piece: a post keeps others from posting while it copies
POST_DESCRIPTORS: Final = 128
PEER_POSTS: Final = 4  # under way with one peer
ALL_POSTS: Final = 8  # under way with all peers together, so that few are served quickly, and not all slowly
TURN_S: Final = 0.25  # after which a post makes room for another's, though it is not over
FIRST_SLEEP_S: Final = 20e-6
LONGEST_SLEEP_S: Final = 1e-3


class Peer:
    """One client's agent: its name, what is under way with it, and whether it is to be left alone."""

    def __init__(self, on_broken: Callable[[str], None]) -> None:
        self.name = secrets.token_hex(16)
        self.over = ""  # why nothing new is posted
        self._on_broken = on_broken
        self.turns = asyncio.Semaphore(PEER_POSTS)
        self._uses: dict[int, set[asyncio.Future[None]]] = {}  # by region

    def __repr__(self) -> str:
        state = self.over or f"{sum(map(len, self._uses.values()))} uses of its regions"
        return f"<Peer {self.name[:8]} [{state}]>"

    def use(self, region: int) -> Callable[[], None]:
        """The region is used from now on, until the function returned is called."""
        use = asyncio.get_running_loop().create_future()
        uses = self._uses.setdefault(region, set())
        uses.add(use)

        def done() -> None:
            uses.discard(use)
            use.set_result(None)

        return done

    def leave(self, reason: str) -> None:
        """Nothing new is posted, unless that was so already for another reason."""
        if not self.over:
            self.over = reason
            self.turns.release()  # who waits for a turn gets this one, finds out, and hands it on

    def give_up(self, reason: str) -> None:
        """Nothing new is posted; unless that was so already, the session is told to end."""
        if not self.over:
            self.leave(reason)
            self._on_broken(reason)

    async def quiet(self, regions: Sequence[int] | None = None) -> None:
        """Nothing that used these regions, or any, touches them any more."""
        chosen = list(self._uses) if regions is None else regions
        await asyncio.gather(*(use for region in chosen for use in self._uses.get(region, ())))


class Transfers:
    """The daemon's agent on one network device, and the threads that drive it.

    A peer with which something is under way for `patience_s` is given up.

    Raises: Unsupported, if NIXL is not installed or the device cannot be used.
    """

    def __init__(self, *, device: str, num_drivers: int, patience_s: float) -> None:
        self._patience_s = patience_s
        self._agent = Agent(secrets.token_hex(16), device=device, num_pollers=num_drivers)
        self._drivers = [_Driver(number) for number in range(num_drivers)]
        self._registered: dict[int, asyncio.Future[None]] = {}  # by address
        self._next = 0
        self._turns = asyncio.Semaphore(ALL_POSTS)
        self._trial = Trial(device)

    @property
    def device(self) -> str:
        return self._agent.device

    async def start(self) -> None:
        """Peers can be added. Raises: StoreUnavailable."""
        await self._trial.start()

    async def add(self, peer: Peer, metadata: bytes, region: RemoteRegion) -> None:
        """The region of this peer can be moved to and from.

        Raises: InvalidRequest, if the metadata is not that of this peer and region; StoreUnavailable, if it is out of
        reach.
        """
        await self._trial.of(peer.name, metadata, region)
        if peer.over:
            raise StoreUnavailable(f"region {region.number}: not added, as {peer.over}")
        await in_thread(
            self._agent.add_peer,
            peer.name,
            metadata,
            address=region.address,
            size_bytes=region.size_bytes,
            device_id=region.number,
            memory=region.memory,
        )

    async def move(self, op: Op, peer: Peer, region: RemoteRegion, pieces: Pieces, slabs: Sequence[ByteArray]) -> None:
        """All pieces have moved, and nothing of them is under way. Must not be cancelled.

        `slabs` is the memory on this side. Raises: StoreUnavailable, if the peer is gone or the session ended, after
        all that was posted is over.
        """
        for slab in slabs:
            await self._register(slab)
        local, remote, sizes = cut(pieces.local, pieces.remote, pieces.sizes)
        jobs = [self._post(op, peer, region, local[job], remote[job], sizes[job]) for job in posts(sizes)]
        failures = [one for one in await asyncio.gather(*jobs, return_exceptions=True) if one is not None]
        if failures:
            raise failures[0]

    async def remove(self, peer: Peer) -> None:
        """The agent knows the peer no more; whatever was under way with it is over."""
        peer.leave("its session has ended")
        await peer.quiet()
        await in_thread(self._agent.remove_peer, peer.name)

    async def close(self) -> None:
        """Nothing is under way, and threads and connections are gone."""
        await self._trial.stop()
        await in_thread(self._close)

    def _close(self) -> None:
        for driver in self._drivers:
            driver.stop()
        self._agent.close()

    async def _post(
        self, op: Op, peer: Peer, region: RemoteRegion, local: IntArray, remote: IntArray, sizes: IntArray
    ) -> None:
        async with peer.turns, self._turn():
            if peer.over:
                raise StoreUnavailable(f"transfer: not begun, as {peer.over}")

            def begin() -> Transfer:
                return self._agent.begin(
                    op,
                    peer.name,
                    local=local,
                    remote=remote,
                    sizes=sizes,
                    device_id=region.number,
                    memory=region.memory,
                )

            self._next += 1
            stuck = f"the data path to the client did not move for {self._patience_s:g} s; check the network"
            timer = asyncio.get_running_loop().call_later(self._patience_s, peer.give_up, stuck)
            try:
                await self._drivers[self._next % len(self._drivers)].drive(begin)
            except StoreUnavailable as error:
                peer.give_up(str(error))
                raise
            finally:
                timer.cancel()

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """There is room for a post; a peer that does not take it in must not keep others waiting."""
        await self._turns.acquire()
        given_back = False

        def give_back() -> None:
            nonlocal given_back
            if not given_back:
                given_back = True
                self._turns.release()

        timer = asyncio.get_running_loop().call_later(TURN_S, give_back)
        try:
            yield
        finally:
            timer.cancel()
            give_back()

    async def _register(self, slab: ByteArray) -> None:
        """The slab is registered, until it is unmapped."""
        address = address_of(slab)
        done = self._registered.get(address)
        if done is None:
            done = self._registered[address] = asyncio.ensure_future(
                in_thread(self._agent.register, address, slab.size)
            )
            weakref.finalize(slab, self._unregister, address).atexit = False
        try:
            await asyncio.shield(done)
        except KVStoreError:
            self._registered.pop(address, None)
            raise

    def _unregister(self, address: int) -> None:
        """Before the memory is unmapped, in whatever thread drops it."""
        self._registered.pop(address, None)
        self._agent.deregister(address)


class _Driver:
    """One thread, which begins transfers and polls them until they are over."""

    def __init__(self, number: int) -> None:
        self._wanted: SimpleQueue[tuple[Callable[[], Transfer], asyncio.Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kvstore-ucx-{number}", daemon=True)
        self._thread.start()

    async def drive(self, begin: Callable[[], Transfer]) -> None:
        """The transfer is over. Raises: what `begin` and `Transfer.poll` do."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wanted.put((begin, done))
        await asyncio.shield(done)

    def stop(self) -> None:
        """The thread is gone; what it drove is left as it is."""
        self._wanted.put(None)
        self._thread.join()

    def _run(self) -> None:
        under_way: list[tuple[Transfer, asyncio.Future[None]]] = []
        sleep_s = FIRST_SLEEP_S
        while True:
            try:
                while (wanted := self._wanted.get(block=not under_way)) is not None:
                    begin, done = wanted
                    with _reported(done):
                        under_way.append((begin(), done))
                    sleep_s = FIRST_SLEEP_S
                    if self._wanted.empty():
                        break
                if wanted is None:
                    return
            except Empty:
                pass
            left = []
            for transfer, done in under_way:
                is_over = True
                with _reported(done):
                    is_over = transfer.poll()
                if not is_over:
                    left.append((transfer, done))
                    continue
                transfer.release()
                _settle(done, None)
            if len(left) == len(under_way) and left:
                time.sleep(sleep_s)
                sleep_s = min(1.5 * sleep_s, LONGEST_SLEEP_S)
            else:
                sleep_s = FIRST_SLEEP_S
            under_way = left


@contextlib.contextmanager
def _reported(done: "asyncio.Future[None]") -> Iterator[None]:
    """What goes wrong is told to whoever waits."""
    try:
        yield
    except KVStoreError as error:
        _settle(done, error)
    except Exception as error:  # or whoever waits would wait for ever
        log.exception("transfer failed: this is a bug of the store")
        _settle(done, StoreBug(f"transfer: {type(error).__name__}: {error}; report it"))


def _settle(done: "asyncio.Future[None]", error: KVStoreError | None) -> None:
    def settle() -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop was closed
        done.get_loop().call_soon_threadsafe(settle)


def posts(sizes: AnyArray) -> Iterator[slice]:
    """Runs of pieces of at most POST_BYTES and POST_DESCRIPTORS."""
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        before = ends[first] - sizes[first]
        last = int(np.searchsorted(ends, before + POST_BYTES, side="right"))
        last = min(max(first + 1, last), first + POST_DESCRIPTORS)
        yield slice(first, last)
        first = last
