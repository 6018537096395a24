"""The scheduler side, with requests and a client that are stand-ins: what is asked, loaded, saved, held."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from adapters.vllm_stand_ins import FakeClient, Side

from kvstore_client.adapters.vllm.identity import Identity
from kvstore_client.adapters.vllm.lookups import Waits
from kvstore_client.adapters.vllm.options import Granularity
from kvstore_client.adapters.vllm.planning import Saved, saves_by_layer
from kvstore_client.breaker import BreakerState


@pytest.fixture
def client() -> Iterator[FakeClient]:
    client = FakeClient()
    yield client
    client.close()


def test_request_is_given_what_the_store_has_behind_its_local_tokens(client: FakeClient) -> None:
    side = Side(client)
    request = side.new("a", 18)
    client.stored = set(request.block_hashes[:3])
    assert side.matched(request, local=4) == (8, True)
    assert side.matched(request, local=4) == (8, True)
    assert client.asked == [3]  # asked once, however often the engine asks
    plan = side.schedule(request, 8, 0, [10, 11, 12, 13, 14])
    (load,) = plan.loads
    assert (load.hashes, load.block_ids) == (tuple(request.block_hashes[1:3]), ((11, 12),))
    assert (load.follow, load.within_forward) == (False, False)
    assert client.leases == 1
    side.side.heard(loaded={"a"}, failed=set())
    assert client.leases == 0


@pytest.mark.parametrize(("async_load", "expected"), [(True, 16), (False, 12)])
def test_load_within_the_forward_pass_leaves_a_token_to_compute(
    client: FakeClient, async_load: bool, expected: int
) -> None:
    side = Side(client, async_load=async_load)
    request = side.new("a", 16)
    client.stored = set(request.block_hashes)
    assert side.matched(request) == (expected, async_load)


def test_slow_answer_makes_the_engine_ask_later(client: FakeClient) -> None:
    """Covers: F1."""
    side = Side(client)
    request = side.new("a", 16)
    client.stored = set(request.block_hashes)
    client.answers.clear()
    assert side.matched(request) == (None, False)
    client.answers.set()
    assert side.matched(request) == (16, True)


def test_request_whose_load_failed_is_not_loaded_again(client: FakeClient) -> None:
    """Covers: B6."""
    side = Side(client)
    request = side.new("a", 16)
    client.stored = set(request.block_hashes)
    side.matched(request)
    side.schedule(request, 16, 0, [1, 2, 3, 4])
    side.side.heard(loaded=set(), failed={"a"})
    assert side.matched(request) == (0, False)
    assert (len(client.asked), client.leases) == (1, 0)
    assert side.step({request: 16}).saves[0].hashes == tuple(request.block_hashes)  # what was lost is saved again


def test_store_that_is_away_is_asked_once_for_each_request(client: FakeClient) -> None:
    side = Side(client)
    client.away = True
    request = side.new("a", 16)
    assert [side.matched(request), side.matched(request)] == [(0, False), (0, False)]
    assert side.side.tally.take() == {"lookups": 1, "lookup_failures": 1}


def test_store_behind_an_open_breaker_is_asked_once_in_a_while(client: FakeClient) -> None:
    side = Side(client)
    client.away, client.breaker = True, BreakerState.OPEN
    for name in ("a", "b", "c"):
        assert side.matched(side.new(name, 16)) == (0, False)
    assert len(client.asked) == 1
    assert side.side.tally.take() == {"lookups": 1, "lookup_failures": 3}
    client.away, client.breaker = False, BreakerState.CLOSED
    back = side.new("d", 16)
    client.stored = set(back.block_hashes)
    assert side.matched(back) == (16, True)


@pytest.mark.parametrize("ended", ["finished", "not wanted"])
def test_lookup_that_is_not_used_holds_nothing(client: FakeClient, ended: str) -> None:
    """Covers: C1, C3."""
    side = Side(client)
    request = side.new("a", 16)
    client.stored = set(request.block_hashes)
    client.answers.clear()
    side.matched(request)
    if ended == "finished":
        side.side.finished("a")
    else:
        side.side.allocated(request, [[1, 2, 3, 4]], 0)
    client.answers.set()
    side.side.close()  # ends the lookup's thread
    side.side._pool.shutdown(wait=True)
    assert client.leases == 0


def test_blocks_are_saved_once_when_all_their_tokens_are_computed_and_their_hash_is_known(client: FakeClient) -> None:
    side = Side(client)
    request = side.new("a", 18, num_hashes=3)  # the fourth hash lags behind
    side.matched(request)
    first = side.schedule(request, 0, 10, [1, 2, 3, 4, 5])
    assert [(job.block_ids, job.parent) for job in first.saves] == [(((1, 2),), None)]
    second = side.step({request: 8})
    assert [(job.block_ids, job.parent) for job in second.saves] == [(((3,),), request.block_hashes[1])]
    request.block_hashes.append(b"4" * 32)
    assert [job.block_ids for job in side.step({request: 1}).saves] == [((4,),)]
    assert side.step({request: 1}).saves == ()


def test_nothing_is_saved_upon_a_load_that_may_yet_fail(client: FakeClient) -> None:
    """The poisoning that a prototype met; also through another request that shares the blocks. Covers: A21."""
    side = Side(client, async_load=False)
    request = side.new("a", 17)
    client.stored = set(request.block_hashes[:2])
    side.matched(request)
    assert side.schedule(request, 8, 9, [1, 2, 3, 4, 5]).saves == ()
    other = side.new("b", 12)
    side.tables["b"] = ([1, 2, 9],)
    request.num_computed_tokens, other.num_computed_tokens = 17, 8
    assert side.step({other: 4}).saves == ()
    third = side.new("c", 20)
    side.tables["c"] = ([3, 7, 8, 9, 6],)  # the first of them was computed upon the load
    assert side.step({third: 20}).saves == ()
    assert side.side.heard(loaded=set(), failed={"a"}) == {1, 2, 3, 4, 5}
    request.num_computed_tokens = 0
    (job,) = side.step({request: 17}).saves
    assert job.block_ids == ((1, 2, 3, 4),)


def test_load_that_succeeded_frees_the_saves_of_its_step(client: FakeClient) -> None:
    side = Side(client, async_load=False)
    request = side.new("a", 17)
    client.stored = set(request.block_hashes[:2])
    side.matched(request)
    side.schedule(request, 8, 9, [1, 2, 3, 4, 5])
    assert side.side.heard(loaded={"a"}, failed=set()) == set()
    request.num_computed_tokens = 17
    (job,) = side.step({request: 1}).saves
    assert (job.block_ids, job.parent) == (((3, 4),), request.block_hashes[1])


def test_resumed_request_saves_from_its_new_blocks(client: FakeClient) -> None:
    """Covers: A20."""
    side = Side(client)
    request = side.new("a", 16)
    side.matched(request)
    side.schedule(request, 0, 8, [1, 2, 3, 4])
    request.num_computed_tokens = 0  # preempted
    side.tables["a"] = ([8, 7, 6, 5],)
    (job,) = side.step({request: 16}).saves
    assert (job.block_ids, job.hashes) == (((6, 5),), tuple(request.block_hashes[2:]))


def test_request_granularity_saves_when_the_prompt_is_computed(client: FakeClient) -> None:
    side = Side(client, granularity=Granularity.REQUEST)
    request = side.new("a", 16)
    assert side.schedule(request, 0, 8, [1, 2, 3, 4]).saves == ()
    assert side.step({request: 8}).saves[0].block_ids == ((1, 2, 3, 4),)


def test_auto_goes_by_layer_where_much_is_computed() -> None:
    def by_layer(granularity: Granularity, tokens: int) -> bool:
        return saves_by_layer(granularity, num_scheduled_tokens=tokens, worth_tokens=100)

    assert [by_layer(Granularity.AUTO, tokens) for tokens in (99, 100)] == [False, True]
    assert by_layer(Granularity.LAYER, 1)
    assert not by_layer(Granularity.CHUNK, 1000)


def test_decode_instance_follows_blocks_that_are_being_written(client: FakeClient) -> None:
    side = Side(client, saves=False)
    request = side.new("a", 16)
    client.stored, client.writing = set(request.block_hashes[:1]), set(request.block_hashes[1:3])
    assert side.matched(request) == (12, True)
    assert side.schedule(request, 12, 0, [1, 2, 3, 4]).loads[0].follow
    both = Side(client)
    assert both.matched(both.new("b", 16)) == (4, True)


def test_request_that_follows_waits_until_all_its_blocks_are_under_way(client: FakeClient) -> None:
    """Covers: B7."""
    side = Side(client, saves=False)
    request = side.new("a", 16, kv_transfer_params={"kvstore": "follow"})
    for _ in range(50):
        assert side.side.num_matched_tokens(request, 0) == (None, False)
    client.writing = set(request.block_hashes)
    assert side.matched(request) == (16, True)


def test_waiting_ends() -> None:
    now = [0.0]
    waits = Waits(10.0, clock=lambda: now[0])
    assert waits.go_on("a")
    now[0] = 9.9
    assert waits.go_on("a")
    now[0] = 10.0
    assert not waits.go_on("a")
    waits.forget("a")
    assert waits.go_on("a")


def test_requests_that_cannot_be_named_go_without_the_store(client: FakeClient) -> None:
    side = Side(client)
    lost = side.new("a", 16, lora_request=SimpleNamespace(lora_path="/nowhere"))
    shown = side.new("b", 16, skip_reading_prefix_cache=True)
    assert side.matched(lost) == side.matched(shown) == (0, False)
    assert side.schedule(lost, 0, 16, [1, 2, 3, 4]).saves == ()


def test_reset_leaves_the_shared_namespace(client: FakeClient) -> None:
    side = Side(client)
    before = side.step({}).identity
    side.side.reset()
    after = side.step({}).identity
    assert before == Identity("r", "")
    assert (after.revision, len(after.salt)) == ("r", 32)


def test_blocks_due_never_pass_what_is_known() -> None:
    saved = Saved()

    def due(**what: int) -> tuple[int, int]:
        hashes, tables = [b""] * what["hashes"], [[7] * what["table"]]
        return saved.due(hashes=hashes, tables=tables, num_computed_tokens=what["tokens"], block_tokens=4)  # type: ignore[arg-type]

    assert due(hashes=3, table=9, tokens=40) == (0, 3)
    assert due(hashes=9, table=4, tokens=40) == (3, 4)
    assert due(hashes=9, table=9, tokens=20) == (4, 5)
    assert due(hashes=9, table=9, tokens=8) == (5, 5)
