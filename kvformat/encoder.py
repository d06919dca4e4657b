"""Encoding cells: source tensors to the stored bytes of segments, one cell at a time.

``prepare`` makes the first pass (digests, statistics, quantisation sets, layouts); the result is
never changed afterwards, so ``encode_cell`` runs on any number of threads with equal results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvformat.cache import Cache, GroupTensors
from kvformat.codecs.base import Bytes, Codec, SegmentShape
from kvformat.codecs.hevc import ranked_layer
from kvformat.codecs.registry import CODECS
from kvformat.coefficients import Coefficients, transformed_set
from kvformat.digests import digest, digest_all
from kvformat.errors import InvalidError, UsageError
from kvformat.groups import Cell, Grid, Segmentation, make_grid
from kvformat.layout import Layout, candidate_layouts, fault, tail_layout
from kvformat.limits import LIMITS
from kvformat.planning import TrackPlan, relative_step
from kvformat.quantiser import (
    SINK_TOKENS,
    LayerFacts,
    QuantisedSegment,
    is_modest,
    make_set,
    measure_layer,
    needs_exact_rows,
    quantise_segment,
)
from kvformat.sets import QuantisationSet
from kvformat.sums import integer_sum
from kvformat.tables import NO_LAYOUT, NO_SET
from kvformat.tracks import EXACT, QUANTISED, TRANSFORMED
from kvformat.workers import in_order, worker_count

HASH_BYTES: Final = 2 * 2**20
SAMPLE_TOKENS: Final = 1024
MARGIN: Final = 200
"""A layout replaces the usual one, which encodes fastest, if its sample is smaller by one part in
this many; less is the noise of the sample."""


@dataclass(frozen=True, slots=True)
class Job:
    """What the encoding of any cell needs.

    ``facts`` by (group, layer index); ``sets`` by quality, in table order, and ``set_numbers`` by
    (group, first layer index); ``codecs`` and ``layouts`` by track name; ``layout_numbers`` by
    (track name, group, token count).
    """

    cache: Cache
    segmentation: Segmentation
    first_position: int
    plans: tuple[TrackPlan, ...]
    grid: Grid
    facts: dict[tuple[int, int], LayerFacts]
    sets: dict[str, list[QuantisationSet]]
    set_numbers: dict[tuple[int, int], int]
    codecs: dict[str, tuple[str, ...]]
    layouts: dict[str, tuple[Layout, ...]]
    layout_numbers: dict[tuple[str, int, int], int]
    video: Codec = CODECS["hevc"]
    coefficients: Coefficients | None = None

    def codec(self, name: str) -> Codec:
        """The codec that encodes; ``video`` stands in for ``hevc``."""
        return self.video if name == "hevc" else CODECS[name]

    @property
    def qualities(self) -> tuple[str, ...]:
        """Names of the qualities, in the order of their first track."""
        return tuple(dict.fromkeys(plan.quality for plan in self.plans))

    def exact(self, quality: str, group: int) -> bool:
        """Whether a quality holds the exact bytes of a group."""
        return quality == EXACT or not self.cache.groups[group].group.quantisable

    def encoding(self, quality: str, group: int) -> str:
        """``exact``, ``quantised`` or ``transformed`` (section 9.1)."""
        if self.exact(quality, group):
            return EXACT
        if self.coefficients is not None and (quality, group) in self.coefficients.groups:
            return TRANSFORMED
        return QUANTISED


@dataclass(frozen=True, slots=True)
class EncodedSegment:
    """The stored bytes of one cell in one track, and the fields of its record."""

    side: bytes
    payload: bytes
    set_index: int
    layout: int
    digest: bytes
    integer_digest: bytes
    integer_sum: int

    @property
    def stored_bytes(self) -> int:
        """Side block and payload."""
        return len(self.side) + len(self.payload)


def video_encoder(name: str | None) -> Codec:
    """What makes the streams of ``hevc``: libx265, or ``nvenc``; raises ``usage.argument``."""
    if name is None:
        return CODECS["hevc"]
    if name != "nvenc":
        found = ascii(name)[:60]
        raise UsageError("usage.argument", "unknown encoder", expected="nvenc", found=found)
    from kvformat.gpu.nvenc import NvencCodec

    return NvencCodec()


def prepare(
    cache: Cache,
    segmentation: Segmentation,
    plans: tuple[TrackPlan, ...],
    *,
    first_position: int,
    workers: int | None,
    video: Codec = CODECS["hevc"],
    coefficients: Coefficients | None = None,
) -> tuple[Job, bytes]:
    """The first pass; returns the job and the source digest (CID-1)."""
    sinks = first_position == 0
    layers = [
        (number, index)
        for number, item in enumerate(cache.groups)
        for index in range(len(item.layers))
    ]

    qualities = {plan.quality for plan in plans} - {EXACT}
    known = () if coefficients is None else coefficients.groups
    whole = {
        number
        for number in range(len(cache.groups))
        if all((quality, number) in known for quality in qualities)
    }

    def measure(place: tuple[int, int]) -> tuple[bytes, LayerFacts | None]:
        item = cache.groups[place[0]]
        x = item.layers[place[1]]
        where = f"group {item.group.name}, layer {item.group.layers[place[1]]}"
        facts = None
        if qualities and item.group.quantisable and not (place[0] in whole and is_modest(x)):
            starts = item.group.held(cache.token_count)[0] == 0
            facts = measure_layer(x, sinks=sinks and starts, where=where)
        return digest_tensor(x), facts

    measured = list(in_order(measure, layers, worker_count(workers, 8 * 2**20)))
    source_digest = digest_all(item for item, _ in measured)
    facts = {
        place: found
        for place, (_, found) in zip(layers, measured, strict=True)
        if found is not None
    }
    job = Job(
        cache=cache,
        segmentation=segmentation,
        first_position=first_position,
        plans=plans,
        grid=make_grid(tuple(item.group for item in cache.groups), segmentation, cache.token_count),
        facts=facts,
        sets={},
        set_numbers={},
        codecs={},
        layouts={},
        layout_numbers={},
        video=video,
        coefficients=coefficients,
    )
    job = _with_sets(job)
    return _with_layouts(job, workers), source_digest


def digest_tensor(x: NDArray[Any]) -> bytes:
    """BLAKE3 of the little-endian bytes of ``x``, without a second whole copy."""
    rows = max(1, HASH_BYTES // max(1, x[:1].nbytes))
    return digest_all(raw_bytes(x[start : start + rows]) for start in range(0, len(x), rows))


def raw_bytes(x: NDArray[Any]) -> memoryview:
    """The little-endian bytes of ``x``, a view where it is contiguous."""
    array = np.ascontiguousarray(x)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8).data


def _with_sets(job: Job) -> Job:
    """Quantisation sets of every quality, one per layer run of each quantised group."""
    sets: dict[str, list[QuantisationSet]] = {}
    numbers: dict[tuple[int, int], int] = {}
    used = np.unique(job.grid.fields["group"]) if len(job.grid) else ()
    for quality in job.qualities:
        found: list[QuantisationSet] = []
        for group, item in enumerate(job.cache.groups):
            if job.exact(quality, group) or group not in used:
                continue
            step = job.segmentation.groups[group].layers
            for first in range(0, len(item.layers), step):
                run = range(first, min(first + step, len(item.layers)))
                numbers[group, first] = len(found)
                if job.encoding(quality, group) == TRANSFORMED:
                    heads, head_dim = item.group.heads, item.group.head_dim
                    found.append(transformed_set(len(run), heads, head_dim))
                    continue
                facts = [job.facts[group, layer] for layer in run]
                found.append(make_set(facts, relative_step(quality, item.group.role)))
        sets[quality] = found
    return replace(job, sets=sets, set_numbers=numbers)


def _with_layouts(job: Job, workers: int | None) -> Job:
    """Codecs per group and, for ``hevc``, layouts chosen on a sample (section 10.4)."""
    codecs: dict[str, tuple[str, ...]] = {}
    layouts: dict[str, tuple[Layout, ...]] = {}
    numbers: dict[tuple[str, int, int], int] = {}
    for plan in job.plans:
        names: list[str] = []
        chosen: list[Layout] = []
        for group in range(len(job.cache.groups)):
            name = plan.codec
            if plan.codec == "hevc":
                fitting = None
                if not job.exact(plan.quality, group):
                    fitting = _choose_layout(job, plan, group, chosen, workers)
                name = "hevc" if fitting is not None else "zstd"
                _add_layouts(job, plan, group, fitting, chosen=chosen, numbers=numbers)
            names.append(name)
        codecs[plan.name] = tuple(names)
        layouts[plan.name] = tuple(chosen)
    return replace(job, codecs=codecs, layouts=layouts, layout_numbers=numbers)


def _cells_of(job: Job, group: int) -> NDArray[Any]:
    found: NDArray[Any] = np.flatnonzero(job.grid.fields["group"] == group)
    return found


def _choose_layout(
    job: Job, plan: TrackPlan, group: int, chosen: list[Layout], workers: int | None
) -> Layout | None:
    """The layout that makes the smallest payload of a sample, None if none is allowed."""
    numbers = _cells_of(job, group)
    if not len(numbers):
        return candidate_layouts(1, job.cache.groups[group].group.channels)[-1]
    cell = _typical_cell(job, numbers)
    sample = replace(cell, layer_count=1)
    channels = cell.head_count * job.cache.groups[group].group.head_dim
    sizes = {(item.width, item.height) for item in chosen}
    candidates = [
        layout
        for layout in candidate_layouts(cell.token_count, channels)
        if not fault(layout, cell.token_count, channels)
        and ((layout.width, layout.height) in sizes or len(sizes) < LIMITS.picture_sizes_per_track)
    ]
    if len(candidates) <= 1:
        return candidates[0] if candidates else None
    segment = quantise_cell(job, plan.quality, sample)
    tokens = min(cell.token_count, SAMPLE_TOKENS)
    integers = np.ascontiguousarray(segment.integers[:, :tokens])

    def size_bytes(layout: Layout) -> int:
        shape = segment_shape(job, plan.quality, replace(sample, token_count=tokens))
        part = layout if tokens == cell.token_count else tail_layout(layout, tokens)
        size = len(job.video.encode(integers, replace(shape, layout=part)))
        usual = layout.fold > 1 and layout.fold_height == layout.fold_width
        return size if usual else size + size // MARGIN

    found = list(in_order(size_bytes, candidates, worker_count(workers, 64 * 2**20)))
    return candidates[found.index(min(found))]


def _typical_cell(job: Job, numbers: NDArray[Any]) -> Cell:
    """A largest cell from the middle layers, for the first layers are unlike the others."""
    fields = job.grid.fields[numbers]
    size = fields["token_count"] * fields["head_count"]
    largest = numbers[size == size.max()]
    layers = job.grid.fields["layer_index"][largest]
    runs = np.unique(layers)
    middle = largest[layers == runs[len(runs) // 2]]
    return job.grid.cell(int(middle[len(middle) // 2]))


def _add_layouts(
    job: Job,
    plan: TrackPlan,
    group: int,
    layout: Layout | None,
    *,
    chosen: list[Layout],
    numbers: dict[tuple[str, int, int], int],
) -> None:
    """Number the layouts that the group's cells need: ``layout`` and its tails."""
    counts = np.unique(job.grid.fields["token_count"][_cells_of(job, group)])
    for count in counts[::-1]:
        number = NO_LAYOUT
        if layout is not None:
            fitting = layout if count == counts[-1] else tail_layout(layout, int(count))
            if fitting not in chosen:
                chosen.append(fitting)
            number = chosen.index(fitting)
        numbers[plan.name, group, int(count)] = number


def source_layers(job: Job, cell: Cell) -> list[NDArray[Any]]:
    """Views ``[N, H, D]`` of the source tensors of a cell, one per layer."""
    item: GroupTensors = job.cache.groups[cell.group]
    start = cell.token_start - item.group.held(job.cache.token_count)[0]
    tokens = slice(start, start + cell.token_count)
    heads = slice(cell.head_start, cell.head_start + cell.head_count)
    layers = range(cell.layer_index, cell.layer_index + cell.layer_count)
    return [item.layers[layer][tokens, heads] for layer in layers]


def _set_of(job: Job, quality: str, cell: Cell) -> QuantisationSet:
    return job.sets[quality][job.set_numbers[cell.group, cell.layer_index]]


def quantise_cell(job: Job, quality: str, cell: Cell) -> QuantisedSegment:
    """Integers and side block of a cell in a quantised quality."""
    group = job.cache.groups[cell.group].group
    start = cell.token_start - group.held(job.cache.token_count)[0]
    tokens = slice(start, start + cell.token_count)
    layers = range(cell.layer_index, cell.layer_index + cell.layer_count)
    positions = job.first_position + cell.token_start + np.arange(cell.token_count)
    if job.coefficients is not None and job.encoding(quality, cell.group) == TRANSFORMED:
        sources = source_layers(job, cell)
        key = (quality, cell.group)
        return job.coefficients.encode(key, layers, sources, positions, tokens)
    levels = np.stack([job.facts[cell.group, layer].levels[tokens] for layer in layers])
    step = relative_step(quality, group.role)
    exact = np.tile(positions < SINK_TOKENS, (cell.layer_count, 1))
    for number, layer in enumerate(layers):
        exact[number] |= needs_exact_rows(job.facts[cell.group, layer], step)
    return quantise_segment(
        source_layers(job, cell),
        _set_of(job, quality, cell),
        heads=slice(cell.head_start, cell.head_start + cell.head_count),
        levels=levels,
        exact_tokens=exact,
    )


def exact_cell(job: Job, cell: Cell) -> QuantisedSegment:
    """The exact bytes of a cell, uint8 ``[layer, token, head, dim, byte]``."""
    layers = np.stack(source_layers(job, cell))
    raw = np.frombuffer(raw_bytes(layers), np.uint8)
    integers = raw.reshape(*layers.shape, layers.dtype.itemsize)
    return QuantisedSegment(integers, digest(raw.data), integer_sum(integers), b"")


def segment_shape(job: Job, quality: str, cell: Cell) -> SegmentShape:
    """The shape of a cell for its codec, without a layout."""
    group = job.cache.groups[cell.group].group
    exact = job.exact(quality, cell.group)
    order = None
    if not exact:
        order = _set_of(job, quality, cell).order
        if order is not None:
            heads = slice(cell.head_start, cell.head_start + cell.head_count)
            order = order[: cell.layer_count, heads]
    return SegmentShape(
        cell.layer_count,
        cell.token_count,
        cell.head_count,
        group.head_dim,
        group.numpy_dtype.itemsize if exact else 0,
        order,
    )


def encode_cell(job: Job, cell: Cell) -> list[EncodedSegment]:
    """The segments of a cell, one per track plan; integers are made once per quality."""
    made: dict[str, QuantisedSegment] = {}
    result: list[EncodedSegment] = []
    for plan in job.plans:
        exact = job.exact(plan.quality, cell.group)
        key = EXACT if exact else plan.quality
        if key not in made:
            made[key] = exact_cell(job, cell) if exact else quantise_cell(job, key, cell)
        result.append(_encode_segment(job, plan, cell, made[key]))
    return result


def _encode_segment(
    job: Job, plan: TrackPlan, cell: Cell, segment: QuantisedSegment
) -> EncodedSegment:
    codec = job.codecs[plan.name][cell.group]
    shape = segment_shape(job, plan.quality, cell)
    number = NO_LAYOUT
    if codec == "hevc":
        number = job.layout_numbers[plan.name, cell.group, cell.token_count]
        shape = replace(shape, layout=job.layouts[plan.name][number])
    payload = job.codec(codec).encode(segment.integers, shape)
    if codec == "hevc":
        _compare(payload, segment.integers, shape, plan.name)
    exact = job.exact(plan.quality, cell.group)
    return EncodedSegment(
        segment.side,
        payload,
        NO_SET if exact else job.set_numbers[cell.group, cell.layer_index],
        number,
        digest_all((segment.side, payload)),
        segment.integer_digest,
        segment.integer_sum,
    )


def _compare(payload: bytes, integers: Bytes, shape: SegmentShape, name: str) -> None:
    """HEV-7: decode what was encoded, for encoders ignore unknown settings silently."""
    decoded = CODECS["hevc"].decode(payload, shape, f"track {name}, new segment")
    equal = all(
        np.array_equal(found.reshape(shape.tokens, -1), ranked_layer(integers, shape, layer))
        for layer, found in enumerate(decoded.integers)
    )
    if not equal:
        raise InvalidError(
            "segment.integers",
            "the HEVC encoder is not lossless here",
            where=f"track {name}",
            next_step="Write a zstd track, and report the versions that kvformat doctor prints",
        )


def encode_all(job: Job, workers: int | None) -> Iterator[tuple[Cell, list[EncodedSegment]]]:
    """All cells in table order with their segments."""
    cells = iter(job.grid)
    need = working_bytes(job)

    def work(cell: Cell) -> tuple[Cell, list[EncodedSegment]]:
        return cell, encode_cell(job, cell)

    return in_order(work, cells, worker_count(workers, need))


def working_bytes(job: Job) -> int:
    """About how much memory the largest cell takes."""
    worst = 0
    for group in range(len(job.cache.groups)):
        numbers = _cells_of(job, group)
        if not len(numbers):
            continue
        fields = job.grid.fields[numbers]
        cell = job.grid.cell(int(numbers[np.argmax(fields["token_count"] * fields["head_count"])]))
        for plan in job.plans:
            shape = segment_shape(job, plan.quality, cell)
            codec = job.codecs[plan.name][group]
            if codec == "hevc":
                number = job.layout_numbers[plan.name, group, cell.token_count]
                shape = replace(shape, layout=job.layouts[plan.name][number])
            worst = max(worst, CODECS[codec].working_bytes(shape) + 2 * shape.integers_bytes)
    return worst
