"""Clients for other processes than the test's. Each stops where the test may kill it, says so, and waits.

Run as `child.py SCENARIO '{"address": ..., ...}'`; not a test.
"""

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from builders import chain, rows, spec

from kvstore.errors import KVStoreError, StoreTimeout, StoreUnavailable
from kvstore.transport.shm import Op, Reply, Request, create_memfd, seal_region
from kvstore.transport.ucx import Agent, why_unavailable
from kvstore_client import BlockRows, ClientOptions, ClusterLoad, ClusterWrite, KVClient
from kvstore_client import connect as open_client

TIMEOUT_S = 20.0


def stop(word: str) -> str:
    """The test hears the word; this returns what the test says, when it does."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()
    return sys.stdin.readline().strip()


def connect(address: str, fields: dict) -> KVClient:
    options = ClientOptions(name="child", timeout_s=TIMEOUT_S, transport=sys.argv[3])
    client = KVClient(address, spec(**fields), options=options)
    client.wait_ready(TIMEOUT_S)
    return client


def write(address: str, fields: dict, length: int, seed: int = 0, parts: list[int] | None = None) -> None:
    """Reserves, then puts part after part; stops after each."""
    client = connect(address, fields)
    kv = client.spec
    hashes = chain(length, of=kv, seed=seed)
    data = rows(kv, hashes)
    writing = client.store(hashes, parts=parts)
    stop("reserved")
    for part in writing.parts:
        begin, size = kv.part_range(part)
        writing.put(part, data[:, begin : begin + size])
        stop(f"put {part}")
    stop(" ".join(outcome.name for outcome in writing.commit()))


def read(address: str, fields: dict, length: int, seed: int = 0) -> None:
    """Matches and views; goes on to look at its views again, and to load the blocks again."""
    client = connect(address, fields)
    kv = client.spec
    hashes = chain(length, of=kv, seed=seed)
    match = client.match(hashes)
    load = client.load(match, view=True)
    result = load.wait()
    seen = [load.view(block, 0).copy() for block in range(result.num_loaded)]
    stop(f"holding {match.num_blocks} {result.num_loaded}")
    expected = rows(kv, hashes)
    right = all((view == expected[block][: len(view)]).all() for block, view in enumerate(seen))
    try:
        load.check()
        stop(f"unchanged {right}")
    except KVStoreError as error:
        stop(f"{type(error).__name__} {right}")
    client.wait_ready(TIMEOUT_S)
    again = client.match(hashes)
    target = np.zeros((length, kv.block_bytes), np.uint8)
    result = client.load(hashes, into=BlockRows(target)).wait()
    wrong = sum(not (target[block] == expected[block]).all() for block in range(result.num_loaded))
    stop(f"matched {again.num_blocks} loaded {result.num_loaded} wrong {wrong}")


def follow(address: str, fields: dict, length: int, seed: int = 0) -> None:
    """Follows blocks in writing; stops when the first part is there, while the others are not."""
    client = connect(address, fields)
    hashes = chain(length, of=client.spec, seed=seed)
    target = np.zeros((length, client.spec.block_bytes), np.uint8)
    load = client.load(hashes, into=BlockRows(target), follow=True)
    load.wait_part(0)
    stop("part 0")


def rise(address: str, fields: dict, length: int) -> None:
    """Loads blocks that are on disk only, and stops while they are on their way."""
    client = connect(address, fields)
    hashes = chain(length, of=client.spec)
    client.load(hashes, into=BlockRows(np.zeros((length, client.spec.block_bytes), np.uint8)))
    stop("loading")


def churn(address: str, fields: list[dict], num_chains: int, length: int, seed: int) -> None:
    """Rounds of stores, loads, matches and verifies of chains of several namespaces, each until the daemon is gone.

    Says after each round what it did: "stored N loaded N wrong N".
    """
    clients = [connect(address, one) for one in fields]
    random = np.random.default_rng(seed)
    while True:
        done = dict.fromkeys(("stored", "loaded", "wrong"), 0)
        try:
            for client in clients:
                client.wait_ready(TIMEOUT_S)
            stop("ready")
            while True:
                client = clients[random.integers(len(clients))]
                whole = chain(length, of=client.spec, seed=int(random.integers(num_chains)))
                hashes = whole[: int(random.integers(1, length + 1))]
                act = random.choice(["store", "load", "match", "verify", "prefetch"], p=[0.35, 0.45, 0.1, 0.05, 0.05])
                if act == "store":
                    with client.store(hashes) as writing:
                        writing.put_blocks(rows(client.spec, hashes))
                    done["stored"] += len(hashes)
                elif act == "load":
                    target = np.zeros((len(hashes), client.spec.block_bytes), np.uint8)
                    failed = client.load(hashes, into=BlockRows(target), follow=True).wait().errors
                    good = [block for block in range(len(hashes)) if block not in failed]
                    done["loaded"] += len(good)
                    done["wrong"] += int((target[good] != rows(client.spec, hashes)[good]).any(axis=1).sum())
                else:
                    getattr(client, act)(hashes)
        except StoreUnavailable:
            stop(" ".join(f"{what} {count}" for what, count in done.items()))


def agent(size_bytes: int, number: int, filled: int = 7, at: int = 0, device: str = "lo", ports: str = "0") -> None:
    """Only the agent of a client, named as it is told; says where its memory is, and how often it holds `filled`.

    `at` is the address of the memory, 0: any; `ports` the range from which the agent takes that where it listens.
    """
    os.environ["UCX_TCP_PORT_RANGE"] = ports
    assert not why_unavailable()  # it is loaded before the session begins that waits for this agent
    memory = memory_at(at, size_bytes) if at else np.zeros(size_bytes, np.uint8)
    memory[:] = filled
    passive = Agent(stop("ready"), device=device)
    passive.register(memory.ctypes.data, size_bytes, device_id=number)
    stop(json.dumps([memory.ctypes.data, passive.metadata(memory.ctypes.data, device_id=number).hex()]))
    stop(str(int((memory == filled).sum())))


def memory_at(address: int, size_bytes: int) -> np.ndarray:
    """Memory of this process that begins there."""
    fixed = 0x100000  # MAP_FIXED_NOREPLACE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    got = libc.mmap(address, size_bytes, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed, -1, 0)
    assert got == address, f"mmap: {os.strerror(ctypes.get_errno())}"
    return np.frombuffer((ctypes.c_uint8 * size_bytes).from_address(address), np.uint8)


def round_trip(address: str, fields: dict, length: int, seed: int, ucx_device: str = "") -> None:
    """Stores blocks and loads them again; says how many, and how many bytes of them are wrong."""
    options = ClientOptions(name="child", timeout_s=TIMEOUT_S, transport=sys.argv[3], ucx_device=ucx_device)
    client = KVClient(address, spec(**fields), options=options)
    client.wait_ready(TIMEOUT_S)
    hashes = chain(length, of=client.spec, seed=seed)
    data = rows(client.spec, hashes)
    target = np.zeros_like(data)
    try:
        with client.store(hashes) as writing:
            writing.put_blocks(data)
        result = client.load(hashes, into=BlockRows(target)).wait()
    except KVStoreError as error:
        stop(f"{type(error).__name__} {error}")
        return
    num_stored = sum(outcome.name == "STORED" for outcome in writing.outcomes)
    stop(f"stored {num_stored} loaded {result.num_loaded} wrong {int((target != data).sum())}")


def round_trips(address: str, fields: dict, length: int) -> None:
    """Stores chains and loads each again until it is told to stop; says how many, and how many bytes were wrong."""
    client = connect(address, fields)
    stop("ready")
    told = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
    num_rounds = wrong = 0
    while not told.is_set():
        num_rounds += 1
        hashes = chain(length, of=client.spec, seed=num_rounds)
        data = rows(client.spec, hashes)
        target = np.zeros_like(data)
        with client.store(hashes) as writing:
            writing.put_blocks(data)
        result = client.load(hashes, into=BlockRows(target)).wait()
        assert not result.errors, result.errors
        wrong += int((target != data).sum())
    stop(f"{num_rounds} {wrong}")


def late(address: str, fields: dict, length: int, timeout_s: float) -> None:
    """Says why it is not connected; then, when it is told that it can be, loads within that time."""
    client = KVClient(address, spec(**fields), options=ClientOptions(timeout_s=TIMEOUT_S, transport=sys.argv[3]))
    hashes = chain(length, of=client.spec, seed=1)
    try:
        client.match(hashes)
    except KVStoreError as error:
        stop(f"{type(error).__name__} {error}")
    client.wait_ready(timeout_s)
    target = np.zeros((length, client.spec.block_bytes), np.uint8)
    result = client.load(hashes, into=BlockRows(target)).wait()
    stop(f"loaded {result.num_loaded} wrong {int((target != rows(client.spec, hashes)).sum())}")


def hurried(address: str, fields: dict, length: int, timeout_s: float) -> None:
    """Loads and stores with a deadline, then loads with another; says what came of each."""
    client = connect(address, fields)
    hashes = chain(length, of=client.spec, seed=1)
    data = rows(client.spec, hashes)
    target = np.zeros_like(data)
    said = []
    try:
        client.load(hashes, into=BlockRows(target), timeout_s=timeout_s).wait()
    except KVStoreError as error:
        said.append(f"load {type(error).__name__}")
    try:
        client.store(chain(length, of=client.spec, seed=2), timeout_s=timeout_s)
    except KVStoreError as error:
        said.append(f"store {type(error).__name__}")
    target[:] = 0
    result = client.load(hashes, into=BlockRows(target)).wait()
    stop(f"{' '.join(said)} then {result.num_loaded} wrong {int((target != data).sum())}")


def many(address: str, fields: dict, length: int, count: int) -> None:
    """So many clients at once, in processes of their own; stops when all are connected; says how many were right.

    Each stores a chain of its own, and loads that and one that they share. They are forked, so that they are light.
    """
    ready, say_ready = os.pipe()
    go, say_go = os.pipe()

    def one(number: int) -> bool:
        client = connect(address, fields)
        os.write(say_ready, b".")
        os.close(say_go)
        os.read(go, 1)  # until the parent has closed it, too
        own = chain(length, of=client.spec, seed=number)
        data = rows(client.spec, own)
        with client.store(own) as writing:
            writing.put_blocks(data)
        right = all(outcome.name == "STORED" for outcome in writing.outcomes)
        for hashes in (own, chain(length, of=client.spec)):
            target = np.zeros_like(data)
            right &= client.load(hashes, into=BlockRows(target)).wait().num_loaded == length
            right &= bool((target == rows(client.spec, hashes)).all())
        return right

    pids = [forked(lambda number=number: one(number)) for number in range(1, count + 1)]
    os.close(say_ready)
    for _ in pids:
        os.read(ready, 1)
    stop("connected")
    os.close(say_go)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    stop(f"{codes.count(0)} right")


def killed_in_turn(address: str, fields: dict, length: int) -> None:
    """Clients, as many as it is told, one after the other; each is killed while it loads and stores from a region."""

    def one() -> bool:
        client = connect(address, fields)
        regions = [client.region(4096) for _ in range(24)]  # so that what is kept of each shows
        region = client.region(2 * length * client.spec.block_bytes)
        to_store, to_load = region.array.reshape(2, length, -1)
        writing = client.store(chain(length, of=client.spec, seed=1))
        client.load(chain(length, of=client.spec), into=BlockRows(to_load))
        writing.put(0, to_store[:, : client.spec.part_bytes[0]])
        os.kill(os.getpid(), signal.SIGKILL)
        return bool(regions)

    Agent("child", device="lo").close()  # loads the library here, and not in each: that takes longer than all the rest
    while times := int(stop("ready")):
        for _ in range(times):
            _, code = os.waitpid(forked(one), 0)
            assert code == signal.SIGKILL


def forked(work: Callable[[], bool]) -> int:
    """A process that has loaded all that a client needs, and ends with 0 if the work says that all was right."""
    import grpc  # noqa: F401 - here and now, so that it is not loaded once in each

    why_unavailable()
    pid = os.fork()
    if pid:
        return pid
    try:
        os._exit(0 if work() else 1)
    finally:
        traceback.print_exc()
        os._exit(2)


def load_until_cut(address: str, fields: dict, length: int) -> None:
    """Loads the same blocks until that fails; then, when it is told to, once more."""
    client = connect(address, fields)
    hashes = chain(length, of=client.spec)
    data = rows(client.spec, hashes)
    target = np.zeros_like(data)
    stop("ready")
    wrong = 0
    try:
        while True:
            target[:] = 0
            failed = client.load(hashes, into=BlockRows(target), timeout_s=2.0).wait(timeout_s=2.0).errors
            good = [block for block in range(length) if block not in failed]
            wrong += int((target[good] != data[good]).sum())
    except KVStoreError:
        stop(f"cut wrong {wrong}")
    while True:
        try:
            client.wait_ready(TIMEOUT_S)
            target[:] = 0
            result = client.load(hashes, into=BlockRows(target)).wait()
            break
        except (StoreTimeout, StoreUnavailable):  # the end of the old session may still be on its way
            continue
    stop(f"again {result.num_loaded} wrong {int((target != data).sum())}")


def engine(address: str, fields: dict, length: int, timeout_s: float) -> None:
    """A client of a store of several daemons, with a deadline of `timeout_s` on each call; does what it is told.

    It is told one of the words below, most of them with the number of a chain. What it says is JSON. A call that
    goes on long after its deadline ends the process.
    """
    options = ClientOptions(name="child", timeout_s=timeout_s, transport=sys.argv[3], breaker_cooldown_s=0.5)
    client = open_client(address, spec(**fields), options=options)
    client.wait_ready(TIMEOUT_S)
    target = np.zeros((length, client.spec.block_bytes), np.uint8)

    def chain_of(seed: int) -> tuple[list, np.ndarray]:
        hashes = chain(length, of=client.spec, seed=seed)
        return hashes, rows(client.spec, hashes)

    def live() -> str:
        """The members that answer, as far as the client knows."""
        ring = client._links.current()
        return "".join(node for node, link in zip(ring.view.nodes, ring.links, strict=True) if link.live)

    def match(seed: int) -> int:
        return client.match(chain_of(seed)[0], lease="").num_found

    def store(seed: int) -> list[int]:
        """The blocks that were not stored."""
        hashes, data = chain_of(seed)
        with client.store(hashes) as writing:
            writing.put_blocks(data)
        return not_stored(writing)

    def not_stored(writing: ClusterWrite) -> list[int]:
        return [block for block, outcome in enumerate(writing.outcomes) if outcome.name != "STORED"]

    def store_in_steps(seed: int) -> list[int]:
        """As store; stops when the first part is with the daemons."""
        hashes, data = chain_of(seed)
        with client.store(hashes) as writing:
            for part in writing.parts:
                begin, size = client.spec.part_range(part)
                writing.put(part, data[:, begin : begin + size])
                if part == 0:
                    stop("part 0")
        return not_stored(writing)

    def came(loading: ClusterLoad, data: np.ndarray) -> dict:
        missed = sorted(loading.wait().errors)
        good = np.setdiff1d(np.arange(length), missed)
        return {"missed": missed, "wrong": int((target[good] != data[good]).sum())}

    def load(seed: int) -> dict:
        """The blocks that did not come, and how many bytes of the others are wrong."""
        hashes, data = chain_of(seed)
        target[:] = 0
        return came(client.load(hashes, into=BlockRows(target)), data)

    def load_until_missed(seed: int) -> dict:
        """One load after the other, up to the first that is not whole, which is told."""
        hashes, data = chain_of(seed)
        while True:
            target[:] = 0
            told = came(client.load(hashes, into=BlockRows(target)), data)
            if told["missed"] or told["wrong"]:
                return told

    def follow(seed: int) -> dict:
        """As load, of blocks that are being written; stops when the first part of all is there."""
        hashes, data = chain_of(seed)
        target[:] = 0
        loading = client.load(hashes, into=BlockRows(target), follow=True)
        loading.wait_part(0)
        stop("part 0")
        return came(loading, data)

    does = {each.__name__: each for each in (live, match, store, store_in_steps, load, load_until_missed, follow)}
    said = "ready"
    with ThreadPoolExecutor(1) as pool:
        while words := stop(said).split():
            working = pool.submit(does[words[0]], *map(int, words[1:]))
            try:
                said = json.dumps(working.result(TIMEOUT_S))
            except TimeoutError:
                traceback.print_exc()
                os._exit(3)


def load_large(address: str, fields: dict, length: int) -> None:
    """Loads blocks into a region, again and again, until it is killed."""
    client = connect(address, fields)
    region = client.region(length * client.spec.block_bytes)
    hashes = chain(length, of=client.spec)
    stop("ready")
    while True:
        client.load(hashes, into=BlockRows(region.array.reshape(length, -1))).wait()


def store_large(address: str, fields: dict, length: int) -> None:
    """Stores chain after chain from a region, until it is killed."""
    client = connect(address, fields)
    region = client.region(length * client.spec.block_bytes)
    seed = 1
    stop("ready")
    while True:
        with client.store(chain(length, of=client.spec, seed=seed)) as writing:
            writing.put_blocks(region.array.reshape(length, -1))
        seed += 1


def register_as(shm_path: str, ticket: str, uid: int, register_uid: int) -> None:
    """Makes a region as one user and registers it as another; says what the daemon answered."""
    size_bytes = 4096
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.seteuid(register_uid)
    peer.connect(shm_path)
    os.seteuid(0)
    peer.send(Request(Op.ATTACH, ticket=bytes.fromhex(ticket)).encode())
    assert Reply.decode(peer.recv(Reply.MAX_BYTES)).code == 0
    os.seteuid(uid)
    fd, _memory = create_memfd("test", size_bytes)
    seal_region(fd)
    os.seteuid(0)
    socket.send_fds(peer, [Request(Op.REGION, 1, size_bytes).encode()], [fd])
    reply = Reply.decode(peer.recv(Reply.MAX_BYTES))
    stop(f"{reply.code} {reply.message}")


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
