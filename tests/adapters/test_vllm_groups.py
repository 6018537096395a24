"""Several KV cache groups: what is asked, loaded and saved of groups whose windows have left some blocks."""

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the vLLM adapter moves tensors")

from adapters.vllm_stand_ins import FakeClient, Side  # noqa: E402
from builders import chain  # noqa: E402

from kvstore.errors import StoreUnavailable  # noqa: E402
from kvstore.spec import KVSpec  # noqa: E402
from kvstore_client import KVClient  # noqa: E402
from kvstore_client.adapters.vllm.groups import NULL_BLOCK, CacheGroups, Layer  # noqa: E402
from kvstore_client.adapters.vllm.identity import Identity  # noqa: E402
from kvstore_client.adapters.vllm.options import ConnectorOptions  # noqa: E402
from kvstore_client.adapters.vllm.planning import LoadJob, Saved, SaveJob, StepPlan  # noqa: E402
from kvstore_client.adapters.vllm.worker import WorkerSide  # noqa: E402

NUM_BLOCKS, PART_BYTES = 16, 64
IDENTITY = Identity("r", "")
OPTIONS = ConnectorOptions(address="unix:/none", timeout_s=20.0, load_timeout_s=20.0)

# Group 0 keeps all tokens, groups 1 and 2 see a window.
GROUPS = CacheGroups(
    (
        Layer("layers.0", 1, "SlidingWindowSpec", 8, 4, PART_BYTES),
        Layer("layers.1", 2, "SlidingWindowSpec", 8, 4, PART_BYTES),
        Layer("layers.2", 0, "FullAttentionSpec", None, 4, PART_BYTES),
    )
)
NAMES = [layer.name for layer in GROUPS.layers]
SPEC = KVSpec.uniform(
    model="m", revision="r", dtype="uint8", block_tokens=4, layers=3, bytes_per_part=PART_BYTES, layout="test"
)


# Scheduler side.


@pytest.fixture
def store() -> Iterator[FakeClient]:
    client = FakeClient()
    yield client
    client.close()


@pytest.mark.parametrize(("num_tokens", "expected"), [(16, 12), (17, 16), (19, 16)])
def test_one_token_is_left_to_compute_where_there_are_windows(
    store: FakeClient, num_tokens: int, expected: int
) -> None:
    """vLLM goes back by one token after all were loaded, and a window may have left that token's block."""
    side = Side(store, has_windows=True)
    request = side.new("a", num_tokens)
    store.stored = set(request.block_hashes)
    assert side.matched(request) == (expected, True)


def test_load_has_the_blocks_of_each_group(store: FakeClient) -> None:
    side = Side(store, has_windows=True)
    request = side.new("a", 18)
    store.stored = set(request.block_hashes)
    assert side.matched(request, local=4) == (12, True)
    (load,) = side.schedule(request, 12, 0, [1, 2, 3, 4], [0, 0, 7, 8], [0, 0, 9, 6]).loads
    assert load.hashes == tuple(request.block_hashes[1:4])
    assert load.block_ids == ((2, 3, 4), (0, 7, 8), (0, 9, 6))
    assert [load.needed(group) for group in range(3)] == [(0, 1, 2), (1, 2), (1, 2)]
    side.side.heard(loaded={"a"}, failed=set())
    assert side.step({request: 1}).saves == ()  # they came from there


def test_saves_take_each_step_s_blocks_from_the_table_of_their_group(store: FakeClient) -> None:
    side = Side(store, has_windows=True)
    request = side.new("a", 24)
    side.matched(request)
    (first,) = side.schedule(request, 0, 12, [1, 2, 3], [4, 5, 6]).saves
    assert (first.block_ids, first.parent) == (((1, 2, 3), (4, 5, 6)), None)
    side.tables["a"] = ([1, 2, 3, 7, 8, 9], [0, 5, 6, 10, 11, 12])  # the window has left a block that was saved
    (second,) = side.step({request: 12}).saves
    assert (second.block_ids, second.parent) == (((7, 8, 9), (10, 11, 12)), request.block_hashes[2])


def test_blocks_that_a_window_has_left_are_not_offered(store: FakeClient) -> None:
    """Of a prefix in the engine's own cache, only what the windows still hold."""
    side = Side(store, has_windows=True)
    request = side.new("a", 24)
    side.matched(request, local=16)
    request.num_computed_tokens = 16
    (save,) = side.schedule(request, 0, 8, [1, 2, 3, 4, 5, 6], [0, 0, 0, 7, 8, 9], [0, 0, 10, 11, 12, 13]).saves
    assert save.hashes == tuple(request.block_hashes[3:])
    assert (save.block_ids, save.parent) == (((4, 5, 6), (7, 8, 9), (11, 12, 13)), request.block_hashes[2])


def test_nothing_is_offered_if_the_last_block_is_gone() -> None:
    def due(tables: list[list[int]]) -> tuple[int, int]:
        return Saved().due(hashes=[b""] * 3, tables=tables, num_computed_tokens=12, block_tokens=4)  # type: ignore[list-item]

    assert due([[1, 2, 3], [0, 0, 0]]) == (3, 3)
    assert due([[1, 2, 3], [4, 0, 5]]) == (2, 3)
    assert due([[1, 2, 3], [4, 5]]) == (0, 2)


# Worker side.


class Rank:
    """A worker side, and memory of which each block belongs to one group at a time."""

    def __init__(self, client: KVClient, *, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (NUM_BLOCKS, PART_BYTES)
        overlaid, other = (torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator) for _ in range(2))
        self.tensors = {"layers.0": overlaid, "layers.1": other, "layers.2": overlaid}
        self.side = WorkerSide(
            options=OPTIONS, rank=0, saves=True, spec_for=lambda identity: SPEC, open_client=lambda spec: client
        )
        self.side.register(self.tensors, GROUPS, num_blocks=NUM_BLOCKS)

    def step(self, *, loads: tuple[LoadJob, ...] = (), saves: tuple[SaveJob, ...] = ()) -> Any:
        self.side.begin_step(StepPlan(IDENTITY, loads, saves))
        for name in NAMES:
            self.side.layer_computed(name)
        self.side.start_loads()
        self.side.end_saves()
        return self.side.end_loads()

    def load(self, hashes: list[Any], *tables: tuple[int, ...]) -> Any:
        """What the step reports in which the load is over."""
        results = self.step(loads=(LoadJob("l", tuple(hashes), tables, False, False),))
        while "l" not in results.finished:
            results = self.step()
        return results

    def save(self, hashes: list[Any], *tables: tuple[int, ...], by_layer: bool = True) -> None:
        self.step(saves=(SaveJob("s", tuple(hashes), tables, None, by_layer),))
        assert self.side._saves is not None
        self.side._saves._commits.submit(lambda: None).result()

    def rows(self, name: str, block_ids: tuple[int, ...]) -> list[bytes]:
        return [bytes(self.tensors[name][block_id].numpy()) for block_id in block_ids]


@pytest.fixture
def client() -> Iterator[KVClient]:
    with KVClient.in_process(SPEC, capacity_bytes=8 << 20) as client:
        yield client


@pytest.mark.parametrize("by_layer", [True, False])
def test_each_group_gets_the_blocks_that_it_needs_and_no_other_byte_changes(client: KVClient, by_layer: bool) -> None:
    one, two = Rank(client, seed=1), Rank(client, seed=2)
    hashes = chain(4, of=SPEC)
    one.save(hashes, (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12), by_layer=by_layer)
    assert client.match(hashes, lease="").num_blocks == 4
    before = {name: tensor.clone() for name, tensor in two.tensors.items()}
    tables = ((12, 11, 10, 9), (NULL_BLOCK, NULL_BLOCK, 1, 2), (NULL_BLOCK, 5, 4, 3))
    results = two.load(hashes, *tables)
    assert (results.loaded, results.failed, results.lost) == ({"l"}, set(), set())
    assert two.rows("layers.2", (12, 11, 10, 9)) == one.rows("layers.2", (1, 2, 3, 4))
    assert two.rows("layers.0", (1, 2)) == one.rows("layers.0", (7, 8))
    assert two.rows("layers.1", (5, 4, 3)) == one.rows("layers.1", (10, 11, 12))
    for name, written in (("layers.0", [12, 11, 10, 9, 1, 2]), ("layers.1", [5, 4, 3])):
        others = [block for block in range(NUM_BLOCKS) if block not in written]
        assert torch.equal(two.tensors[name][others], before[name][others])  # the null block among them
    assert two.side.tally.take()["blocks_loaded"] == 4


def test_load_of_which_a_part_is_missing_is_lost_as_a_whole(client: KVClient) -> None:
    """vLLM refuses to hear of single blocks where there are several groups. Covers: A5."""
    rank = Rank(client, seed=1)
    hashes = chain(4, of=SPEC)
    rank.save(hashes[:2], (1, 2), (5, 6), (9, 10))
    results = rank.load(hashes, (3, 4, 7, 8), (0, 11, 12, 13), (0, 14, 15, 1))
    assert (results.failed, results.lost, results.finished) == ({"l"}, {"l"}, {"l"})
    assert (results.loaded, results.invalid_block_ids) == (set(), set())
    counts = rank.side.tally.take()
    assert (counts["load_failures"], counts.get("blocks_loaded")) == (1, None)


def test_load_that_only_one_group_needs_is_enough(client: KVClient) -> None:
    """Where a window ends with the blocks, its groups need none of them."""
    rank = Rank(client, seed=1)
    hashes = chain(2, of=SPEC)
    rank.save(hashes, (1, 2), (5, 6), (9, 10))
    results = rank.load(hashes, (3, 4), (0, 0), (0, 0))
    assert (results.loaded, results.failed) == ({"l"}, set())
    assert rank.rows("layers.2", (3, 4)) == rank.rows("layers.2", (1, 2))


def test_nothing_is_written_any_more_when_a_load_is_told_to_have_failed(
    client: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of the loads that a job takes cannot begin; the first one is stopped before the engine hears of it."""
    rank = Rank(client, seed=1)
    hashes = chain(2, of=SPEC)
    rank.save(hashes, (1, 2), (5, 6), (9, 10))
    begun: list[Any] = []
    original = KVClient.load

    def second_fails(self: KVClient, *arguments: Any, **how: Any) -> Any:
        if begun:
            raise StoreUnavailable("away")
        load = original(self, *arguments, **how)
        cancel = load.cancel
        monkeypatch.setattr(load, "cancel", lambda: (begun.append("cancelled"), cancel()))
        begun.append(load)
        return load

    monkeypatch.setattr(KVClient, "load", second_fails)
    results = rank.load(hashes, (3, 4), (0, 7), (0, 8))
    assert (results.lost, results.loaded) == ({"l"}, set())
    assert set(begun[1:]) == {"cancelled"}
