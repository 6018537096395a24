"""What takes longer to load than to compute is not worth loading."""

import pytest
from builders import spec

from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client.locate import worth_loading

KV = spec(layers=2, bytes_per_part=50_000)  # 100,000 bytes and 4 tokens a block


@pytest.mark.parametrize(
    ("num_warm", "rise_bytes_per_s", "prefill_tokens_per_s", "worth"),
    [
        (6, 1_000_000, 39.0, 10),  # 0.100 s to bring up, 0.103 s to compute
        (6, 1_000_000, 41.0, 6),
        (0, 1_000_000, 41.0, 0),
        (10, 1, 1e9, 10),  # all of it is in memory
        (6, 0, 1e9, 10),  # nobody knows how fast the disk is
        (6, 1, 0.0, 10),  # nobody asked
    ],
)
def test_blocks_on_disk_count_if_they_come_up_faster_than_they_are_computed(
    num_warm: int, rise_bytes_per_s: int, prefill_tokens_per_s: float, worth: int
) -> None:
    """Covers: F2."""
    matched = pb.Matched(num_blocks=10, num_warm=num_warm, rise_bytes_per_s=rise_bytes_per_s)
    assert worth_loading(matched, KV, prefill_tokens_per_s=prefill_tokens_per_s) == worth
