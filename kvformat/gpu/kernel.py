"""The same as ``restoring.restore_reference`` and the integer sum in one Triton kernel each.

Results are made as bit patterns with integer operations: no conversion instruction, no flush of
subnormals and no fused multiply-add can change them. A test reads the PTX for that.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import triton
import triton.language as tl

from kvformat.gpu.dtypes import ITEM_BYTES, MAX_FINITE, ROUNDING, Rounding
from kvformat.gpu.restoring import Job
from kvformat.gpu.sources import Source

BLOCK_TOKENS: Final = 16
BLOCK_CHANNELS: Final = 128
OPTIONS: Final = {"enable_fp_fusion": False, "num_warps": 4}
LAUNCH: Final = threading.RLock()
"""One launch at a time: a first one compiles, and the interpreter patches Triton while it runs."""
VARYING: Final = (
    "plane_1", "plane_2", "shift", "samples", "segment_tokens", "first_layer", "out_1", "out_2",
    "token_start", "token_stop",
)  # fmt: skip
"""Numbers that differ from launch to launch: no kernel of its own for each."""
_PLAIN: Final = Rounding(0, 0, 0, 0, 0, 0)


@triton.jit
def _rounded(x, KIND: tl.constexpr, LOWEST: tl.constexpr, MAGIC: tl.constexpr,
             SHIFT: tl.constexpr, OFFSET: tl.constexpr, SIGN_SHIFT: tl.constexpr,
             SIGN: tl.constexpr):  # fmt: skip
    """Bits of finite binary32 in the format: KIND 0 keeps them, 1 is bfloat16, 2 the others."""
    bits = x.to(tl.int32, bitcast=True)
    if KIND == 0:
        return bits
    if KIND == 1:
        return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    magic = tl.maximum(bits & 0x7F800000, LOWEST) + MAGIC
    total = x + magic.to(tl.float32, bitcast=True)
    pattern = tl.abs(total.to(tl.int32, bitcast=True) - magic)
    pattern = pattern + (magic >> SHIFT) - OFFSET
    return pattern | ((bits >> SIGN_SHIFT) & SIGN)


@triton.jit(do_not_specialize=VARYING)
def restore_kernel(plane, plane_1, plane_2, token_offset, number, shift, samples,
                   channel_offset, scale, zero, bias, token_scale, segment_tokens, first_layer,
                   out, out_1, out_2, out_offset, token_start, token_stop, head_stride,
                   dim_stride, channels, DIM: tl.constexpr, SCALED: tl.constexpr,
                   BIASED: tl.constexpr, LIMIT: tl.constexpr, KIND: tl.constexpr,
                   LOWEST: tl.constexpr, MAGIC: tl.constexpr, SHIFT: tl.constexpr,
                   OFFSET: tl.constexpr, SIGN_SHIFT: tl.constexpr, SIGN: tl.constexpr,
                   TOKENS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """Program (i, j, l): a block of samples and channels of layer l of the job."""
    layer = tl.program_id(2)
    j = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = j < samples
    held = c < channels
    token = tl.load(number + j, mask=inside, other=-1) + shift
    wanted = inside & (token >= token_start)
    wanted = wanted & (token < token_stop)
    row = tl.load(out_offset + (token - token_start), mask=wanted, other=-1)
    wanted = wanted & (row >= 0)
    plane_start = tl.where(layer == 0, 0, tl.where(layer == 1, plane_1, plane_2))
    out_start = tl.where(layer == 0, 0, tl.where(layer == 1, out_1, out_2))
    entry = layer * channels + c
    both = wanted[:, None] & held[None, :]
    place = tl.load(token_offset + j, mask=wanted, other=0).to(tl.int64)[:, None]
    place += tl.load(channel_offset + entry, mask=held, other=0)[None, :]
    q = tl.load(plane + plane_start + place, mask=both, other=0).to(tl.int32)
    x = (q - tl.load(zero + entry, mask=held, other=0)[None, :]).to(tl.float32)
    x = x * tl.load(scale + entry, mask=held, other=0.0)[None, :]
    if SCALED:
        index = (first_layer + layer) * segment_tokens + token
        x = x * tl.load(token_scale + index, mask=wanted, other=0.0)[:, None]
    if BIASED:
        x = x + tl.load(bias + entry, mask=held, other=0.0)[None, :]
    x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    bits = _rounded(x, KIND, LOWEST, MAGIC, SHIFT, OFFSET, SIGN_SHIFT, SIGN)
    target = (c // DIM).to(tl.int64) * head_stride + (c % DIM).to(tl.int64) * dim_stride
    target = row[:, None] + target[None, :]
    tl.store(out + out_start + target, bits.to(out.dtype.element_ty), mask=both)


@triton.jit
def _factor(number, FACTOR: tl.constexpr):
    """h of INT-3."""
    mixed = (number * FACTOR) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 15)) | 1


@triton.jit(do_not_specialize=VARYING[:5])
def sum_kernel(plane, plane_1, plane_2, token_offset, number, shift, samples, channel_offset,
               segment_tokens, out, channels, FACTOR: tl.constexpr, ROW: tl.constexpr,
               TOKENS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """Adds the weighted integers of a block of layer l (INT-3) to one word of ``out`` int64."""
    layer = tl.program_id(2)
    j = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = j < samples
    held = c < channels
    token = tl.load(number + j, mask=inside, other=-1) + shift
    wanted = inside & (token < segment_tokens)
    plane_start = tl.where(layer == 0, 0, tl.where(layer == 1, plane_1, plane_2))
    entry = layer * channels + c
    both = wanted[:, None] & held[None, :]
    place = tl.load(token_offset + j, mask=wanted, other=0).to(tl.int64)[:, None]
    place += tl.load(channel_offset + entry, mask=held, other=0)[None, :]
    q = tl.load(plane + plane_start + place, mask=both, other=0).to(tl.int64)
    index = (layer * segment_tokens + token).to(tl.int64)[:, None] * channels + c[None, :]
    weight = _factor(index & (ROW - 1), FACTOR) * _factor((index // ROW) + ROW, FACTOR)
    total = tl.sum(tl.sum(q * weight, axis=1), axis=0)
    word = (layer * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(out + word, tl.load(out + word) + total)


def distances(tensors: tuple[Any, ...]) -> tuple[int, int]:
    """Elements from the first tensor to the second and the third."""
    first = tensors[0].data_ptr()
    size = tensors[0].element_size()
    second, third = [*((item.data_ptr() - first) // size for item in tensors[1:3]), 0, 0][:2]
    return second, third


def constants(dtype: str) -> dict[str, Any]:
    """The compile-time arguments of ``restore_kernel`` that follow from the group's dtype."""
    how = ROUNDING.get(dtype, _PLAIN)
    kind = {"float32": 0, "bfloat16": 1}.get(dtype, 2)
    return {
        "LIMIT": MAX_FINITE[dtype],
        "KIND": kind,
        "LOWEST": how.lowest,
        "MAGIC": how.magic,
        "SHIFT": how.shift,
        "OFFSET": how.offset,
        "SIGN_SHIFT": how.sign_shift,
        "SIGN": how.sign,
    }


def restore_fused(source: Source, job: Job) -> None:
    """``restore_reference`` in one launch; the target has the group's dtype."""
    planes = source.planes[job.layers]
    layers, heads, dim = job.channels.scale.shape
    samples = len(source.numbers)
    target = job.target
    outs = tuple(target.bits(index) for index in range(layers))
    scaled, biased = job.token_scale is not None, job.channels.bias is not None
    grid = (
        triton.cdiv(samples, BLOCK_TOKENS),
        triton.cdiv(heads * dim, BLOCK_CHANNELS),
        layers,
    )
    with LAUNCH:
        restore_kernel[grid](
            planes[0], *distances(planes), source.token_offsets, source.numbers, source.shift,
            samples, job.channels.offsets, job.channels.scale, job.channels.zero,
            job.channels.bias if biased else job.channels.scale,
            job.token_scale if scaled else job.channels.scale,
            job.token_scale.shape[1] if job.token_scale is not None else 0, job.layers.start,
            outs[0], *distances(outs), target.offsets, job.tokens.start, job.tokens.stop,
            target.head_stride, target.dim_stride, heads * dim, DIM=dim, SCALED=scaled,
            BIASED=biased, TOKENS=BLOCK_TOKENS, CHANNELS=BLOCK_CHANNELS, **constants(job.dtype),
            **OPTIONS,
        )  # fmt: skip


def fused_serves(job: Job) -> bool:
    """Whether the kernel can do this job: no conversion, and memory that whole elements divide."""
    size = ITEM_BYTES[job.target.dtype]
    aligned = all(item.data_ptr() % size == 0 for item in job.target.layers)
    return job.target.dtype == job.dtype and aligned
