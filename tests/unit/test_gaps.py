from kvstore_server.gaps import BOUNDS_S, LoopGaps


def test_each_gap_is_counted_under_the_first_bound_that_it_does_not_exceed() -> None:
    gaps = LoopGaps(lambda: 0.0)
    for late_s in (0.0, 0.001, 0.0011, 0.02, 3.0):
        gaps.record(late_s)
    assert dict(zip((*BOUNDS_S, "more"), gaps.counts, strict=True)) == dict.fromkeys((*BOUNDS_S, "more"), 0) | {
        0.001: 2,
        0.002: 1,
        0.02: 1,
        "more": 1,
    }
    assert gaps.total_s == 0.0 + 0.001 + 0.0011 + 0.02 + 3.0
