"""The worker side over a real store in this process, and an engine's cache that is a tensor of the test's."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the vLLM adapter moves tensors")

from builders import chain  # noqa: E402

from kvstore.errors import BlockCorrupt, InvalidRequest  # noqa: E402
from kvstore.spec import KVSpec  # noqa: E402
from kvstore_client import KVClient  # noqa: E402
from kvstore_client.adapters.vllm.caches import LayerCache  # noqa: E402
from kvstore_client.adapters.vllm.groups import CacheGroups, Layer  # noqa: E402
from kvstore_client.adapters.vllm.identity import Identity  # noqa: E402
from kvstore_client.adapters.vllm.options import ConnectorOptions  # noqa: E402
from kvstore_client.adapters.vllm.planning import LoadJob, SaveJob, StepPlan  # noqa: E402
from kvstore_client.adapters.vllm.worker import WorkerSide  # noqa: E402
from kvstore_client.source import Source  # noqa: E402

NUM_BLOCKS, HEADS, TOKENS, DIM = 12, 2, 4, 8
NAMES = ["layers.0", "layers.1", "layers.2"]
IDENTITY = Identity("r", "")
OPTIONS = ConnectorOptions(address="unix:/none", timeout_s=20.0, load_timeout_s=20.0)


def spec_for(identity: Identity) -> KVSpec:
    return KVSpec.uniform(
        model="m",
        revision=identity.revision,
        dtype="float32",
        block_tokens=TOKENS,
        layers=len(NAMES),
        bytes_per_part=HEADS * TOKENS * DIM * 4,
        layout="test",
        salt=identity.salt,
    )


def one_group() -> CacheGroups:
    part_bytes = HEADS * TOKENS * DIM * 4
    return CacheGroups(tuple(Layer(name, 0, "FullAttentionSpec", None, TOKENS, part_bytes) for name in NAMES))


def blocks(seed: int) -> Any:
    """`[blocks, heads, tokens, dim]`."""
    return torch.randn(NUM_BLOCKS, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(seed))


def heads_outermost(tensor: Any) -> Any:
    """The same values; a block is not contiguous in memory."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def tokens_before_heads(tensor: Any) -> Any:
    """The same values; a block is contiguous, in another order."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


LAYOUTS = pytest.mark.parametrize("lay_out", [lambda tensor: tensor, tokens_before_heads, heads_outermost])


class Rank:
    """A worker side and the cache of its engine."""

    def __init__(self, client: KVClient, tensors: dict[str, Any], *, kernel_blocks: int = 1) -> None:
        self.tensors = tensors
        self.side = WorkerSide(options=OPTIONS, rank=0, saves=True, spec_for=spec_for, open_client=lambda spec: client)
        self.side.register(tensors, one_group(), num_blocks=NUM_BLOCKS // kernel_blocks)

    def step(self, *, loads: list[LoadJob] | None = None, saves: list[SaveJob] | None = None) -> Any:
        """One step of the engine, with a forward pass; what it reports."""
        self.side.begin_step(StepPlan(IDENTITY, tuple(loads or ()), tuple(saves or ())))
        within = any(job.within_forward for job in loads or ())
        if within:
            self.side.start_loads()
        for name in [*NAMES, "layers.3"]:  # the last shares the keys of another
            self.side.wait_layer(name)
            self.side.layer_computed(name)
        if not within:
            self.side.start_loads()
        self.side.end_saves()
        return self.side.end_loads()

    def committed(self) -> None:
        """What the steps so far have saved is committed."""
        assert self.side._saves is not None
        self.side._saves._commits.submit(lambda: None).result()  # there is one thread

    def until_finished(self, name: str) -> Any:
        """Steps without work, until a load in the background is over; what that step reports."""
        while True:
            results = self.step()
            if name in results.finished:
                return results


@pytest.fixture
def client() -> Iterator[KVClient]:
    with KVClient.in_process(spec_for(IDENTITY), capacity_bytes=8 << 20) as client:
        yield client


def save(
    rank: Rank, hashes: list[Any], block_ids: tuple[int, ...], *, by_layer: bool = False, parent: Any = None
) -> None:
    rank.step(saves=[SaveJob("s", tuple(hashes), (block_ids,), parent, by_layer)])


def load_job(hashes: list[Any], block_ids: tuple[int, ...], *, within: bool) -> LoadJob:
    return LoadJob("l", tuple(hashes), (block_ids,), within, False)


def stored(client: KVClient, hashes: list[Any]) -> bool:
    return client.match(hashes, lease="").num_blocks == len(hashes)


@LAYOUTS
@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("block_ids", [(3, 4, 5), (7, 2, 9)], ids=["side by side", "scattered"])
@pytest.mark.parametrize("by_layer", [True, False])
def test_blocks_come_back_as_they_were_wherever_they_lie(
    client: KVClient, lay_out: Any, within: bool, block_ids: tuple[int, ...], by_layer: bool
) -> None:
    source = {name: lay_out(blocks(seed)) for seed, name in enumerate(NAMES)}
    hashes = chain(3, of=client.spec)
    one = Rank(client, source)
    save(one, hashes, (1, 8, 4), by_layer=by_layer)
    one.committed()
    assert stored(client, hashes)
    target = {name: lay_out(torch.zeros(NUM_BLOCKS, HEADS, TOKENS, DIM)) for name in NAMES}
    two = Rank(client, target)
    results = two.step(loads=[load_job(hashes, block_ids, within=within)])
    if not within:
        results = results if results.finished else two.until_finished("l")
    assert (results.loaded, results.failed, results.invalid_block_ids) == ({"l"}, set(), set())
    for name in NAMES:
        assert torch.equal(target[name][list(block_ids)], source[name][[1, 8, 4]])
        others = [block for block in range(NUM_BLOCKS) if block not in block_ids]
        assert not target[name][others].any()
    assert two.side.tally.take()["blocks_loaded"] == 3


@pytest.mark.parametrize("within", [True, False])
def test_blocks_that_are_not_stored_are_reported_invalid(client: KVClient, within: bool) -> None:
    """Covers: A5."""
    rank = Rank(client, {name: blocks(seed) for seed, name in enumerate(NAMES)})
    hashes = chain(4, of=client.spec)
    save(rank, hashes[:2], (0, 1))
    rank.committed()
    results = rank.step(loads=[load_job(hashes, (4, 5, 6, 7), within=within)])
    if not within:
        results = results if results.finished else rank.until_finished("l")
    # Within a forward pass what came was used together with what did not; else the leading blocks are good.
    assert results.invalid_block_ids == ({4, 5, 6, 7} if within else {6, 7})
    assert (results.failed, results.loaded) == ({"l"}, set())
    assert rank.side.tally.take()["load_failures"] == 1


@pytest.mark.parametrize("within", [True, False])
def test_bytes_that_turned_out_wrong_are_not_left_to_the_engine(
    client: KVClient, monkeypatch: pytest.MonkeyPatch, within: bool
) -> None:
    """A kernel multiplies tokens that are not there yet by zero, and what is no number stays none. Covers: A5."""
    rank = Rank(client, {name: blocks(seed) for seed, name in enumerate(NAMES)})
    hashes = chain(3, of=client.spec)
    save(rank, hashes, (0, 1, 2))
    rank.committed()
    original = Source.copy

    def spoil(self: Source, part: int, of: Any, into: Any, **how: Any) -> Any:
        errors = original(self, part, of, into, **how)
        if 1 in of.tolist():
            into.rows[1][:] = 255
            errors[1] = BlockCorrupt("spoiled by the test")
        return errors

    monkeypatch.setattr(Source, "copy", spoil)
    results = rank.step(loads=[load_job(hashes, (7, 5, 9), within=within)])
    if not within:
        results = results if results.finished else rank.until_finished("l")
    assert results.invalid_block_ids == ({5, 7, 9} if within else {5, 9})
    for name in NAMES:
        assert not rank.tensors[name][[5, 9]].any()
        assert torch.equal(rank.tensors[name][7], torch.zeros(HEADS, TOKENS, DIM) if within else rank.tensors[name][0])


def test_load_that_no_layer_waited_for_is_wrong_as_a_whole(client: KVClient) -> None:
    """The forward pass may have used what came and what did not."""
    rank = Rank(client, {name: blocks(seed) for seed, name in enumerate(NAMES)})
    hashes = chain(4, of=client.spec)
    save(rank, hashes[:2], (0, 1))
    rank.committed()
    rank.side.begin_step(StepPlan(IDENTITY, (load_job(hashes, (4, 5, 6, 7), within=True),)))
    rank.side.start_loads()
    assert rank.side.end_loads().invalid_block_ids == {4, 5, 6, 7}


def test_store_that_is_gone_costs_the_loads_and_saves_and_nothing_else(client: KVClient) -> None:
    rank = Rank(client, {name: blocks(seed) for seed, name in enumerate(NAMES)})
    hashes = chain(2, of=client.spec)
    rank.step()
    client.close()
    results = rank.step(
        loads=[load_job(hashes, (0, 1), within=True)], saves=[SaveJob("s", tuple(hashes), ((0, 1),), None, True)]
    )
    assert results.invalid_block_ids == {0, 1}
    counts = rank.side.tally.take()
    assert (counts["load_failures"], counts["save_failures"]) == (1, 1)
    rank.side.close()


def test_save_whose_step_did_not_end_is_given_up(client: KVClient) -> None:
    rank = Rank(client, {name: blocks(seed) for seed, name in enumerate(NAMES)})
    hashes = chain(2, of=client.spec)
    rank.side.begin_step(StepPlan(IDENTITY, (), (SaveJob("s", tuple(hashes), ((0, 1),), None, True),)))
    rank.side.layer_computed(NAMES[0])  # then the forward pass broke off
    rank.step()
    rank.committed()
    match = client.match(hashes, lease="")
    assert (match.num_blocks, match.num_writing) == (0, 0)
    save(rank, hashes, (0, 1))
    rank.committed()
    assert stored(client, hashes)


def test_kernel_blocks_smaller_than_blocks_are_taken_together() -> None:
    tensor = blocks(1)
    cache = LayerCache(tensor, num_blocks=NUM_BLOCKS // 2)
    assert cache.block_bytes == 2 * tensor[0].numel() * 4
    assert np.array_equal(np.asarray(cache.source([1]))[0], tensor[2:4].contiguous().view(torch.uint8).numpy().ravel())


def test_cache_of_another_size_is_refused_at_start(client: KVClient) -> None:
    """Covers: A4."""
    with pytest.raises(InvalidRequest, match="expected blocks of 256 bytes, got 128"):
        Rank(client, {name: blocks(0)[:, :1] for name in NAMES})


def test_counts_are_taken_once(client: KVClient) -> None:
    rank = Rank(client, {name: blocks(0) for name in NAMES})
    save(rank, chain(1, of=client.spec), (0,), by_layer=True)
    rank.committed()
    assert rank.side.tally.take() == {"saves": 1, "layers_saved": 3, "blocks_saved": 1}
    assert rank.side.tally.take() == {}
