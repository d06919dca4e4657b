"""Transformed groups (section 9.5) on a device: one matrix product per picture and layer.

The sums are whole numbers below 2^24, so a product in binary32 is exact in any order, but not one
in TF32: where that is allowed the product is made in binary64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvformat.gpu.dtypes import MAX_FINITE, torch_dtype
from kvformat.gpu.libraries import load_torch
from kvformat.gpu.parameters import Tables
from kvformat.gpu.sources import Source
from kvformat.gpu.targets import Target
from kvformat.segments import PartOfSegment
from kvformat.transforms import CENTRE, LayerTransform


@dataclass(frozen=True, slots=True)
class DeviceTransform:
    """One layer: ``slots`` ``[C, C]``, ``row_scale`` and ``mean`` ``[C]``, and the rotation.

    ``turns`` are cosine and sine float32 ``[N, n]`` for the segment's tokens, or None.
    """

    slots: Any
    row_scale: Any
    mean: Any
    scale: float
    pairing: str
    turns: tuple[Any, Any] | None


def put_transforms(
    transforms: Sequence[LayerTransform], scales: Any, positions: Any, tables: Tables
) -> tuple[DeviceTransform, ...]:
    """Those of a segment's layers; ``scales`` are the set's, ``positions`` int64 ``[N]``."""
    found = []
    for transform, scale in zip(transforms, scales, strict=True):
        turns, pairing = None, ""
        if transform.rotation is not None:
            pairing = transform.rotation.pairing
            cosine, sine = transform.rotation.table(positions)
            turns = tables.put(cosine), tables.put(sine)
        slots, row_scale, mean = tables.triple(
            transform, (transform.slots, transform.row_scale, transform.mean)
        )
        found.append(DeviceTransform(slots, row_scale, mean, float(scale), pairing, turns))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class TransformJob:
    """A part of a segment; ``offsets`` int32 ``[n, H, D]`` are those of all its samples."""

    transforms: tuple[DeviceTransform, ...]
    offsets: Any
    token_scale: Any | None
    part: PartOfSegment
    dtype: str
    target: Target


def product(u: Any, slots: Any) -> Any:
    """``u @ slots``, exact."""
    torch = load_torch()
    exact = u.device.type == "cpu" or torch.get_float32_matmul_precision() == "highest"
    if exact:
        return u @ slots
    return (u.double() @ slots.double()).float()


def restore_transformed(source: Source, job: TransformJob) -> None:
    """Restore the tokens of ``source`` that ``job`` wants (TRF-6, TRF-7, ARI-4)."""
    torch = load_torch()
    part = job.part
    numbers = source.numbers + source.shift
    wanted = (numbers >= part.tokens.start) & (numbers < part.tokens.stop)
    numbers = numbers[wanted].long()
    if not len(numbers):
        return
    offsets = source.token_offsets[wanted].long()[:, None, None]
    limit = MAX_FINITE[job.dtype]
    for index, layer in enumerate(range(part.layers.start, part.layers.stop)):
        plane, transform = source.planes[layer], job.transforms[layer]
        extent = plane.untyped_storage().nbytes() - plane.storage_offset()
        flat = torch.as_strided(plane, (extent,), (1,), plane.storage_offset())
        q = flat[offsets + job.offsets[layer].long()]
        u = q.transpose(1, 2).reshape(len(q), -1).to(torch.float32) - CENTRE
        z = product(u, transform.slots) * transform.row_scale * transform.scale
        if job.token_scale is not None:
            z = z * job.token_scale[layer, numbers][:, None]
        x = (z + transform.mean).reshape(q.shape)
        if transform.turns is not None:
            x = _turned(x, transform.pairing, *(item[numbers] for item in transform.turns))
        values = x[:, part.heads].clamp(-limit, limit).to(torch_dtype(job.dtype))
        job.target.store(index, numbers - part.tokens.start, values)


def _turned(x: Any, pairing: str, cosine: Any, sine: Any) -> Any:
    """TRF-7, each operation on its own; ``cosine`` and ``sine`` are ``[tokens, n]``."""
    n = cosine.shape[-1]
    cosine, sine = cosine[:, None], sine[:, None]
    turned = x.clone()
    if pairing == "half":
        first, second = slice(0, n), slice(n, 2 * n)
    else:
        first, second = slice(0, 2 * n, 2), slice(1, 2 * n, 2)
    u, v = x[..., first], x[..., second]
    turned[..., first] = u * cosine - v * sine
    turned[..., second] = v * cosine + u * sine
    return turned
