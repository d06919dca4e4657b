"""The cost model behind ``track="auto"`` and ``kvformat plan``: how long a read takes, and why.

Pure: numbers in, numbers and sentences out; no clock, no file, no network.

A read is a pipeline. Bytes arrive over a link, and workers decode and restore what has arrived
while more is on its way, one token block after the other. With ``n`` equal blocks that take ``t``
to arrive and ``d`` to decode and restore, all of them take ``t + d + (n - 1) * max(t, d)``: the
slower stage throughout, plus one block of the faster one. Every request of a connection waits for
one round trip, which the other connections use for their own bytes.

Times are in seconds, amounts in bytes and values (elements of the restored tensors). The model
knows nothing of other load, so a reader corrects it with what it sees (``Switcher``).

A reader makes one ``Candidate`` per track of the accepted quality, asks ``choose``, and may then
ask a ``Switcher`` before each token block, because tracks of one quality restore the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvformat.errors import UsageError

Origin = Literal["measured", "entered", "assumed"]
ORIGINS: Final[tuple[Origin, ...]] = ("measured", "entered", "assumed")
"""Where a rate comes from, the most to be trusted first."""
CPU: Final = "cpu"
VIDEO_ENGINE: Final = "video engine"
RECOMPUTE: Final = "recompute"


def rate_name(codec: str, *, exact: bool) -> str:
    """The name under which a codec has a rate; exact groups have one of their own."""
    return f"exact/{codec}" if exact else codec


@dataclass(frozen=True, slots=True)
class CodecRate:
    """How fast one codec decodes and restores on one device.

    ``decode_values_per_s`` and ``restore_values_per_s`` are of one worker (a thread, or a video
    engine), without ``segment_s``, the fixed seconds that each segment costs besides. ``speedup``
    says how many times as fast ``workers`` together are as one.
    """

    name: str
    decode_values_per_s: float
    restore_values_per_s: float
    segment_s: float = 0.0
    workers: int = 1
    speedup: float = 1.0
    origin: Origin = "assumed"
    device: str = CPU

    def __post_init__(self) -> None:
        for field in ("decode_values_per_s", "restore_values_per_s", "speedup"):
            _require(getattr(self, field) > 0, field, "a number above 0", getattr(self, field))
        _require(0 <= self.segment_s < math.inf, "segment_s", "0 or more", self.segment_s)
        _require(self.workers >= 1, "workers", "at least 1", self.workers)
        _require(self.origin in ORIGINS, "origin", "one of " + ", ".join(ORIGINS), self.origin)

    @property
    def slope(self) -> float:
        """What each worker after the first adds, as a part of one: 0 to 1, 1 if not measured."""
        if self.workers == 1:
            return 1.0
        return min(1.0, max(0.0, (self.speedup - 1) / (self.workers - 1)))

    def faster(self, workers: int) -> float:
        """How many times as fast ``workers`` are as one, on a straight line from the measured."""
        return 1 + (workers - 1) * self.slope

    @property
    def values_per_s(self) -> float:
        """Of one worker that decodes and restores, without the fixed cost of segments."""
        value_s = 1 / self.decode_values_per_s + 1 / self.restore_values_per_s
        return 1 / value_s if value_s else math.inf


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a machine, each ``(name, device)`` once, and in words where they are from."""

    entries: tuple[CodecRate, ...]
    source: str = ""

    def __post_init__(self) -> None:
        keys = [(item.name, item.device) for item in self.entries]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        _require(twice is None, "entries", "each codec and device once", twice)

    def get(self, name: str, device: str = CPU) -> CodecRate | None:
        """The rate of that name on that device, None if there is none."""
        found = (item for item in self.entries if (item.name, item.device) == (name, device))
        return next(found, None)

    def replaced(self, *entries: CodecRate) -> Rates:
        """With these entries in place of those of the same name and device, or added."""
        new = {(item.name, item.device): item for item in (*self.entries, *entries)}
        return Rates(tuple(new.values()), self.source)


@dataclass(frozen=True, slots=True)
class Link:
    """Where the bytes come from: bandwidth of all connections together, and a round trip.

    ``bytes_per_s`` may be infinite, for bytes that are in memory already.
    """

    bytes_per_s: float
    round_trip_s: float = 0.0
    connections: int = 1

    def __post_init__(self) -> None:
        _require(self.bytes_per_s > 0, "bytes_per_s", "a number above 0", self.bytes_per_s)
        _require(0 <= self.round_trip_s < math.inf, "round_trip_s", "0 or more", self.round_trip_s)
        _require(self.connections >= 1, "connections", "at least 1", self.connections)


@dataclass(frozen=True, slots=True)
class Work:
    """Values and segments of a read that one rate applies to; ``rate`` is a ``rate_name``."""

    rate: str
    values: int
    segments: int = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """One track, as far as its cost goes: what a read of it fetches and decodes.

    ``blocks`` is the number of token blocks that come one after the other, ``requests`` that of
    range requests, ``opening`` that of round trips before the first of them (front, tables). No
    ``work`` means that nothing is decoded, as with raw tensors.
    """

    track: str
    quality: str
    stored_bytes: int
    work: tuple[Work, ...]
    blocks: int = 1
    requests: int = 1
    opening: int = 0

    def __post_init__(self) -> None:
        _require(self.stored_bytes >= 0, "stored_bytes", "0 or more", self.stored_bytes)
        _require(self.blocks >= 1, "blocks", "at least 1", self.blocks)
        _require(self.requests >= 0, "requests", "0 or more", self.requests)
        _require(self.opening >= 0, "opening", "0 or more", self.opening)

    @property
    def values(self) -> int:
        """Values that are restored."""
        return sum(item.values for item in self.work)


def work_of(parts: Iterable[tuple[str, bool, int, int]]) -> tuple[Work, ...]:
    """The work of ``(codec, exact, values, segments)`` per group, summed per rate."""
    sums: dict[str, tuple[int, int]] = {}
    for codec, exact, values, segments in parts:
        name = rate_name(codec, exact=exact)
        before = sums.get(name, (0, 0))
        sums[name] = before[0] + values, before[1] + segments
    return tuple(Work(name, *pair) for name, pair in sums.items())


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long one track takes. ``decode_s`` and ``restore_s`` are of all workers together.

    ``first_block_s`` is when the first token block is restored, ``total_s`` when the last one is.
    ``origin`` is the least trusted one of the rates used.
    """

    track: str
    stored_bytes: int
    transfer_s: float
    decode_s: float
    restore_s: float
    total_s: float
    first_block_s: float
    workers: int
    origin: Origin

    @property
    def bound(self) -> Literal["the link", "decoding"]:
        """The slower stage: what a faster read would need more of."""
        return "the link" if self.transfer_s >= self.decode_s + self.restore_s else "decoding"

    def __str__(self) -> str:
        text = f"{self.track}: {seconds(self.total_s)}, {self.stored_bytes:,} bytes arrive in "
        text += seconds(self.transfer_s)
        work_s = self.decode_s + self.restore_s
        if work_s == 0:
            return f"{text}, nothing to decode"
        plural = "" if self.workers == 1 else "s"
        text += f", decoded and restored in {seconds(work_s)} by {self.workers} worker{plural}"
        return f"{text} ({self.origin} rates)"


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer of ``choose``: a track's name, ``"recompute"``, or None, and why.

    ``reasons`` are sentences for people. ``estimates`` hold every track that has a rate, the
    fastest first: also where the answer is None, because nothing meets the deadline.
    """

    answer: str | None
    reasons: tuple[str, ...]
    estimates: tuple[Estimate, ...]
    recompute_s: float | None = None

    @property
    def track(self) -> str | None:
        """The track to read, None if the answer is another."""
        return None if self.answer == RECOMPUTE else self.answer


def seconds(value: float) -> str:
    """A time with three digits: ``12.3 ms``, ``1.50 s``, ``208 s``."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if value * factor < 999.5:
            return f"{value * factor:.3g} {unit}" if value else "0 s"
    return (
        f"{value:.2f} s" if value < 10 else f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"
    )


def estimate(
    candidate: Candidate, link: Link, rates: Rates, *, workers: int | None = None, engines: int = 0
) -> Estimate:
    """What reading ``candidate`` takes on ``workers`` threads, by default as many as measured.

    With ``engines`` video engines, work that has a rate on ``VIDEO_ENGINE`` is done there.
    Raises ``UsageError`` where ``rates`` lacks what the candidate needs (see ``missing``).
    """
    used = [(item, _rate(item, rates, engines)) for item in candidate.work]
    if workers is None:
        workers = max((rate.workers for _, rate in used if rate.device == CPU), default=1)
    _require(workers >= 1, "workers", "at least 1", workers)
    segments = sum(item.segments for item in candidate.work)
    width = max(1, segments // candidate.blocks)
    whole, block = [0.0, 0.0], 0.0
    for item, rate in used:
        count = engines if rate.device == VIDEO_ENGINE else workers
        fast = rate.faster(min(count, max(1, segments)))
        decode_s = item.segments * rate.segment_s + item.values / rate.decode_values_per_s
        restore_s = item.values / rate.restore_values_per_s
        whole[0] += decode_s / fast
        whole[1] += restore_s / fast
        block += (decode_s + restore_s) / candidate.blocks / rate.faster(min(count, width))
    moving_s = candidate.stored_bytes / link.bytes_per_s
    waits = math.ceil(candidate.requests / link.connections)
    transfer_s = moving_s + (candidate.opening + waits) * link.round_trip_s
    opening_s = (candidate.opening + min(waits, 1)) * link.round_trip_s
    arrival_s = opening_s + moving_s / candidate.blocks
    return Estimate(
        candidate.track,
        candidate.stored_bytes,
        transfer_s,
        whole[0],
        whole[1],
        max(transfer_s + block, arrival_s + sum(whole)),
        arrival_s + block,
        workers,
        max((rate.origin for _, rate in used), key=ORIGINS.index, default="measured"),
    )


def missing(candidate: Candidate, rates: Rates) -> str | None:
    """The first rate that the candidate needs and ``rates`` lacks."""
    return next((item.rate for item in candidate.work if rates.get(item.rate) is None), None)


def _rate(item: Work, rates: Rates, engines: int) -> CodecRate:
    found = rates.get(item.rate, VIDEO_ENGINE) if engines else None
    found = found or rates.get(item.rate)
    if found is None:
        raise UsageError("usage.argument", "no rate is known for a codec", found=item.rate)
    return found


def choose(
    candidates: Sequence[Candidate],
    link: Link,
    rates: Rates,
    *,
    workers: int | None = None,
    engines: int = 0,
    prefill_tokens_per_s: float | None = None,
    tokens: int | None = None,
    deadline_s: float | None = None,
) -> Decision:
    """The candidate that is restored soonest; among equals the one with the fewest bytes.

    The candidates must all be of a quality that the caller accepts. ``prefill_tokens_per_s`` and
    ``tokens`` together allow the answer ``"recompute"``: without a deadline where that is faster
    than every track, with ``deadline_s`` only where no track meets it, since a track leaves the
    accelerator free. The answer is None where nothing meets the deadline or nothing has a rate.
    """
    reasons = [
        f"{item.track}: left out, no rate is known for {name}"
        for item in candidates
        if (name := missing(item, rates)) is not None
    ]
    usable = [item for item in candidates if missing(item, rates) is None]
    estimates = sorted(
        (estimate(item, link, rates, workers=workers, engines=engines) for item in usable),
        key=lambda item: (item.total_s, item.stored_bytes),
    )
    reasons += [str(item) for item in estimates]
    recompute_s = None
    if prefill_tokens_per_s is not None:
        _require(prefill_tokens_per_s > 0, "prefill_tokens_per_s", "above 0", prefill_tokens_per_s)
        _require(tokens is not None, "tokens", "a count, to go with the prefill rate", tokens)
        recompute_s = (tokens or 0) / prefill_tokens_per_s
        reasons.append(
            f"recompute: {seconds(recompute_s)}, {tokens:,} tokens at "
            f"{prefill_tokens_per_s:,.0f} a second"
        )
    answer, why = _decide(estimates, recompute_s, deadline_s)
    return Decision(answer, (*reasons, why), tuple(estimates), recompute_s)


def _decide(
    estimates: Sequence[Estimate], recompute_s: float | None, deadline_s: float | None
) -> tuple[str | None, str]:
    """The answer, and the sentence that gives the reason."""
    best = estimates[0] if estimates else None
    if deadline_s is not None:
        _require(deadline_s >= 0, "deadline_s", "0 or more", deadline_s)
        limit = f"the deadline of {seconds(deadline_s)}"
        if best is None or best.total_s > deadline_s:
            if recompute_s is not None and recompute_s <= deadline_s:
                return RECOMPUTE, f"recompute: no track meets {limit}, recomputing does"
            lack = "" if recompute_s is not None else " (no prefill rate was given)"
            return None, f"nothing meets {limit}{lack}"
        return best.track, f"{best.track}: {_lead(estimates)}, and within {limit}"
    if recompute_s is not None and (best is None or recompute_s < best.total_s):
        return RECOMPUTE, "recompute: faster than every track"
    if best is None:
        return None, "there is no track to choose from"
    return best.track, f"{best.track}: {_lead(estimates)}"


def _lead(estimates: Sequence[Estimate]) -> str:
    """How the first one beats the second."""
    best = estimates[0]
    if len(estimates) == 1:
        return "the only track"
    second = estimates[1]
    if second.total_s == best.total_s:
        return f"as fast as {second.track} with no more bytes"
    ratio = second.total_s / best.total_s if best.total_s else math.inf
    return f"{ratio:.2f} times as fast as {second.track}, limited by {best.bound}"


class Switcher:
    """Decides before each token block which track of one quality to read it from.

    It starts with ``choose`` and corrects bandwidth and rates by what is observed: the newest
    observation weighs ``weight``, all before it the rest. It changes only when another track
    promises to be faster by more than the part ``gain`` for ``patience`` blocks in a row, so
    noise below ``gain`` never changes it, and changes lie at least ``patience`` blocks apart.

    Not safe for use by several threads at once. It starts nothing and reads no clock.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        link: Link,
        rates: Rates,
        *,
        workers: int | None = None,
        gain: float = 0.10,
        patience: int = 3,
        weight: float = 0.25,
    ) -> None:
        _require(0 <= gain < 1, "gain", "from 0 to below 1", gain)
        _require(patience >= 1, "patience", "at least 1", patience)
        _require(0 < weight <= 1, "weight", "above 0, at most 1", weight)
        start = choose(candidates, link, rates, workers=workers)
        _require(start.track is not None, "candidates", "a track with a rate", start.reasons[-1])
        self._options = {item.track: item for item in candidates if missing(item, rates) is None}
        self._link, self._rates, self._workers = link, rates, workers
        self._gain, self._patience, self._weight = gain, patience, weight
        self._s_per_byte = 1 / link.bytes_per_s
        self._slowness: dict[str, float] = {}
        self._track = start.track or ""
        self._rival, self._streak, self._block = "", 0, -1
        self.reasons: list[str] = [start.reasons[-1]]

    @property
    def track(self) -> str:
        """The track of the last answer."""
        return self._track

    @property
    def link(self) -> Link:
        """The link with the bandwidth as it is now believed to be."""
        bytes_per_s = 1 / self._s_per_byte if self._s_per_byte else math.inf
        return Link(bytes_per_s, self._link.round_trip_s, self._link.connections)

    @property
    def slowness(self) -> Mapping[str, float]:
        """Per observed rate name, how many times as long as rated its work takes."""
        return dict(self._slowness)

    def observe(self, size_bytes: int, seconds: float) -> None:
        """``size_bytes`` arrived over all connections in ``seconds`` on the clock.

        Leave out the time in which the reader asked for nothing because the workers were behind.
        """
        if size_bytes > 0 and seconds > 0:
            self._s_per_byte = self._blend(self._s_per_byte, seconds / size_bytes)

    def observe_decode(self, codec: str, values: int, seconds: float) -> None:
        """One of all workers decoded and restored one segment; ``codec`` is a ``rate_name``."""
        rate = self._rates.get(codec)
        if rate is None or values <= 0 or seconds <= 0:
            return
        workers = self._workers or rate.workers
        together = workers / rate.faster(workers)  # busy workers slow each other
        rated_s = together * (rate.segment_s + values / rate.values_per_s)
        if rated_s > 0:
            before = self._slowness.get(codec, 1.0)
            self._slowness[codec] = self._blend(before, seconds / rated_s)

    def _blend(self, before: float, now: float) -> float:
        return (1 - self._weight) * before + self._weight * now

    def predict(self) -> dict[str, float]:
        """Seconds per token block and track, when the pipeline is full."""
        link, found = self.link, {}
        # Other load slows all codecs, a wrong rate only one: an untried codec gets the middle.
        common = math.sqrt(max(self._slowness.values(), default=1.0))
        for name, item in self._options.items():
            work_s = 0.0
            for part in item.work:
                alone = Candidate(name, item.quality, 0, (part,), item.blocks, 0)
                cost = estimate(alone, link, self._rates, workers=self._workers)
                slowness = self._slowness.get(part.rate, common)
                work_s += (cost.decode_s + cost.restore_s) * slowness
            bare = Candidate(name, item.quality, item.stored_bytes, (), item.blocks, item.requests)
            transfer_s = estimate(bare, link, self._rates).transfer_s
            found[name] = max(transfer_s, work_s) / item.blocks
        return found

    def next(self, block: int) -> str:
        """The track for the token block ``block``; numbers ascend, a repeated one counts once."""
        if block <= self._block:
            return self._track
        self._block = block
        costs = self.predict()
        best = min(costs, key=lambda name: (costs[name], self._options[name].stored_bytes))
        if costs[best] >= (1 - self._gain) * costs[self._track]:
            self._rival, self._streak = "", 0
            return self._track
        self._streak = self._streak + 1 if best == self._rival else 1
        self._rival = best
        if self._streak >= self._patience:
            ratio = costs[self._track] / costs[best] if costs[best] else math.inf
            self.reasons.append(
                f"block {block}: from {self._track} to {best}, {ratio:.2f} times as fast for "
                f"{self._patience} blocks"
            )
            self._track, self._rival, self._streak = best, "", 0
        return self._track


def _require(good: bool, name: str, expected: str, found: object) -> None:
    if not good:
        raise UsageError(
            "usage.argument", f"{name} cannot be used", expected=expected, found=ascii(found)[:80]
        )
