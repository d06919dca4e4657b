"""What ``kvformat plan`` computes: geometries, options, break-even bandwidths. Pure.

An ``Option`` is one way to get a cache: a track, the raw tensors, or computing it again. Its
seconds come from the cost model; the bits per value of a track come from an artifact, or from
``MEASURED_BITS``, which a small model gave and which another model will not meet exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Final

from kvformat.costs import (
    VIDEO_ENGINE,
    Candidate,
    CodecRate,
    Estimate,
    Link,
    Rates,
    estimate,
    work_of,
)
from kvformat.errors import UsageError
from kvformat.groups import Group, Segmentation, count_cells
from kvformat.manifest import Manifest
from kvformat.planning import plan_segmentation
from kvformat.tracks import EXACT

MEASURED_BITS: Final = MappingProxyType(
    {
        "near-lossless/zstd": 4.13,
        "near-lossless/hevc": 4.21,
        "balanced/zstd": 2.39,
        "balanced/hevc": 2.46,
        "small/zstd": 1.8,
        "exact/zstd": 10.67,
    }
)
"""Bits per value of the whole file, bfloat16, SmolLM2-135M, 2,048 tokens (README, "Measured")."""
BITS_SOURCE: Final = "those of a small model, SmolLM2-135M in bfloat16"
MEASURED_QUALITIES: Final = ("near-lossless", EXACT)
OPENING: Final = 2
"""Round trips before the first request of data: the front, and the table of the track."""
MOST_WORKERS: Final = 2**14
RAW_FP16, RAW_FP8, RECOMPUTE = "raw fp16", "raw fp8", "recompute"


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a model's cache: ``rows`` are KV heads and head dim of each tensor per layer."""

    name: str
    layers: int
    rows: tuple[tuple[str, int, int], ...]

    def groups(self) -> tuple[Group, ...]:
        """The groups that an artifact of the whole cache has."""
        layers = tuple(range(self.layers))
        return tuple(
            Group(role, role, "bfloat16", layers, heads, dim, heads)
            for role, heads, dim in self.rows
        )


def attention(name: str, layers: int, kv_heads: int, head_dim: int) -> Geometry:
    """Keys and values of the same shape in each layer."""
    return Geometry(name, layers, (("key", kv_heads, head_dim), ("value", kv_heads, head_dim)))


PRESETS: Final = MappingProxyType(
    {
        item.name: item
        for item in (
            # config.json of meta-llama/Llama-3.1-8B: num_hidden_layers 32,
            # num_key_value_heads 8, hidden_size 4096 over num_attention_heads 32
            attention("llama-3.1-8b", 32, 8, 128),
            # config.json of meta-llama/Llama-3.1-70B: num_hidden_layers 80,
            # num_key_value_heads 8, hidden_size 8192 over num_attention_heads 64
            attention("llama-3.1-70b", 80, 8, 128),
            # config.json of Qwen/Qwen3-8B: num_hidden_layers 36, num_key_value_heads 8,
            # head_dim 128
            attention("qwen3-8b", 36, 8, 128),
            # config.json of HuggingFaceTB/SmolLM2-135M: num_hidden_layers 30,
            # num_key_value_heads 3, hidden_size 576 over num_attention_heads 9
            attention("smollm2-135m", 30, 3, 64),
            # inference/configs/config_671B.json of deepseek-ai/DeepSeek-V3: n_layers 61,
            # kv_lora_rank 512, qk_rope_head_dim 64; the cache is one latent and one rotary key
            Geometry("deepseek-v3-mla", 61, (("latent", 1, 512), ("key", 1, 64))),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to get the cache. ``bits`` is None and ``fixed_s`` a time for computing it again."""

    name: str
    quality: str
    candidate: Candidate
    bits: float | None
    bits_modelled: bool = False
    fixed_s: float | None = None
    engines: int = 0

    def cost(self, link: Link, rates: Rates, workers: int | None) -> Estimate:
        """The estimate, for any link and number of workers."""
        if self.fixed_s is not None:
            total = self.fixed_s
            return Estimate(self.name, 0, 0.0, 0.0, 0.0, total, total, 0, "entered")
        return estimate(self.candidate, link, rates, workers=workers, engines=self.engines)

    def total_s(self, link: Link, rates: Rates, workers: int | None) -> float:
        """Seconds until all is there."""
        return self.cost(link, rates, workers).total_s


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache that is planned for: its groups, cut into segments, and its values."""

    groups: tuple[Group, ...]
    segmentation: Segmentation
    tokens: int

    @property
    def group_values(self) -> tuple[int, ...]:
        """Values of each group."""
        return tuple(prod(group.shape(self.tokens)) for group in self.groups)

    @property
    def values(self) -> int:
        """Values of all groups."""
        return sum(self.group_values)

    @property
    def blocks(self) -> int:
        """Token blocks, one after the other."""
        return max(1, -(-self.tokens // self.segmentation.tokens))

    def segments(self, index: int) -> int:
        """Segments of one group in one track."""
        cut = self.segmentation
        one = Segmentation(cut.tokens, (cut.groups[index],), cut.order, cut.alignment)
        return count_cells((self.groups[index],), one, self.tokens)


def planned_cache(geometry: Geometry, tokens: int) -> Cache:
    """The cache of a geometry, with the writer's segmentation."""
    groups = geometry.groups()
    return Cache(groups, plan_segmentation(groups, tokens), tokens)


def stored_cache(manifest: Manifest, tokens: int | None) -> Cache:
    """The cache of an artifact, for another number of tokens if that is given."""
    count = manifest.tokens.count
    if tokens is not None and tokens != count and manifest.valid_lengths is not None:
        raise UsageError(
            "usage.argument",
            "an artifact with windows or states says nothing about other lengths",
            expected=f"{count} tokens",
            found=tokens,
        )
    return Cache(manifest.groups, manifest.segmentation, count if tokens is None else tokens)


def tracks_of(manifest: Manifest, cache: Cache) -> list[Option]:
    """An option for each track of an artifact, with its own bits per value."""
    stored = Cache(manifest.groups, manifest.segmentation, manifest.tokens.count)
    options = []
    for track in manifest.tracks:
        quality = manifest.quality(track.quality)
        size = sum(item.data_stop - item.data_start + item.table_bytes for item in (quality, track))
        exact = [item == EXACT for item in quality.encodings]
        bits = 8 * size / max(1, stored.values)
        modelled = cache.tokens != stored.tokens
        options.append(
            _track(track.name, cache, bits, codecs=track.codecs, exact=exact, modelled=modelled)
        )
    return options


def tracks_from_table(cache: Cache) -> list[Option]:
    """An option for each track of ``MEASURED_BITS``."""
    options = []
    for name, bits in MEASURED_BITS.items():
        quality, codec = name.split("/")
        codecs, exact = [codec] * len(cache.groups), [quality == EXACT] * len(cache.groups)
        options.append(_track(name, cache, bits, codecs=codecs, exact=exact, modelled=True))
    return options


def _track(
    name: str,
    cache: Cache,
    bits: float,
    *,
    codecs: Sequence[str],
    exact: Sequence[bool],
    modelled: bool,
) -> Option:
    work = work_of(
        (codecs[index], exact[index], values, cache.segments(index))
        for index, values in enumerate(cache.group_values)
    )
    size = math.ceil(bits * cache.values / 8)
    quality = name.partition("/")[0]
    candidate = Candidate(name, quality, size, work, cache.blocks, 1, OPENING)
    return Option(name, quality, candidate, bits, modelled)


def on_engines(option: Option, engines: int) -> Option | None:
    """The same track decoded by video engines, None if it holds no video."""
    if all(item.rate != "hevc" for item in option.candidate.work):
        return None
    name = f"{option.name} on {engines} video engine{'' if engines == 1 else 's'}"
    return Option(name, option.quality, option.candidate, option.bits, True, None, engines)


def engine_rate(values_per_s: float) -> CodecRate:
    """The rate of one video engine, restoring included, as the user enters it."""
    return CodecRate("hevc", values_per_s, math.inf, origin="entered", device=VIDEO_ENGINE)


def others(cache: Cache, prefill_tokens_per_s: float | None) -> list[Option]:
    """Raw fp16, raw fp8, and recomputing where its rate is given."""
    options = []
    for name, item_bytes in ((RAW_FP16, 2), (RAW_FP8, 1)):
        size = cache.values * item_bytes
        options.append(
            Option(name, name, Candidate(name, name, size, (), cache.blocks), 8.0 * item_bytes)
        )
    if prefill_tokens_per_s is not None:
        nothing = Candidate(RECOMPUTE, RECOMPUTE, 0, (), 1, 0)
        options.append(
            Option(RECOMPUTE, RECOMPUTE, nothing, None, fixed_s=cache.tokens / prefill_tokens_per_s)
        )
    return options


def needed(option: Option, link: Link, rates: Rates) -> int | None:
    """The fewest workers, or engines, that decode as fast as the link delivers.

    None where no number up to ``MOST_WORKERS`` does, 0 where nothing is decoded.
    """
    if not option.candidate.work or option.fixed_s is not None:
        return 0

    def keeps_up(count: int) -> bool:
        engines = count if option.engines else 0
        found = estimate(option.candidate, link, rates, workers=count, engines=engines)
        return found.decode_s + found.restore_s <= found.transfer_s

    if not keeps_up(MOST_WORKERS):
        return None
    low, high = 0, MOST_WORKERS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps_up(middle) else (middle, high)
    return high


# Break-even

LOWEST, HIGHEST = 1e3, 1e14
"""Bytes per second between which break-even bandwidths are looked for."""
STEPS: Final = 110
Interval = tuple[float | None, float | None]
"""From and to in bytes per second; None is an open end."""


def bandwidths(low: float = LOWEST, high: float = HIGHEST, steps: int = STEPS) -> list[float]:
    """A logarithmic grid, both ends included."""
    factor = (high / low) ** (1 / steps)
    return [low * factor**index for index in range(steps + 1)]


def faster_where(mine: Callable[[float], float], other: Callable[[float], float]) -> list[Interval]:
    """The bandwidths at which ``mine`` takes fewer seconds than ``other``; both are functions of
    bytes per second. Empty for never, ``[(None, None)]`` for always.
    """
    grid = bandwidths()
    wins = [mine(item) < other(item) for item in grid]
    edges = [
        _bisect(lambda x: mine(x) < other(x), low, high)
        for (low, before), (high, after) in pairwise(zip(grid, wins, strict=True))
        if before != after
    ]
    bounds: list[float | None] = [*([None] if wins[0] else []), *edges]
    if wins[-1]:
        bounds.append(None)
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def _bisect(wins: Callable[[float], bool], low: float, high: float) -> float:
    """Where ``wins`` changes between two bandwidths."""
    start = wins(low)
    for _ in range(60):
        middle = math.sqrt(low * high)
        if wins(middle) == start:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def winner(options: Sequence[Option], link: Link, rates: Rates, workers: int | None) -> Option:
    """The fastest; among equals the one with the fewest bytes."""
    return min(
        options, key=lambda item: (item.total_s(link, rates, workers), item.candidate.stored_bytes)
    )


def winners(
    options: Sequence[Option], link: Link, rates: Rates, workers: int | None
) -> list[tuple[Option, Interval]]:
    """The fastest option along all bandwidths, each with where it is the fastest."""

    def best(bytes_per_s: float) -> Option:
        return winner(options, Link(bytes_per_s, link.round_trip_s), rates, workers)

    found: list[tuple[Option, Interval]] = []
    grid = bandwidths()
    start: float | None = None
    at, current = grid[0], best(grid[0])
    for high in grid[1:]:
        while best(high) is not current:  # a narrow area may lie inside one step
            edge = _bisect(lambda x: best(x) is current, at, high)  # noqa: B023 - called here only
            found.append((current, (start, edge)))
            at, start = min(high, edge * (1 + 1e-9)), edge
            current = best(at)
        at = high
    found.append((current, (start, None)))
    return found


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer: what is planned for, the options, and the rates used.

    ``quality`` is that of the tracks that are compared with the rest, ``artifact`` the URL that
    bits and geometry are from.
    """

    name: str
    cache: Cache
    options: list[Option]
    link: Link
    rates: Rates
    workers: int
    quality: str
    artifact: str = ""

    @property
    def compared(self) -> list[Option]:
        """Those that are alike in quality: its tracks, the raw tensors, recomputing."""
        return [item for item in self.options if item.quality in (self.quality, item.name)]

    @property
    def tracks(self) -> list[Option]:
        """The options that are tracks."""
        return [item for item in self.options if item.quality != item.name]

    @property
    def rivals(self) -> list[Option]:
        """The options that are not: raw tensors, recomputing."""
        return [item for item in self.options if item.quality == item.name]

    def cost(self, option: Option) -> Estimate:
        """The estimate for the link and workers asked about."""
        return option.cost(self.link, self.rates, self.workers)

    def needed(self, option: Option) -> int | None:
        """Workers or engines that keep up with the link (``needed``)."""
        return needed(option, self.link, self.rates)

    def decoding_modelled(self, option: Option) -> bool:
        """Whether decode and restore times are more than a measurement here, scaled in size.

        Rates are measured in the qualities near-lossless and exact.
        """
        used = [self.rates.get(item.rate) for item in option.candidate.work]
        beyond = any(rate is not None and self.workers > rate.workers for rate in used)
        other = option.candidate.work and option.quality not in MEASURED_QUALITIES
        return bool(beyond or other) or self.cost(option).origin != "measured"

    def faster(self, mine: Option, other: Option) -> list[Interval]:
        """The bandwidths at which one option is faster than another."""

        def total(option: Option) -> Callable[[float], float]:
            trip = self.link.round_trip_s
            return lambda x: option.total_s(Link(x, trip), self.rates, self.workers)

        return faster_where(total(mine), total(other))

    def areas(self) -> list[tuple[Option, Interval]]:
        """Which of ``compared`` is the fastest, from slow links to fast ones."""
        return winners(self.compared, self.link, self.rates, self.workers)
