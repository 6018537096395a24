"""Both sides of the connector over a store of several daemons: what the scheduler plans is found where it was saved."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the vLLM adapter moves tensors")

from adapters.vllm_stand_ins import BLOCK_TOKENS, Side  # noqa: E402
from builders import chain  # noqa: E402
from tellers import cluster_in_process  # noqa: E402

from kvstore import placement  # noqa: E402
from kvstore.spec import KVSpec  # noqa: E402
from kvstore_client.adapters.vllm.groups import CacheGroups, Layer  # noqa: E402
from kvstore_client.adapters.vllm.options import ConnectorOptions  # noqa: E402
from kvstore_client.adapters.vllm.worker import WorkerSide  # noqa: E402

NUM_BLOCKS, WIDTH = 24, 16
NAMES = ["layers.0", "layers.1"]
PART_BYTES = BLOCK_TOKENS * WIDTH * 4
KV = KVSpec.uniform(
    model="m",
    revision="r",
    dtype="float32",
    block_tokens=BLOCK_TOKENS,
    layers=len(NAMES),
    bytes_per_part=PART_BYTES,
    layout="test",
)


def engine_cache(seed: int) -> dict[str, Any]:
    """Of each layer, `[blocks, tokens, width]`."""
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(NUM_BLOCKS, BLOCK_TOKENS, WIDTH, generator=source) for name in NAMES}


def worker(client: Any, cache: dict[str, Any]) -> WorkerSide:
    options = ConnectorOptions(address="unix:/none", timeout_s=20.0, load_timeout_s=20.0)
    side = WorkerSide(
        options=options, rank=0, saves=True, spec_for=lambda identity: KV, open_client=lambda spec: client
    )
    layers = tuple(Layer(name, 0, "FullAttentionSpec", None, BLOCK_TOKENS, PART_BYTES) for name in NAMES)
    side.register(cache, CacheGroups(layers), num_blocks=NUM_BLOCKS)
    return side


def matched(side: Side, request: Any, local: int) -> tuple[int, bool]:
    """The scheduler side's answer, once there is one."""
    while (answer := side.side.num_matched_tokens(request, local))[0] is None:
        pass
    return answer


def step(side: WorkerSide, plan: Any) -> Any:
    side.begin_step(plan)
    side.start_loads()
    for name in NAMES:
        side.wait_layer(name)
        side.layer_computed(name)
    side.end_saves()
    return side.end_loads()


def test_what_is_saved_in_two_steps_is_found_and_loaded_behind_local_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "SEGMENT_TOKENS", 2 * BLOCK_TOKENS)  # so that a short prompt lies with both daemons
    hashes = chain(10, of=KV)
    written, read = engine_cache(1), engine_cache(2)
    with cluster_in_process(KV) as client:
        saving = Side(client)  # type: ignore[arg-type]
        mover = worker(client, written)
        request = saving.new("a", 40, block_hashes=hashes)
        assert matched(saving, request, 0) == (0, False)
        blocks = list(range(1, 11))
        step(mover, saving.schedule(request, 0, 12, blocks))
        step(mover, saving.step({request: 28}))
        assert mover._saves is not None
        mover._saves._commits.submit(lambda: None).result()  # there is one thread
        assert mover.tally.take()["blocks_saved"] == 10
        assert client.match(hashes, lease="").num_found == 10
        where = placement.segments(hashes, block_tokens=BLOCK_TOKENS)
        owners = placement.Placement({"n0": 1.0, "n1": 1.0}).owners(where)
        assert set(owners.ravel().tolist()) == {0, 1}

        loading = Side(client, async_load=False)  # type: ignore[arg-type]
        other = loading.new("b", 40, block_hashes=hashes)
        assert matched(loading, other, 12) == (24, False)
        plan = loading.schedule(other, 24, 4, [11, 12, 13, *blocks[:7]])
        result = step(worker(client, read), plan)
        assert (result.loaded, result.invalid_block_ids) == ({"b"}, set())
    for name in NAMES:
        assert torch.equal(read[name][1:7], written[name][4:10])
