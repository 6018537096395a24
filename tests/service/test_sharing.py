"""Several clients over the same blocks: one writes, others wait, follow, lease, and give back."""

from collections.abc import Callable

import numpy as np
from builders import chain, rows, spec
from service.harness import DaemonProcess, RawStream, eventually, over_all_transports, store

from kvstore.hashing import pack
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client import BlockRows, KVClient, Outcome

KV = spec(layers=3, bytes_per_part=8192)
HASHES = chain(6, of=KV)
DATA = rows(KV, HASHES)

Connect = Callable[..., KVClient]


@over_all_transports
def test_the_second_writer_of_a_block_moves_nothing(daemon: DaemonProcess, connect: Connect) -> None:
    """Covers: A1, A20."""
    first, second = connect(daemon, KV), connect(daemon, KV)
    write = first.store(HASHES)
    late = second.store(HASHES)
    assert late.outcomes == [Outcome.WRITING] * 6
    late.put_blocks(np.zeros_like(DATA))
    assert late.commit() == [Outcome.WRITING] * 6
    assert daemon.stats().counters.bytes_stored == 0
    write.put_blocks(DATA)
    assert write.commit() == [Outcome.STORED] * 6
    assert daemon.stats().counters.bytes_stored == DATA.size

    later = second.store(HASHES)
    assert later.outcomes == [Outcome.STORED] * 6
    later.put_blocks(np.zeros_like(DATA))
    assert later.commit() == [Outcome.STORED] * 6

    assert daemon.stats().counters.bytes_stored == DATA.size
    assert second.statistics().bytes_stored == 0
    target = np.zeros_like(DATA)
    assert second.load(HASHES, into=BlockRows(target)).wait().num_loaded == 6
    assert (target == DATA).all()


@over_all_transports
def test_a_full_store_of_leased_blocks_refuses_saves_and_goes_on_when_they_are_released(
    make_daemon: Callable[..., DaemonProcess], connect: Connect
) -> None:
    """Covers: E5, E11."""
    daemon = make_daemon(cpu_capacity="1MiB")
    client = connect(daemon, KV)
    every = chain(100, of=KV)
    outcomes = store(client, every)
    num_room = outcomes.count(Outcome.STORED)
    assert 0 < num_room < 100
    assert outcomes == [Outcome.STORED] * num_room + [Outcome.FULL] * (100 - num_room)
    match = client.match(every)
    assert match.num_blocks == num_room
    others = chain(4, of=KV, seed=1)

    assert store(client, others) == [Outcome.FULL] * 4

    stats = daemon.stats()
    assert stats.counters.blocks_refused == 100 - num_room + 4
    assert stats.counters.blocks_evicted == 0
    assert stats.tiers[0].slab_bytes <= stats.tiers[0].capacity_bytes
    target = np.zeros((num_room, KV.block_bytes), np.uint8)
    assert client.load(match, into=BlockRows(target)).wait().num_loaded == num_room
    assert (target == rows(KV, every[:num_room])).all()

    match.release()

    eventually(lambda: daemon.stats().blocks_leased == 0)
    assert store(client, others) == [Outcome.STORED] * 4
    assert client.match(every, lease="").num_blocks == num_room - 4, "from the end of the chain"


@over_all_transports
def test_a_lease_asked_for_ten_times_is_one_lease(
    daemon: DaemonProcess, connect: Connect, raw: Callable[..., RawStream]
) -> None:
    """Covers: C1, C2."""
    store(connect(daemon, KV), HASHES)
    stream = raw(daemon, KV)
    for _ in range(10):
        assert stream.ask(match=pb.Match(hashes=pack(HASHES), lease="request")).matched.num_blocks == 6
    stats = daemon.stats()
    assert stats.blocks_leased == 6
    assert [(session.num_leases, session.blocks_leased) for session in stats.sessions] == [(0, 0), (1, 6)]
    fewer = stream.ask(match=pb.Match(hashes=pack(HASHES[:2]), lease="request")).matched
    assert fewer.num_blocks == 2
    assert daemon.stats().blocks_leased == 2, "the lease holds what was asked for last"
    assert stream.ask(release=pb.Release(lease="request")).released.num_blocks == 2
    assert daemon.stats().blocks_leased == 0
    assert stream.ask(release=pb.Release(lease="request")).released.num_blocks == 0


@over_all_transports
def test_two_leases_on_one_block_are_two(daemon: DaemonProcess, connect: Connect) -> None:
    """Covers: C2."""
    one, two = connect(daemon, KV), connect(daemon, KV)
    store(one, HASHES)
    one.match(HASHES, lease="a")
    one.match(HASHES, lease="b")
    two.match(HASHES, lease="a")
    assert daemon.stats().blocks_leased == 6
    one.release("a")
    one.release("a")
    two.release("a")
    assert daemon.stats().blocks_leased == 6
    one.release("b")
    assert daemon.stats().blocks_leased == 0


@over_all_transports
def test_a_follow_gets_each_part_as_it_arrives(daemon: DaemonProcess, connect: Connect) -> None:
    """Covers: G5. Layer by layer; the last part commits."""
    writer, reader = connect(daemon, KV), connect(daemon, KV)
    store(writer, HASHES[:2])
    write = writer.store(HASHES)
    assert write.outcomes == [Outcome.STORED] * 2 + [Outcome.NEW] * 4
    match = reader.match(HASHES)
    assert (match.num_blocks, match.num_writing) == (2, 4)
    target = np.zeros_like(DATA)
    load = reader.load(match, into=BlockRows(target), follow=True)
    assert load.num_blocks == 6
    for part in range(KV.num_parts):
        begin, size = KV.part_range(part)
        assert not target[2:, begin : begin + size].any()
        write.put(part, DATA[:, begin : begin + size])
        load.wait_part(part)
        assert (target[:, begin : begin + size] == DATA[:, begin : begin + size]).all()
    assert load.wait().num_loaded == 6
    assert write.commit() == [Outcome.STORED] * 6


@over_all_transports
def test_an_aborted_write_fails_its_followers(daemon: DaemonProcess, connect: Connect) -> None:
    """Covers: A5, B7."""
    writer, reader = connect(daemon, KV), connect(daemon, KV)
    write = writer.store(HASHES)
    write.put(0, DATA[:, :8192])
    target = np.zeros_like(DATA)
    load = reader.load(HASHES, into=BlockRows(target), follow=True)
    write.abort()
    result = load.wait()
    assert result.num_loaded == 0
    assert sorted(result.errors) == list(range(6))
    assert daemon.stats().tiers[0].used_bytes == 0


@over_all_transports
def test_a_block_of_two_ranks_is_a_hit_when_both_have_written_it(daemon: DaemonProcess, connect: Connect) -> None:
    """Covers: E7."""
    kv = spec(layers=2, ranks=2, bytes_per_part=8192)
    hashes = chain(3, of=kv)
    data = rows(kv, hashes)
    ranks = [connect(daemon, kv), connect(daemon, kv)]
    writes = [client.store(hashes, parts=list(kv.rank_parts(rank))) for rank, client in enumerate(ranks)]
    assert [write.outcomes for write in writes] == [[Outcome.NEW] * 3] * 2
    for rank, write in enumerate(writes):
        assert all(client.match(hashes, lease="").num_blocks == 0 for client in ranks)
        for part in write.parts:
            begin, size = kv.part_range(part)
            write.put(part, data[:, begin : begin + size])
        assert write.commit() == [Outcome.WRITING if rank == 0 else Outcome.STORED] * 3
    assert all(client.match(hashes, lease="").num_blocks == 3 for client in ranks)
    target = np.zeros_like(data)
    assert ranks[0].load(hashes, into=BlockRows(target)).wait().num_loaded == 3
    assert (target == data).all()


@over_all_transports
def test_a_block_without_its_parent_is_refused(daemon: DaemonProcess, connect: Connect) -> None:
    """Covers: E6. Nobody could match it."""
    client = connect(daemon, KV)
    write = client.store(HASHES[2:], parent=HASHES[1])
    assert write.outcomes == [Outcome.ORPHAN] * 4
    write.commit()
    store(client, HASHES[:2])
    with client.store(HASHES[2:], parent=HASHES[1]) as write:
        write.put_blocks(DATA[2:])
    assert write.outcomes == [Outcome.STORED] * 4
    assert client.match(HASHES, lease="").num_blocks == 6


@over_all_transports
def test_a_lookup_of_any_length_is_one_round_trip(daemon: DaemonProcess, connect: Connect) -> None:
    """Covers: F1. How long it takes is for the benchmarks to say."""
    client = connect(daemon, KV)
    before = client.statistics().calls
    assert client.match([bytes([number]) * 32 for number in range(200)] * 100).num_blocks == 0
    assert client.statistics().calls == before + 1
    assert daemon.stats().counters.matches == 1
    assert daemon.stats().counters.blocks_asked == 20_000
