"""Save, load and follow prefixes of a tiny random Llama, with the store well, gone, and failing half-way."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the transformers adapter needs torch")
transformers = pytest.importorskip("transformers", reason="the transformers adapter needs transformers")

from tellers import cluster_in_process  # noqa: E402

from kvstore import placement  # noqa: E402
from kvstore.errors import InvalidRequest, StoreUnavailable, WriterFailed  # noqa: E402
from kvstore.hashing import chain  # noqa: E402
from kvstore_client import (  # noqa: E402
    ClientOptions,
    KVClient,
    KVSpec,
)
from kvstore_client.adapters.transformers import (  # noqa: E402
    Prefill,
    PrefixCache,
    revision_digest,
    spec_for,
)

LAYERS = 4
HEADS = 2
DIM = 32
BLOCK_TOKENS = 8
TOLERANCE = 1e-3  # logits are not bit-equal when shapes differ; a wrong prefix is off by about 10
WAIT_S = 20.0

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": DIM,
    "vocab_size": 512,
    "initializer_range": 0.2,  # wide, so that logits say clearly which prefix they saw
}


def make_model(**shape: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE | shape)).eval()


def prompt(num_tokens: int, *, seed: int = 0) -> Any:
    return torch.randint(3, 500, (1, num_tokens), generator=torch.Generator().manual_seed(seed))


def reference(model: Any, input_ids: Any) -> Any:
    """`[1, vocabulary]`: what the model says without any store."""
    with torch.no_grad():
        return model(input_ids).logits[:, -1]


def assert_same(prefill: Prefill, expected: Any) -> None:
    assert torch.equal(prefill.logits.argmax(-1), expected.argmax(-1))
    assert (prefill.logits - expected).abs().max().item() < TOLERANCE


def put_layer(write: Any, layer: int, cache: Any) -> None:
    """As another process, without the adapter, would put it."""
    kv = torch.stack([cache.layers[layer].keys[0], cache.layers[layer].values[0]])  # [2, heads, tokens, dim]
    num_blocks = len(write.outcomes)
    rows = [kv[:, :, n * BLOCK_TOKENS : (n + 1) * BLOCK_TOKENS].contiguous() for n in range(num_blocks)]
    write.put(layer, rows)


def hashes_of(spec: KVSpec, input_ids: Any) -> Any:
    return chain(spec.namespace, input_ids[0].tolist(), block_tokens=spec.block_tokens)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture
def spec(model: Any) -> KVSpec:
    return spec_for(model, revision="r1", block_tokens=BLOCK_TOKENS)


@pytest.fixture(params=["one daemon", "two daemons"])
def house(request: pytest.FixtureRequest) -> str:
    """Where blocks are kept."""
    return str(request.param)


only_one_daemon = pytest.mark.parametrize("house", ["one daemon"])


@pytest.fixture
def client(spec: KVSpec, house: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if house == "one daemon":
        with KVClient.in_process(spec, capacity_bytes=32 << 20) as client:
            yield client
    else:
        monkeypatch.setattr(placement, "SEGMENT_TOKENS", 2 * BLOCK_TOKENS)  # so that short prompts lie with both
        with cluster_in_process(spec, num_daemons=2) as cluster:
            yield cluster


@pytest.fixture
def prefixes(client: KVClient, model: Any) -> Iterator[PrefixCache]:
    with PrefixCache(client, model) as prefixes:
        yield prefixes


def test_saved_prefix_gives_the_same_logits_when_loaded(prefixes: PrefixCache, model: Any) -> None:
    ids = prompt(100)
    cold = prefixes.prefill(ids)
    assert (cold.num_loaded_tokens, cold.saving.result(WAIT_S)) == (0, 12)
    assert_same(cold, reference(model, ids))

    warm = prefixes.prefill(ids)
    assert (warm.num_loaded_tokens, warm.num_tokens, warm.load_error) == (96, 100, None)
    assert warm.cache.get_seq_length() == 100
    assert_same(warm, reference(model, ids))
    assert (prefixes.num_failed_loads, prefixes.num_failed_saves) == (0, 0)


def test_cache_of_a_warm_prefill_decodes_like_a_cold_one(prefixes: PrefixCache, model: Any) -> None:
    ids = prompt(50)
    prefixes.prefill(ids).saving.result(WAIT_S)
    warm = prefixes.prefill(ids)
    told = []
    token = warm.logits.argmax(-1, keepdim=True)
    with torch.no_grad():
        for _ in range(8):
            told.append(token.item())
            token = model(token, past_key_values=warm.cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert told == expected[0, 50:].tolist()


def test_zeroed_keys_change_the_logits(prefixes: PrefixCache, client: KVClient, spec: KVSpec, model: Any) -> None:
    """The control: what is loaded is what the model attends to."""
    ids = prompt(100)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :96], past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        layer.keys = torch.zeros_like(layer.keys)
    with client.store(hashes_of(spec, ids)) as write:
        for layer in range(LAYERS):
            put_layer(write, layer, cache)
    wrong = prefixes.prefill(ids)
    assert wrong.num_loaded_tokens == 96
    assert (wrong.logits - reference(model, ids)).abs().max().item() > 1.0


@pytest.mark.parametrize(
    ("num_tokens", "num_saved", "num_loaded"),
    [
        (BLOCK_TOKENS - 1, 0, 0),
        (BLOCK_TOKENS, 1, 0),
        (BLOCK_TOKENS + 1, 1, BLOCK_TOKENS),
        (4 * BLOCK_TOKENS, 4, 3 * BLOCK_TOKENS),
    ],
)
def test_full_blocks_are_saved_and_one_token_is_left_to_compute(
    prefixes: PrefixCache, model: Any, num_tokens: int, num_saved: int, num_loaded: int
) -> None:
    ids = prompt(num_tokens)
    assert prefixes.prefill(ids).saving.result(WAIT_S) == num_saved
    warm = prefixes.prefill(ids)
    assert warm.num_loaded_tokens == num_loaded
    assert_same(warm, reference(model, ids))


def test_prompt_with_another_end_shares_the_blocks_before_it(prefixes: PrefixCache, model: Any) -> None:
    first, second = prompt(60), prompt(75)
    second[:, :40] = first[:, :40]
    second[:, 40] = (first[:, 40] + 1) % 500
    prefixes.prefill(first).saving.result(WAIT_S)
    warm = prefixes.prefill(second)
    assert warm.num_loaded_tokens == 40
    assert warm.saving.result(WAIT_S) == 4  # blocks 5 to 8 are its own
    assert_same(warm, reference(model, second))
    again = prefixes.prefill(second)
    assert again.num_loaded_tokens == 72
    assert_same(again, reference(model, second))


@pytest.mark.parametrize("num_local", [16, 21])
def test_local_tokens_are_never_taken_from_the_store(prefixes: PrefixCache, model: Any, num_local: int) -> None:
    """The local tokens are marked; the marks are still there, also where a block begins within them."""
    ids = prompt(60)
    prefixes.prefill(ids).saving.result(WAIT_S)
    local = prefixes.prefill(ids[:, :num_local], save=False).cache
    marks = [layer.keys + 1.0 for layer in local.layers]
    for layer, mark in zip(local.layers, marks, strict=True):
        layer.keys = mark
    warm = prefixes.prefill(ids, cache=local, save=False)
    assert warm.num_loaded_tokens == 56 - num_local
    assert warm.cache.get_seq_length() == 60
    for layer, before, mark in zip(warm.cache.layers, local.layers, marks, strict=True):
        assert torch.equal(layer.keys[:, :, :num_local], mark)
        assert before.keys is mark


def test_conversation_goes_on_from_its_local_cache(prefixes: PrefixCache, model: Any) -> None:
    ids = prompt(60)
    prefixes.prefill(ids).saving.result(WAIT_S)
    local = prefixes.prefill(ids[:, :21], save=False).cache
    assert_same(prefixes.prefill(ids, cache=local), reference(model, ids))


def test_load_fills_a_cache_for_generate_and_save_takes_one(prefixes: PrefixCache, model: Any) -> None:
    ids = prompt(50)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    assert prefixes.save(ids, cache).result(WAIT_S) == 6
    loaded = prefixes.load(ids)
    assert loaded.get_seq_length() == 48
    options: dict[str, Any] = {
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    assert torch.equal(
        model.generate(ids, past_key_values=loaded, **options),
        model.generate(ids, **options),
    )


def test_layer_is_used_before_the_next_one_has_been_written(
    prefixes: PrefixCache, client: KVClient, spec: KVSpec, model: Any
) -> None:
    """Layer n + 1 is put only once layer n was used, so a reader that waited for all would never end."""
    ids = prompt(100)
    computed = prefixes.prefill(ids, save=False).cache
    write = client.store(hashes_of(spec, ids))
    put_layer(write, 0, computed)
    order: list[str] = []

    def put_next(layer: int) -> None:
        order.append(f"used {layer}")
        if layer + 1 < LAYERS:
            order.append(f"put {layer + 1}")
            put_layer(write, layer + 1, computed)

    followed = prefixes.prefill(ids, follow=True, save=False, on_loaded=put_next)
    write.commit()
    assert order == ["used 0", "put 1", "used 1", "put 2", "used 2", "put 3", "used 3"]
    assert (followed.num_loaded_tokens, followed.num_followed_blocks) == (96, 12)
    assert_same(followed, reference(model, ids))


def test_without_follow_blocks_being_written_are_not_waited_for(
    prefixes: PrefixCache, client: KVClient, spec: KVSpec, model: Any
) -> None:
    ids = prompt(40)
    write = client.store(hashes_of(spec, ids))
    prefill = prefixes.prefill(ids)
    assert (prefill.num_loaded_tokens, prefill.load_error, prefixes.num_failed_loads) == (0, None, 0)
    assert_same(prefill, reference(model, ids))
    write.abort()


def test_layer_is_saved_before_the_last_one_has_computed(prefixes: PrefixCache, model: Any) -> None:
    saved = threading.Event()
    in_time = []
    last = model.model.layers[-1]
    hook = last.register_forward_pre_hook(lambda *_: in_time.append(saved.wait(WAIT_S)))
    try:
        prefill = prefixes.prefill(prompt(100), on_saved=lambda layer: saved.set() if layer == 0 else None)
    finally:
        hook.remove()
    assert in_time == [True]
    assert prefill.saving.result(WAIT_S) == 12


def test_writer_that_fails_half_way_costs_recomputation_only(
    prefixes: PrefixCache, client: KVClient, spec: KVSpec, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ids = prompt(100)
    computed = prefixes.prefill(ids, save=False).cache
    write = client.store(hashes_of(spec, ids))
    for layer in range(2):
        put_layer(write, layer, computed)

    def fail_after_the_second(layer: int) -> None:
        if layer == 1:
            write.abort()

    prefill = prefixes.prefill(ids, follow=True, on_loaded=fail_after_the_second)
    assert isinstance(prefill.load_error, WriterFailed)
    assert (prefill.num_loaded_tokens, prefill.num_followed_blocks, prefixes.num_failed_loads) == (0, 0, 1)
    assert prefill.cache.get_seq_length() == 100
    assert_same(prefill, reference(model, ids))
    assert prefill.saving.result(WAIT_S) == 12  # and it takes over what the writer left undone
    assert "load failed (WriterFailed" in caplog.text


@only_one_daemon
def test_daemon_that_goes_between_two_layers_costs_recomputation_only(
    prefixes: PrefixCache, client: KVClient, spec: KVSpec, model: Any
) -> None:
    ids = prompt(100)
    computed = prefixes.prefill(ids, save=False).cache
    write = client.store(hashes_of(spec, ids))
    put_layer(write, 0, computed)
    prefill = prefixes.prefill(ids, follow=True, on_loaded=stop_daemon_of(client))
    assert isinstance(prefill.load_error, StoreUnavailable)
    assert prefill.num_loaded_tokens == 0
    assert_same(prefill, reference(model, ids))
    assert prefill.saving.result(WAIT_S) == 0


@only_one_daemon
def test_daemon_that_goes_during_a_save_costs_the_save_only(
    prefixes: PrefixCache, client: KVClient, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ids = prompt(100)
    prefill = prefixes.prefill(ids, on_saved=stop_daemon_of(client))
    assert prefill.saving.result(WAIT_S) == 0
    assert_same(prefill, reference(model, ids))
    assert prefixes.num_failed_saves == 1
    again = prefixes.prefill(ids)
    assert_same(again, reference(model, ids))
    assert again.saving.result(WAIT_S) == 0
    assert (prefixes.num_failed_loads, prefixes.num_failed_saves) == (1, 2)
    warnings = [record for record in caplog.records if record.levelname == "WARNING" and "save" in record.message]
    assert len(warnings) == 1


def test_absent_daemon_costs_recomputation_only(spec: KVSpec, model: Any, tmp_path: Any) -> None:
    ids = prompt(40)
    options = ClientOptions(timeout_s=1.0)
    with (
        KVClient(f"unix:{tmp_path}/none.sock", spec, options=options) as client,
        PrefixCache(client, model, timeout_s=1.0) as prefixes,
    ):
        prefill = prefixes.prefill(ids)
        assert_same(prefill, reference(model, ids))
        assert prefill.saving.result(WAIT_S) == 0
    assert (prefixes.num_failed_loads, prefixes.num_failed_saves) == (1, 1)


def test_full_store_costs_the_save_only(spec: KVSpec, model: Any) -> None:
    """The prompt has four blocks more than the store has slots."""
    with KVClient.in_process(spec, capacity_bytes=4 << 20) as client, PrefixCache(client, model) as prefixes:
        num_slots = (4 << 20) // spec.block_bytes
        long = prompt((num_slots + 4) * BLOCK_TOKENS)
        prefill = prefixes.prefill(long)
        saved = prefill.saving.result(WAIT_S)
        assert 0 < saved <= num_slots
        assert_same(prefill, reference(model, long))
        assert prefixes.num_failed_saves == 0


@only_one_daemon
def test_other_revision_has_no_hit(client: KVClient, prefixes: PrefixCache, model: Any) -> None:
    ids = prompt(40)
    prefixes.prefill(ids).saving.result(WAIT_S)
    other = spec_for(model, revision="r2", block_tokens=BLOCK_TOKENS)
    address = client._daemon.address
    with KVClient(address, other) as stranger, PrefixCache(stranger, model) as theirs:
        assert theirs.prefill(ids).num_loaded_tokens == 0
    with KVClient(address, client.spec) as friend, PrefixCache(friend, model) as ours:
        assert ours.prefill(ids).num_loaded_tokens == 32


def test_client_of_another_model_is_refused(client: KVClient) -> None:
    with pytest.raises(InvalidRequest, match="layers"):
        PrefixCache(client, make_model(num_hidden_layers=2))


def test_several_sequences_are_refused(prefixes: PrefixCache) -> None:
    with pytest.raises(InvalidRequest, match=r"expected \[1, tokens\], got \[2, 9\]"):
        prefixes.prefill(torch.ones(2, 9, dtype=torch.long))


def test_spec_has_one_part_a_layer(spec: KVSpec) -> None:
    assert spec.part_bytes == (2 * HEADS * BLOCK_TOKENS * DIM * 4,) * LAYERS
    assert (spec.dtype, spec.layout) == ("float32", "hf-dynamic-cache/KV,H,T,D")


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SHAPE, sliding_window=16)),
    ],
    ids=["keys that depend on the length", "sliding window"],
)
def test_model_whose_prefixes_are_not_plain_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(InvalidRequest, match="run it without the store"):
        spec_for(make(), revision="r1")


def test_revision_follows_every_byte_of_config_and_weights(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="weights"):
        revision_digest(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\0" * 64)
    first = revision_digest(tmp_path)
    (tmp_path / "README.md").write_text("not a weight")
    assert revision_digest(tmp_path) == first
    weights.write_bytes(b"\0" * 63 + b"\1")
    second = revision_digest(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert len({first, second, revision_digest(tmp_path)}) == 3


def stop_daemon_of(client: KVClient) -> Callable[[int], None]:
    def stop(layer: int) -> None:
        client._daemon.close()

    return stop
