"""The engine's KV cache groups: layers that share a block table, and how far back each group keeps its blocks.

A hybrid model has one group of full attention and others of layers that see a window only. All use blocks of the same
tokens, so one block of the store has the parts of all layers, and a hit is a hit for every group. What a window has
left, the engine gives up: the null block stands in that group's table from then on.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Any, Final

from kvstore.errors import InvalidRequest
from kvstore_client.adapters.vllm.options import ConnectorOptions, Granularity

NULL_BLOCK: Final = 0  # no request's: nothing is loaded into it, or saved from it

# Kinds of attention that keep the keys and values of tokens, and the field that says how far back a token sees.
_WINDOWS: Final[dict[str, str | None]] = {
    "FullAttentionSpec": None,
    "MLAAttentionSpec": None,
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "attention_chunk_size",
}
_DIGITS: Final = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that holds keys and values."""

    name: str
    group: int  # whose block table says where its blocks are
    kind: str  # of attention, in the engine's words
    window: int | None  # None: it keeps all tokens
    block_tokens: int
    part_bytes: int


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """All layers, in the order of the spec's parts, which is the one in which they are computed."""

    layers: tuple[Layer, ...]

    @property
    def has_windows(self) -> bool:
        """Whether some group gives up blocks that it will not need again."""
        return any(layer.window is not None for layer in self.layers)

    @property
    def fails_whole(self) -> bool:
        """Whether a load that fails is lost as a whole.

        vLLM takes failures of single blocks for one group only, and goes on from the block before: a window may have
        none there.
        """
        return self.has_windows or len({layer.group for layer in self.layers}) > 1

    @property
    def kinds(self) -> str:
        """What shapes the bytes, for the layout of the spec; of several groups also which layer is of which."""
        named = {f"{each.kind}({each.window})" if each.window else each.kind for each in self.layers}
        kinds = "+".join(sorted(named))
        if not self.fails_whole:
            return kinds
        listed = "\n".join(f"{each.name} {each.group} {each.kind} {each.window}" for each in self.layers)
        return f"{kinds}/groups-{hashlib.sha256(listed.encode()).hexdigest()[:32]}"


def groups_of(kv_cache_config: Any) -> CacheGroups:
    """The groups of an engine's KV cache configuration."""
    layers = [
        Layer(name, group, type(spec).__name__, _window(spec), spec.block_size, spec.page_size_bytes)
        for group, each in enumerate(kv_cache_config.kv_cache_groups)
        for name, spec in _layer_specs(each).items()
    ]
    return CacheGroups(tuple(sorted(layers, key=lambda layer: _counted(layer.name))))


def unfit_groups(kv_cache_config: Any, *, prefix_match_unit: int | None) -> dict[str, bool]:
    """Reasons why groups cannot be shared, and whether each applies."""
    groups = kv_cache_config.kv_cache_groups
    specs = [spec for group in groups for spec in _layer_specs(group).values()]
    kinds = sorted({type(spec).__name__ for spec in specs})
    strange = [kind for kind in kinds if kind not in _WINDOWS]
    sizes = sorted({spec.block_size for spec in specs})
    return {
        "no KV cache group": not groups,
        f"layers that keep something else than keys and values of tokens ({', '.join(strange)})": bool(strange),
        f"{len(groups)} KV cache groups, some of them of MLA": len(groups) > 1 and "MLAAttentionSpec" in kinds,
        f"KV cache groups whose blocks have different sizes ({', '.join(map(str, sizes))} tokens)": len(sizes) > 1,
        f"prefix_match_unit {prefix_match_unit}, which is not the block size": (
            len(sizes) == 1 and prefix_match_unit not in (None, *sizes)
        ),
        "KV cache groups that are not moved by connectors": not all(
            getattr(group, "enable_kv_transfer", True) and not getattr(group, "host_resident", False)
            for group in groups
        ),
        "attention that looks ahead": any(getattr(spec, "non_causal", False) for spec in specs),
    }


def check_options(options: ConnectorOptions, groups: CacheGroups, *, saves: bool, loads: bool) -> None:
    """Raises: InvalidRequest, if an option does not go with these groups."""
    if loads and not options.async_load and groups.fails_whole:
        raise InvalidRequest(
            "async_load: expected true where there are several KV cache groups or windows, got false; vLLM cannot be "
            "told there that a load within a forward pass has failed (--disable-hybrid-kv-cache-manager makes one "
            "group, which keeps all tokens)"
        )
    if saves and options.granularity is Granularity.REQUEST and groups.has_windows:
        raise InvalidRequest(
            "granularity: expected layer, chunk or auto where layers have windows, got request; when a prefill ends, "
            "windows have left its first blocks"
        )


def _layer_specs(group: Any) -> dict[str, Any]:
    """The spec of each layer of a group, which may hold one for all of them or one for each."""
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return {name: per_layer[name] if per_layer else group.kv_cache_spec for name in group.layer_names}


def _window(spec: Any) -> int | None:
    field = _WINDOWS.get(type(spec).__name__)
    return None if field is None else getattr(spec, field)


def _counted(name: str) -> list[tuple[int, str]]:
    """Sorts "layers.10" behind "layers.9"."""
    return [(int(piece), "") if piece.isdigit() else (0, piece) for piece in _DIGITS.split(name)]
