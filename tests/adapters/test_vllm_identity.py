"""Which engines share blocks, and which configurations are refused: from stand-ins for vLLM's configuration."""

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import InvalidRequest
from kvstore.spec import KVSpec
from kvstore.transport.ucx import why_unavailable
from kvstore_client.adapters.vllm.groups import check_options, groups_of
from kvstore_client.adapters.vllm.identity import (
    Identity,
    adapter_digest,
    check_config,
    check_version,
    num_ranks,
    spec_of,
    weights_revision,
    with_adapter,
)
from kvstore_client.adapters.vllm.options import ConnectorOptions, Granularity

HASH = bytes(range(32))


@dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int = 32
    num_kv_heads: int = 2
    head_size: int = 32
    page_size_bytes: int = 16384


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 64


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    attention_chunk_size: int = 64


class MLAAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    pass


@dataclass(frozen=True)
class PrefixLMSpec(FullAttentionSpec):
    non_causal: bool = True


PrefixLMSpec.__name__ = "FullAttentionSpec"


def vllm_config(**changes: Any) -> SimpleNamespace:
    """A configuration that can be shared; `a__b=c` changes attribute b of part a."""
    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": "/models/m",
            "revision": None,
            "dtype": "torch.bfloat16",
            "quantization": None,
            "max_model_len": 4096,
            "hf_config": SimpleNamespace(architectures=["LlamaForCausalLM"], to_dict=lambda: {"rope_theta": 1e4}),
            "hf_text_config": SimpleNamespace(rope_parameters=None),
        },
        "cache_config": {"prefix_caching_hash_algo": "sha256", "cache_dtype": "auto"},
        "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        "kv_transfer_config": {"kv_load_failure_policy": "recompute", "is_kv_consumer": True},
        "device_config": {"device_type": "cpu"},
        "attention_config": {"backend": None},
    }
    others: dict[str, Any] = {"speculative_config": None}
    for name, value in changes.items():
        part, _, key = name.partition("__")
        if key:
            parts[part][key] = value
        else:
            others[name] = value
    return SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in parts.items()}, **others)


def cache_config(*, groups: int = 1, replicas: int = 1, layout: str = "LBHNC", kind: Any = None) -> SimpleNamespace:
    group = SimpleNamespace(layer_names=["layers.0", "layers.1"], kv_cache_spec=kind or FullAttentionSpec())
    return SimpleNamespace(kv_cache_groups=[group] * groups, kv_tp_replicas=replicas, kv_cache_layout=layout)


def hybrid(*kinds: Any, first: str = "layers.1", **of_group: Any) -> SimpleNamespace:
    """One layer of full attention, then groups of two layers of each kind, one of them before it and one behind."""
    config = cache_config()
    groups = [SimpleNamespace(layer_names=[first], kv_cache_spec=FullAttentionSpec())]
    for number, kind in enumerate(kinds):
        names = [f"layers.{10 * number}", f"layers.{10 * number + 2}"]
        groups.append(SimpleNamespace(layer_names=names, kv_cache_spec=kind, **of_group))
    config.kv_cache_groups = groups
    return config


def spec(
    config: Any = None, cache: Any = None, *, version: str = "0.32.0", isa: str = "vec", salt: str = "", rev: str = "r"
) -> KVSpec:
    return spec_of(
        config or vllm_config(),
        cache or cache_config(),
        version=version,
        isa=isa,
        identity=Identity(rev, salt),
        tenant="default",
    )


def other_rope() -> SimpleNamespace:
    return SimpleNamespace(architectures=["LlamaForCausalLM"], to_dict=lambda: {"rope_theta": 5e5})


def test_same_configuration_in_another_place_is_the_same_namespace() -> None:
    moved = SimpleNamespace(
        architectures=["LlamaForCausalLM"], to_dict=lambda: {"rope_theta": 1e4, "_name_or_path": "/elsewhere"}
    )
    here, there = vllm_config(), vllm_config(model_config__model="/elsewhere", model_config__hf_config=moved)
    assert spec(here).namespace == spec(there).namespace


@pytest.mark.parametrize(
    "other",
    [
        spec(vllm_config(model_config__dtype="torch.float16")),
        spec(vllm_config(model_config__quantization="fp8")),
        spec(vllm_config(model_config__hf_config=other_rope())),
        spec(vllm_config(cache_config__cache_dtype="fp8")),
        spec(vllm_config(cache_config__prefix_caching_hash_algo="sha256_cbor")),
        spec(vllm_config(parallel_config__tensor_parallel_size=2)),
        spec(vllm_config(device_config__device_type="cuda")),
        spec(cache=cache_config(layout="LBNHC")),
        spec(cache=cache_config(kind=FullAttentionSpec(block_size=64))),
        spec(cache=cache_config(kind=FullAttentionSpec(page_size_bytes=8192))),
        spec(isa="amx"),
        spec(version="0.32.1"),
        spec(rev="other weights"),
        spec(salt="reset"),
    ],
    ids=lambda other: other.namespace.hex()[:8],
)
def test_whatever_shapes_the_bytes_is_in_the_namespace(other: KVSpec) -> None:
    """Covers: A4, A10, A11."""
    assert other.namespace != spec().namespace


def test_ranks_are_parts_of_one_block_and_replicas_count_once() -> None:
    """Covers: E7."""
    four = vllm_config(parallel_config__tensor_parallel_size=4)
    assert (spec(four).ranks, spec(four).num_parts) == (4, 8)
    mla = cache_config(replicas=4)
    assert (num_ranks(four, mla), spec(four, mla).num_parts) == (1, 2)


def test_length_counts_where_the_rotary_embedding_depends_on_it() -> None:
    rope = SimpleNamespace(rope_parameters={"rope_type": "longrope"})
    long = vllm_config(model_config__hf_text_config=rope, model_config__max_model_len=131072)
    short = vllm_config(model_config__hf_text_config=rope)
    assert spec(long).namespace != spec(short).namespace
    plain = vllm_config(model_config__max_model_len=131072)
    assert spec(plain).namespace == spec().namespace


@pytest.mark.parametrize(
    ("config", "cache", "says"),
    [
        (vllm_config(cache_config__prefix_caching_hash_algo="xxhash"), cache_config(), "sha256_cbor"),
        (vllm_config(kv_transfer_config__kv_load_failure_policy="fail"), cache_config(), '"recompute"'),
        (vllm_config(), cache_config(groups=0), "no KV cache group"),
        (vllm_config(), cache_config(kind=MambaSpec()), r"something else than keys and values of tokens \(MambaSpec\)"),
        (vllm_config(), hybrid(MambaSpec()), r"something else than keys and values of tokens \(MambaSpec\)"),
        (vllm_config(), hybrid(MLAAttentionSpec()), "2 KV cache groups, some of them of MLA"),
        (vllm_config(), hybrid(SlidingWindowSpec(block_size=64)), r"different sizes \(32, 64 tokens\)"),
        (vllm_config(cache_config__prefix_match_unit=16), hybrid(SlidingWindowSpec()), "prefix_match_unit 16"),
        (vllm_config(), hybrid(SlidingWindowSpec(), host_resident=True), "not moved by connectors"),
        (vllm_config(), hybrid(SlidingWindowSpec(), enable_kv_transfer=False), "not moved by connectors"),
        (vllm_config(), cache_config(kind=PrefixLMSpec()), "looks ahead"),
        (vllm_config(speculative_config=object()), cache_config(), "speculative"),
        (vllm_config(parallel_config__pipeline_parallel_size=2), cache_config(), "pipeline"),
        (vllm_config(parallel_config__decode_context_parallel_size=2), cache_config(), "context"),
        (vllm_config(cache_config__calculate_kv_scales=True), cache_config(), "scales"),
        (vllm_config(device_config__device_type="cuda"), cache_config(), "--attention-backend"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_engine_whose_blocks_cannot_be_shared_is_refused(config: Any, cache: Any, says: str) -> None:
    """Covers: G1."""
    check_config(vllm_config(), cache_config())
    with pytest.raises(InvalidRequest, match=says):
        check_config(config, cache)


@pytest.mark.parametrize("kind", [SlidingWindowSpec(), ChunkedLocalAttentionSpec(), FullAttentionSpec()])
def test_groups_of_full_attention_and_of_windows_can_be_shared(kind: Any) -> None:
    check_config(vllm_config(cache_config__prefix_match_unit=32), hybrid(kind, kind))


def test_layers_of_all_groups_are_parts_in_the_order_in_which_they_are_computed() -> None:
    groups = groups_of(hybrid(SlidingWindowSpec(page_size_bytes=64), SlidingWindowSpec(page_size_bytes=128)))
    assert [(layer.name, layer.group, layer.window) for layer in groups.layers] == [
        ("layers.0", 1, 64),
        ("layers.1", 0, None),
        ("layers.2", 1, 64),
        ("layers.10", 2, 64),
        ("layers.12", 2, 64),
    ]
    shared = spec(cache=hybrid(SlidingWindowSpec(page_size_bytes=64), SlidingWindowSpec(page_size_bytes=128)))
    assert shared.part_bytes == (64, 16384, 64, 128, 128)


@pytest.mark.parametrize(
    "other",
    [
        cache_config(),
        hybrid(SlidingWindowSpec(sliding_window=65)),
        hybrid(ChunkedLocalAttentionSpec()),
        hybrid(FullAttentionSpec()),
        hybrid(SlidingWindowSpec(), first="layers.3"),
        cache_config(kind=SlidingWindowSpec()),
        cache_config(kind=SlidingWindowSpec(sliding_window=65)),
    ],
)
def test_groups_their_layers_and_windows_are_in_the_namespace(other: Any) -> None:
    """Covers: A4."""
    assert spec(cache=other).namespace != spec(cache=hybrid(SlidingWindowSpec())).namespace


def test_windows_rule_out_loads_within_a_forward_pass_and_saves_when_a_prefill_ends() -> None:
    within = ConnectorOptions(address="unix:/a", async_load=False)
    late = ConnectorOptions(address="unix:/a", granularity=Granularity.REQUEST)
    one, several, windows = cache_config(), hybrid(FullAttentionSpec()), hybrid(SlidingWindowSpec())
    assert [groups_of(config).fails_whole for config in (one, several, windows)] == [False, True, True]
    assert [groups_of(config).has_windows for config in (one, several, windows)] == [False, False, True]
    for groups in map(groups_of, (one, several, windows)):
        check_options(ConnectorOptions(address="unix:/a"), groups, saves=True, loads=True)
        check_options(within, groups, saves=True, loads=False)
        check_options(late, groups, saves=False, loads=True)
        for options, says, applies in (
            (within, "async_load: expected true", groups.fails_whole),
            (late, "granularity: expected layer", groups.has_windows),
        ):
            with pytest.raises(InvalidRequest, match=says) if applies else nullcontext():
                check_options(options, groups, saves=True, loads=True)


def test_prefill_instance_needs_no_failure_policy() -> None:
    producer = {"kv_transfer_config__is_kv_consumer": False, "kv_transfer_config__kv_load_failure_policy": "fail"}
    check_config(vllm_config(**producer), cache_config())


@pytest.mark.parametrize(
    ("version", "supported"), [("0.32.0", True), ("0.32.1", True), ("0.31.2", False), ("1.0", False)]
)
def test_versions_other_than_those_tested_are_refused(version: str, supported: bool) -> None:
    if supported:
        check_version(version)
    else:
        with pytest.raises(InvalidRequest, match=rf"expected a version of 0\.32, got {version}"):
            check_version(version)


def no_hub(model: str, revision: str | None) -> str:
    return ""


def test_revision_is_a_digest_of_the_files_or_the_commit_of_a_snapshot(tmp_path: Path) -> None:
    """Covers: A11."""
    pytest.importorskip("transformers", reason="the digest is that of the transformers adapter")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    model = SimpleNamespace(model=str(tmp_path), revision=None)
    before = weights_revision(model, "auto", find_commit=no_hub)
    (tmp_path / "model.safetensors").write_bytes(b"WEIGHTS")
    assert weights_revision(model, "auto", find_commit=no_hub) != before

    snapshot = tmp_path / "snapshots" / ("a1" * 20)
    snapshot.mkdir(parents=True)
    model = SimpleNamespace(model=str(snapshot), revision=None)
    assert weights_revision(model, "auto", find_commit=no_hub) == "a1" * 20

    named = SimpleNamespace(model="org/model", revision="main")
    assert weights_revision(named, "auto", find_commit=lambda model, revision: "b2" * 20) == "b2" * 20
    with pytest.raises(InvalidRequest, match="give the option revision"):
        weights_revision(named, "auto", find_commit=no_hub)
    with pytest.raises(InvalidRequest, match="dummy"):
        weights_revision(model, "dummy", find_commit=no_hub)


def test_hashes_under_an_adapter_depend_on_its_weights_not_on_its_path(tmp_path: Path) -> None:
    """Covers: A8."""
    for name, weights in (("one", b"w1"), ("two", b"w2"), ("same", b"w1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
        (tmp_path / name / "adapter_model.safetensors").write_bytes(weights)
    one, two, same = (with_adapter([HASH], adapter_digest(str(tmp_path / each))) for each in ("one", "two", "same"))
    assert one == same
    assert len({one[0], two[0], HASH}) == 3
    with pytest.raises(FileNotFoundError, match="expected the files of a LoRA adapter"):
        adapter_digest(str(tmp_path))


def test_options_are_checked_and_unknown_ones_refused_with_the_nearest() -> None:
    options = ConnectorOptions.parse({"address": "unix:/a", "granularity": "layer", "timeout_s": 2})
    assert (options.granularity, options.timeout_s, options.async_load) == (Granularity.LAYER, 2.0, True)
    between = ConnectorOptions.parse({"address": "10.0.0.1:7311", "transport": "ucx", "ucx_device": "eth0"})
    assert (between.transport, between.ucx_device, options.transport) == ("ucx", "eth0", "auto")
    for config, says in (
        ({"address": "unix:/a", "asynch_load": True}, "'asynch_load'; the nearest is 'async_load'"),
        ({"address": "unix:/a", "granularity": "block"}, "granularity: expected one of request, layer, chunk, auto"),
        ({"address": "unix:/a", "async_load": "yes"}, "async_load: expected a bool, got 'yes'"),
        ({"address": "unix:/a", "transport": "rdma"}, "transport: expected one of auto, shm, ucx, got 'rdma'"),
        ({"address": "unix:/a", "transport": ["shm"]}, "transport: expected one of"),
        ({"address": "unix:/a", "ucx_device": 0}, "ucx_device: expected a str, got 0"),
        ({"address": "unix:/a", "timeout_s": 0}, "timeout_s: expected more than 0"),
        ({"address": "unix:/a", "prefill_tokens_per_s": -1}, "prefill_tokens_per_s: expected at least 0"),
        ({}, "expected an address"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            ConnectorOptions.parse(config)


def test_ucx_that_was_asked_for_and_cannot_be_had_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    ConnectorOptions(address="h:1", ucx_device="none0").check_transport()  # not asked for
    by_ucx = ConnectorOptions(address="h:1", transport="ucx", ucx_device="none0")
    if not why_unavailable():
        ConnectorOptions(address="h:1", transport="ucx").check_transport()
        with pytest.raises(InvalidRequest, match="transport: ucx_device none0: expected a device of this host"):
            by_ucx.check_transport()
    for name in ("nixl_cu12", "nixl_cu12._bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidRequest, match="transport: ucx: expected NIXL to be installed"):
        by_ucx.check_transport()
