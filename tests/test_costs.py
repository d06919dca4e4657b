"""The cost model: values against a simulated pipeline, laws of the choice and of hysteresis."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvformat.costs import (
    ORIGINS,
    RECOMPUTE,
    VIDEO_ENGINE,
    Candidate,
    CodecRate,
    Decision,
    Link,
    Rates,
    Switcher,
    Work,
    choose,
    estimate,
    missing,
    rate_name,
    seconds,
    work_of,
)
from kvformat.errors import UsageError

ZSTD = CodecRate("zstd", 200e6, 600e6, 1e-4, 2, 1.8, "measured")
HEVC = CodecRate("hevc", 30e6, 600e6, 3e-3, 2, 1.9, "measured")
RATES = Rates((ZSTD, HEVC))


def track(name: str, size_bytes: int, codec: str, blocks: int = 8) -> Candidate:
    """10^8 values in 120 segments."""
    return Candidate(name, "near-lossless", size_bytes, (Work(codec, 10**8, 120),), blocks, blocks)


BY_ZSTD = track("near-lossless/zstd", 51_000_000, "zstd")
BY_HEVC = track("near-lossless/hevc", 50_000_000, "hevc")
BOTH = (BY_ZSTD, BY_HEVC)

positive = st.floats(1e-3, 1e12)
links = st.builds(Link, st.floats(1e3, 1e12), st.floats(0, 1), st.integers(1, 16))
codec_rates = st.builds(
    CodecRate,
    st.sampled_from(("zstd", "hevc", "stored", "exact/zstd")),
    st.floats(1e5, 1e11),
    st.floats(1e5, 1e11),
    st.floats(0, 0.1),
    st.integers(1, 64),
    st.floats(0.5, 64),
    st.sampled_from(ORIGINS),
)
all_rates = st.lists(codec_rates, min_size=4, max_size=4).map(
    lambda found: Rates(
        tuple(
            replace(item, name=name)
            for item, name in zip(found, ("zstd", "hevc", "stored", "exact/zstd"), strict=True)
        )
    )
)
works = st.builds(
    Work,
    st.sampled_from(("zstd", "hevc", "stored", "exact/zstd")),
    st.integers(0, 10**11),
    st.integers(1, 10**5),
)
candidates = st.builds(
    Candidate,
    st.uuids().map(str),
    st.just("near-lossless"),
    st.integers(0, 10**12),
    st.lists(works, max_size=3).map(tuple),
    st.integers(1, 1000),
    st.integers(0, 10**4),
    st.integers(0, 4),
)


def pipeline_s(blocks: int, arrive_s: float, work_s: float) -> float:
    """A pipeline of two stages, block by block."""
    arrived = done = 0.0
    for _ in range(blocks):
        arrived += arrive_s
        done = max(arrived, done) + work_s
    return done


@given(st.integers(1, 50), st.floats(1e3, 1e12), st.floats(1e3, 1e9), st.integers(0, 10**9))
def test_the_total_is_that_of_a_pipeline(
    blocks: int, bytes_per_s: float, values_per_s: float, size_bytes: int
) -> None:
    rate = CodecRate("zstd", values_per_s, math.inf)
    item = Candidate("t", "q", size_bytes, (Work("zstd", 10**7, blocks),), blocks)
    found = estimate(item, Link(bytes_per_s), Rates((rate,)))
    arrive_s, work_s = size_bytes / bytes_per_s / blocks, 1e7 / values_per_s / blocks
    assert found.total_s == pytest.approx(pipeline_s(blocks, arrive_s, work_s))
    assert found.first_block_s == pytest.approx(arrive_s + work_s)
    assert found.transfer_s + found.decode_s == pytest.approx(blocks * (arrive_s + work_s))


def test_an_estimate_by_hand() -> None:
    found = estimate(BY_ZSTD, Link(1e9, 0.001, 2), RATES)
    assert found.workers == 2
    assert found.transfer_s == pytest.approx(0.051 + 4 * 0.001)
    assert found.decode_s == pytest.approx((120 * 1e-4 + 0.5) / 1.8)
    assert found.restore_s == pytest.approx(1 / 6 / 1.8)
    work_s = found.decode_s + found.restore_s
    assert found.first_block_s == pytest.approx(0.001 + 0.051 / 8 + work_s / 8)
    assert found.total_s == pytest.approx(0.001 + 0.051 / 8 + work_s)
    assert (found.bound, found.origin) == ("decoding", "measured")
    opened = estimate(replace(BY_ZSTD, opening=2), Link(1e9, 0.001, 2), RATES)
    assert opened.total_s == pytest.approx(found.total_s + 0.002)
    assert opened.first_block_s == pytest.approx(found.first_block_s + 0.002)
    assert opened.transfer_s == pytest.approx(found.transfer_s + 0.002)


@pytest.mark.parametrize(
    ("workers", "speedup", "asked", "factor"),
    [
        (1, 1.0, 4, 4.0),  # nothing measured: all workers count fully
        (2, 2.0, 2, 2.0),
        (2, 1.8, 2, 1.8),
        (2, 1.8, 1, 1.0),
        (2, 1.8, 6, 5.0),
        (4, 2.5, 3, 2.0),
        (2, 3.0, 4, 4.0),  # better than linear is noise
        (2, 0.7, 9, 1.0),  # so is worse than one
    ],
)
def test_workers_help_on_a_straight_line(
    workers: int, speedup: float, asked: int, factor: float
) -> None:
    rate = CodecRate("zstd", 1e6, 1e6, 0, workers, speedup)
    assert rate.faster(asked) == pytest.approx(factor)


def test_more_workers_than_segments_do_not_help() -> None:
    item = Candidate("t", "q", 0, (Work("zstd", 10**6, 4),), 2)
    link, rates = Link(math.inf), Rates((CodecRate("zstd", 1e6, math.inf),))
    assert [estimate(item, link, rates, workers=n).decode_s for n in (1, 4, 9)] == [1, 0.25, 0.25]
    assert estimate(item, link, rates, workers=9).first_block_s == 0.25


def test_video_engines_decode_what_they_have_a_rate_for() -> None:
    engine = CodecRate("hevc", 1e9, math.inf, device=VIDEO_ENGINE, origin="entered")
    rates = RATES.replaced(engine)
    mixed = replace(BY_HEVC, work=(*BY_HEVC.work, Work("zstd", 10**6, 4)))
    found = estimate(mixed, Link(1e9), rates, engines=2)
    small = estimate(replace(mixed, work=mixed.work[1:]), Link(1e9), rates)
    fast = CodecRate.faster(ZSTD, 2)
    assert found.decode_s == pytest.approx(0.05 + (4e-4 + 1e6 / 200e6) / fast)
    assert small.decode_s == pytest.approx((4e-4 + 1e6 / 200e6) / fast)
    assert found.origin == "entered"
    assert estimate(mixed, Link(1e9), rates).origin == "measured"


def test_work_is_summed_per_rate() -> None:
    parts = [("hevc", False, 10, 1), ("zstd", False, 20, 2), ("hevc", False, 5, 3)]
    assert work_of(parts) == (Work("hevc", 15, 4), Work("zstd", 20, 2))
    assert work_of([("zstd", True, 7, 1)]) == (Work("exact/zstd", 7, 1),)
    assert rate_name("stored", exact=False) == "stored"


@given(candidates, links, all_rates, st.integers(1, 64), st.floats(1, 1000))
def test_more_of_anything_never_makes_a_track_slower(
    item: Candidate, link: Link, rates: Rates, workers: int, times: float
) -> None:
    before = estimate(item, link, rates, workers=workers)
    wider = replace(link, bytes_per_s=link.bytes_per_s * times)
    faster = Rates(
        tuple(replace(x, decode_values_per_s=x.decode_values_per_s * times) for x in rates.entries)
    )
    for found in (
        estimate(item, wider, rates, workers=workers),
        estimate(item, link, faster, workers=workers),
        estimate(item, link, rates, workers=workers + 1),
        estimate(item, replace(link, connections=link.connections + 1), rates, workers=workers),
    ):
        assert found.total_s <= before.total_s * (1 + 1e-12)
        assert found.first_block_s <= before.first_block_s * (1 + 1e-12)


@given(st.lists(candidates, min_size=1, max_size=5), links, all_rates)
def test_the_choice_is_the_argmin(found: list[Candidate], link: Link, rates: Rates) -> None:
    decision = choose(found, link, rates)
    costs = {item.track: estimate(item, link, rates) for item in found}
    assert decision.track is not None
    best = costs[decision.track]
    assert best.total_s == min(item.total_s for item in costs.values())
    equals = [item for item in costs.values() if item.total_s == best.total_s]
    assert best.stored_bytes == min(item.stored_bytes for item in equals)
    assert list(decision.estimates) == sorted(
        costs.values(), key=lambda item: (item.total_s, item.stored_bytes)
    )


@given(
    st.lists(st.tuples(st.floats(1e6, 1e10), st.integers(1, 10**9)), min_size=2, max_size=5),
    st.integers(1, 64),
)
def test_the_ends_of_bandwidth(shapes: list[tuple[float, int]], blocks: int) -> None:
    rates = Rates(tuple(CodecRate(str(i), rate, math.inf) for i, (rate, _) in enumerate(shapes)))
    found = [
        Candidate(str(i), "q", size, (Work(str(i), 10**8, blocks),), blocks)
        for i, (_, size) in enumerate(shapes)
    ]
    fastest = choose(found, Link(math.inf), rates).track
    smallest = choose(found, Link(1e-6), rates).track
    assert fastest is not None
    assert smallest is not None
    assert shapes[int(fastest)][0] == max(rate for rate, _ in shapes)
    assert shapes[int(smallest)][1] == min(size for _, size in shapes)


def test_both_ends_with_the_real_codecs() -> None:
    assert choose(BOTH, Link(math.inf), RATES).track == BY_ZSTD.track
    assert choose(BOTH, Link(1e5), RATES).track == BY_HEVC.track  # a little smaller here


LINK = Link(1e9)  # zstd takes 0.38 s, hevc 2.02 s
MANY, FEW = 10**5, 1000


@pytest.mark.parametrize(
    ("rate", "deadline_s", "answer", "reason"),
    [
        (
            None,
            None,
            BY_ZSTD.track,
            "5.31 times as fast as near-lossless/hevc, limited by decoding",
        ),
        (MANY, None, RECOMPUTE, "faster than every track"),
        (FEW, None, BY_ZSTD.track, "times as fast as"),
        (MANY, 0.5, BY_ZSTD.track, "within the deadline of 500 ms"),
        (MANY, 0.3, RECOMPUTE, "no track meets the deadline of 300 ms, recomputing does"),
        (FEW, 0.3, None, "nothing meets the deadline of 300 ms"),
        (None, 0.3, None, "(no prefill rate was given)"),
        (None, 0.5, BY_ZSTD.track, "within the deadline"),
    ],
)
def test_recompute_needs_a_rate(
    rate: float | None, deadline_s: float | None, answer: str | None, reason: str
) -> None:
    found = choose(BOTH, LINK, RATES, prefill_tokens_per_s=rate, tokens=2000, deadline_s=deadline_s)
    assert found.answer == answer
    assert found.track == (answer if answer != RECOMPUTE else None)
    assert reason in found.reasons[-1]
    assert [item.track for item in found.estimates] == [BY_ZSTD.track, BY_HEVC.track]
    assert found.recompute_s == (None if rate is None else 2000 / rate)
    lines = [line for line in found.reasons if line.startswith("recompute: ")]
    assert bool(lines) == (rate is not None)


@given(st.lists(candidates, max_size=4), links, all_rates, positive, st.none() | positive)
def test_recompute_only_where_it_helps(
    found: list[Candidate], link: Link, rates: Rates, rate: float, deadline_s: float | None
) -> None:
    decision = choose(
        found, link, rates, prefill_tokens_per_s=rate, tokens=1000, deadline_s=deadline_s
    )
    totals = [item.total_s for item in decision.estimates]
    if decision.answer == RECOMPUTE:
        assert decision.recompute_s is not None
        assert all(decision.recompute_s < total for total in totals)
    if decision.answer is None:
        assert deadline_s is not None
        assert all(total > deadline_s for total in (*totals, decision.recompute_s or 0))
    assert all(reason and "\n" not in reason for reason in decision.reasons)


def test_a_track_without_a_rate_is_left_out() -> None:
    other = track("near-lossless/new", 1, "new")
    assert missing(other, RATES) == "new"
    found = choose((other, BY_HEVC), LINK, RATES)
    assert found.track == BY_HEVC.track
    assert found.reasons[0] == "near-lossless/new: left out, no rate is known for new"
    assert choose((other,), LINK, RATES) == Decision(
        None, (found.reasons[0], "there is no track to choose from"), ()
    )
    with pytest.raises(UsageError, match="no rate is known"):
        estimate(other, LINK, RATES)


def test_equal_totals_go_to_the_fewest_bytes() -> None:
    raw = [Candidate(name, "q", size, ()) for name, size in (("a", 20), ("b", 10))]
    found = choose(raw, Link(math.inf), RATES)
    assert (found.track, found.reasons[-1]) == ("b", "b: as fast as a with no more bytes")
    assert "nothing to decode" in found.reasons[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link(0),
        lambda: Link(math.nan),
        lambda: Link(1, -1),
        lambda: Link(1, math.inf),
        lambda: Link(1, 0, 0),
        lambda: CodecRate("a", 0, 1),
        lambda: CodecRate("a", 1, math.nan),
        lambda: CodecRate("a", 1, 1, -1),
        lambda: CodecRate("a", 1, 1, 0, 0),
        lambda: CodecRate("a", 1, 1, origin="guessed"),  # type: ignore[arg-type]
        lambda: Rates((ZSTD, ZSTD)),
        lambda: Candidate("a", "q", -1, ()),
        lambda: Candidate("a", "q", 1, (), 0),
        lambda: Candidate("a", "q", 1, (), 1, -1),
        lambda: Candidate("a", "q", 1, (), 1, 1, -1),
        lambda: estimate(BY_ZSTD, LINK, RATES, workers=0),
        lambda: choose(BOTH, LINK, RATES, prefill_tokens_per_s=0, tokens=1),
        lambda: choose(BOTH, LINK, RATES, prefill_tokens_per_s=1),
        lambda: choose(BOTH, LINK, RATES, deadline_s=-1),
        lambda: Switcher((), LINK, RATES),
        lambda: Switcher(BOTH, LINK, RATES, gain=1),
        lambda: Switcher(BOTH, LINK, RATES, patience=0),
        lambda: Switcher(BOTH, LINK, RATES, weight=0),
    ],
)
def test_impossible_numbers_are_refused(make: Any) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert caught.value.code == "usage.argument"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (2e-6, "2 us"),
        (0.0123, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (9.876, "9.88 s"),
        (12.34, "12.3 s"),
        (1234.5, "1,234 s"),
        (math.inf, "inf s"),
    ],
)
def test_times_for_people(value: float, text: str) -> None:
    assert seconds(value) == text


# Switching

SMALL = Candidate("q/small", "q", 500, (Work("slow", 1000, 10),), 10)
LARGE = Candidate("q/large", "q", 1000, (Work("fast", 1000, 10),), 10)
TWO = Rates((CodecRate("slow", 1000, math.inf), CodecRate("fast", 4000, math.inf)))
# per block: small max(50/bandwidth, 0.1 s), large max(100/bandwidth, 0.025 s)


def test_a_slower_link_changes_the_track_once() -> None:
    switcher = Switcher((SMALL, LARGE), Link(4000), TWO, patience=3, weight=1)
    assert switcher.predict() == pytest.approx({"q/small": 0.1, "q/large": 0.025})
    assert [switcher.next(block) for block in range(2)] == ["q/large"] * 2
    switcher.observe(100, 0.5)
    assert switcher.link.bytes_per_s == pytest.approx(200)
    found = [switcher.next(block) for block in range(2, 9)]
    assert found == ["q/large"] * 2 + ["q/small"] * 5
    assert switcher.track == "q/small"
    assert switcher.reasons[-1] == (
        "block 4: from q/large to q/small, 2.00 times as fast for 3 blocks"
    )
    assert len(switcher.reasons) == 2


def test_slow_decoding_changes_the_track() -> None:
    switcher = Switcher((SMALL, LARGE), Link(500), TWO, patience=2, weight=0.5)
    assert switcher.next(0) == "q/small"  # 0.1 s against 0.2 s
    for _ in range(8):
        switcher.observe_decode("slow", 100, 0.4)  # four times as long as rated
    assert switcher.slowness == pytest.approx({"slow": 4}, rel=0.02)
    costs = switcher.predict()
    assert costs == pytest.approx({"q/small": 0.4, "q/large": 0.2}, rel=0.02)
    assert [switcher.next(block) for block in (1, 2, 3)] == ["q/small", "q/large", "q/large"]


def test_an_untried_codec_gets_half_of_the_slowness() -> None:
    switcher = Switcher((SMALL, LARGE), Link(math.inf), TWO, weight=1)
    switcher.observe_decode("fast", 100, 0.1)  # four times as long as rated
    assert switcher.predict() == pytest.approx({"q/small": 0.2, "q/large": 0.1})


def test_busy_workers_are_rated_as_busy() -> None:
    rates = Rates((CodecRate("fast", 1000, math.inf, 0, 2, 1.5),))
    switcher = Switcher((LARGE,), Link(1), rates, weight=1)
    switcher.observe_decode("fast", 1000, 2 / 1.5)
    assert switcher.slowness == pytest.approx({"fast": 1})


def test_a_block_asked_again_counts_once() -> None:
    switcher = Switcher((SMALL, LARGE), Link(4000), TWO, patience=2, weight=1)
    switcher.observe(100, 1)
    assert [switcher.next(block) for block in (0, 0, 0, 0, 1)] == ["q/large"] * 4 + ["q/small"]


def test_the_count_starts_again_when_the_gain_is_gone() -> None:
    switcher = Switcher((SMALL, LARGE), Link(4000), TWO, patience=3, weight=1)
    for block in range(30):
        good = block % 3 == 2
        switcher.observe(100, 0.025 if good else 0.5)
        assert switcher.next(block) == "q/large"


@pytest.mark.parametrize(("size_bytes", "took_s"), [(0, 1.0), (1, 0.0), (-1, 1.0), (1, -1.0)])
def test_observations_of_nothing_are_ignored(size_bytes: int, took_s: float) -> None:
    switcher = Switcher((SMALL, LARGE), Link(math.inf), TWO)
    switcher.observe(size_bytes, took_s)
    switcher.observe_decode("slow", size_bytes, took_s)
    switcher.observe_decode("unknown", 1, 1)
    assert switcher.link.bytes_per_s == math.inf
    assert switcher.slowness == {}


noise = st.lists(st.floats(0.96, 1.04), min_size=1, max_size=100)


@given(noise, st.floats(10, 1e6), st.integers(1, 5), st.floats(0.05, 1))
def test_noise_below_the_threshold_never_changes_the_track(
    factors: list[float], bytes_per_s: float, patience: int, weight: float
) -> None:
    near = replace(LARGE, track="q/near", stored_bytes=1000, work=(Work("near", 1000, 10),))
    rates = TWO.replaced(CodecRate("near", 4000 * 1.01, math.inf))
    switcher = Switcher((near, LARGE), Link(bytes_per_s), rates, patience=patience, weight=weight)
    start = switcher.track
    for block, factor in enumerate(factors):
        switcher.observe(1000, 1000 / bytes_per_s * factor)
        switcher.observe_decode("near" if start == "q/near" else "fast", 1000, 0.25 * factor)
        assert switcher.next(block) == start


@given(
    st.lists(st.tuples(st.floats(1e-6, 10), st.floats(1e-6, 10)), min_size=1, max_size=60),
    st.integers(1, 6),
    st.floats(0, 0.9),
    st.floats(0.05, 1),
)
def test_changes_lie_apart_and_pay(
    observed: list[tuple[float, float]], patience: int, gain: float, weight: float
) -> None:
    switcher = Switcher((SMALL, LARGE), Link(500), TWO, patience=patience, gain=gain, weight=weight)
    changes = []
    for block, (transfer_s, decode_s) in enumerate(observed):
        before = switcher.track
        switcher.observe(100, transfer_s)
        switcher.observe_decode("slow" if before == "q/small" else "fast", 100, decode_s)
        costs = switcher.predict()
        after = switcher.next(block)
        if after != before:
            changes.append(block)
            assert costs[after] < (1 - gain) * costs[before]
    assert all(b - a >= patience for a, b in pairwise(changes))
    assert all(block >= patience - 1 for block in changes)
    assert len(switcher.reasons) == 1 + len(changes)
