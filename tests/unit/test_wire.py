"""Messages to types and back, and their bounds."""

import numpy as np
import pytest
from builders import chain, spec
from hypothesis import given
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import InvalidRequest
from kvstore.hashing import pack
from kvstore.spec import MAX_PARTS
from kvstore.types import Outcome
from kvstore.v1 import kvstore_pb2 as pb


@pytest.mark.parametrize(
    "kv",
    [
        spec(),
        spec(layers=3, ranks=2, bytes_per_part=100),
        spec(adapter="lora", adapter_revision="r2", quantisation="fp8", salt="s", tenant="t"),
    ],
)
def test_a_spec_survives_the_wire(kv) -> None:
    sent = pb.Spec.FromString(wire.spec_to_proto(kv).SerializeToString())
    assert wire.spec_from_proto(sent) == kv
    assert wire.spec_from_proto(sent).namespace == kv.namespace


def test_an_empty_adapter_is_not_an_absent_one() -> None:
    message = wire.spec_to_proto(spec())
    message.adapter = ""
    with pytest.raises(InvalidRequest):
        wire.spec_from_proto(message)


def test_too_many_parts_are_refused_before_anything_is_made_of_them() -> None:
    message = wire.spec_to_proto(spec())
    message.part_bytes.extend([1] * MAX_PARTS)
    with pytest.raises(InvalidRequest, match="part_bytes"):
        wire.spec_from_proto(message)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_u32_round_trip(values: list[int]) -> None:
    packed = wire.pack_u32(values)
    assert len(packed) == 4 * len(values)
    assert wire.unpack_u32(packed, name="x").tolist() == values
    assert wire.pack_u32(np.array(values, np.int64)) == packed


@given(st.lists(st.integers(0, 2**63 - 1)))
def test_u64_round_trip(values: list[int]) -> None:
    packed = wire.pack_u64(np.array(values, np.int64))
    assert len(packed) == 8 * len(values)
    assert wire.unpack_u64(packed, name="x").tolist() == values


def test_packed_integers_are_little_endian() -> None:
    assert wire.pack_u32([1, 256]) == bytes([1, 0, 0, 0, 0, 1, 0, 0])
    assert wire.pack_u64([258]) == bytes([2, 1, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_what_was_cut_is_refused(size: int) -> None:
    with pytest.raises(InvalidRequest, match="field"):
        wire.unpack_u32(b"x" * size, name="field")
    with pytest.raises(InvalidRequest, match="field"):
        wire.unpack_u64(b"x" * (size + 8), name="field")


def test_an_integer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="below"):
        wire.unpack_u64(b"\xff" * 8, name="field")


def test_hashes_round_trip_and_are_bounded() -> None:
    hashes = chain(5)
    assert wire.unpack_hashes(pack(hashes)).tolist() == hashes
    assert wire.unpack_hashes(b"").tolist() == []
    with pytest.raises(InvalidRequest, match="multiple of 32"):
        wire.unpack_hashes(b"x" * 33)
    with pytest.raises(InvalidRequest, match="at most"):
        wire.unpack_hashes(bytes(32 * (wire.MAX_HASHES + 1)))


def test_outcomes_have_the_numbers_of_the_wire() -> None:
    assert {outcome.name: int(outcome) for outcome in Outcome} == {
        name.removeprefix("OUTCOME_"): number for name, number in pb.Outcome.items() if number
    }
