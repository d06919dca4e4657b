"""Restoring on a device: the reference in torch operations, and which path is taken.

The arithmetic is that of section 9.4: each torch operation rounds on its own, so nothing is fused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvformat.gpu.dtypes import MAX_FINITE, torch_dtype
from kvformat.gpu.libraries import load_torch
from kvformat.gpu.parameters import Channels
from kvformat.gpu.sources import Source
from kvformat.gpu.targets import Target


@dataclass(frozen=True, slots=True)
class Job:
    """A part of a segment of a quantised group and its place.

    ``layers`` are the segment's layers that the parameters and the target cover, ``tokens`` its
    tokens that the target covers. ``token_scale`` is float32 ``[n, N]`` for all its layers and
    tokens, or None. ``dtype`` is the group's.
    """

    channels: Channels
    token_scale: Any | None
    layers: slice
    tokens: slice
    dtype: str
    target: Target


def restore_reference(source: Source, job: Job) -> None:
    """Restore the tokens of ``source`` that ``job`` wants, with torch operations."""
    torch = load_torch()
    numbers = source.numbers + source.shift
    wanted = (numbers >= job.tokens.start) & (numbers < job.tokens.stop)
    numbers = numbers[wanted].long()
    if not len(numbers):
        return
    offsets = source.token_offsets[wanted].long()[:, None, None]
    limit = MAX_FINITE[job.dtype]
    for index in range(job.layers.stop - job.layers.start):
        layer = job.layers.start + index
        plane = source.planes[layer]
        extent = plane.untyped_storage().nbytes() - plane.storage_offset()
        flat = torch.as_strided(plane, (extent,), (1,), plane.storage_offset())
        q = flat[offsets + job.channels.offsets[index].long()]
        x = (q.to(torch.int32) - job.channels.zero[index]).to(torch.float32)
        x = x * job.channels.scale[index]
        if job.token_scale is not None:
            x = x * job.token_scale[layer, numbers][:, None, None]
        if job.channels.bias is not None:
            x = x + job.channels.bias[index]
        values = x.clamp(-limit, limit).to(torch_dtype(job.dtype))
        job.target.store(index, numbers - job.tokens.start, values)
