"""A device ready to restore: its decoder pool, its tables, and one segment from bytes to memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvformat.closing import ClosedOnExit
from kvformat.codecs.bitstream import check_stream
from kvformat.codecs.registry import CODECS
from kvformat.errors import KvformatError, UnsupportedError, UsageError
from kvformat.gpu.dtypes import ITEM_BYTES, torch_dtype
from kvformat.gpu.frames import FrameDecoder
from kvformat.gpu.libraries import as_device, load_torch, load_triton
from kvformat.gpu.parameters import Tables
from kvformat.gpu.pool import Counters, DecoderPool
from kvformat.gpu.restoring import Job, restore_reference
from kvformat.gpu.sources import Source, array_source, frame_source
from kvformat.gpu.sums import DeviceSum
from kvformat.gpu.targets import Target
from kvformat.gpu.transforming import (
    DeviceTransform,
    TransformJob,
    put_transforms,
    restore_transformed,
)
from kvformat.segments import (
    PartOfSegment,
    Segment,
    SegmentContext,
    check_integers,
    check_stored,
    compare_sum,
    parse_side_block,
)
from kvformat.sets import SideBlock
from kvformat.storage import Data

DECODERS: Final = ("software", "nvdec", "nvdec-pynv")
Restorer = Literal["auto", "torch", "triton"]
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a segment and the memory that it is for."""

    part: PartOfSegment
    target: Target


@dataclass(frozen=True, slots=True)
class Errand:
    """One segment to restore: what its bytes mean, its side block, where its parts go."""

    context: SegmentContext
    side: SideBlock | None
    pieces: Sequence[Piece]
    check: bool


@dataclass(slots=True)
class Spent:
    """Seconds that one segment took, on the host's clock."""

    decode_s: float = 0.0
    restore_s: float = 0.0
    started_s: float = field(default_factory=time.perf_counter)


def make_decoder(name: str, device: Any) -> FrameDecoder:
    """A decoder by name; raises ``usage.argument`` or ``codec.unavailable``."""
    if name == "software":
        from kvformat.gpu.software import SoftwareDecoder

        return SoftwareDecoder(device)
    if name not in DECODERS:
        found = ascii(name)[:60]
        raise UsageError("usage.argument", "unknown decoder", expected=DECODERS, found=found)
    if device.type != "cuda":
        raise UsageError(
            "usage.argument",
            f"the decoder {name} decodes into the memory of an NVIDIA GPU",
            expected="device='cuda:0'",
            found=f"device='{device}'",
        )
    if name == "nvdec":
        from kvformat.gpu.nvdec import NvdecDecoder

        return NvdecDecoder(device)
    from kvformat.gpu.pynv import PynvDecoder

    return PynvDecoder(device)


class Engine(ClosedOnExit):
    """One device with one decoder. Keep it between reads: making decoders is slow.

    ``decoder`` is one of ``DECODERS``, an object with that interface, or None: then only tracks
    without video are read on a GPU, and the CPU decodes for itself. ``restorer`` is ``"torch"``
    for plain operations, ``"triton"`` for the fused kernel; ``"auto"`` takes the kernel on a GPU
    where triton is installed. Safe to share between threads; use it as a context manager.
    """

    def __init__(
        self,
        device: Any = "cpu",
        decoder: str | FrameDecoder | None = None,
        *,
        restorer: Restorer = "auto",
        sessions: int | None = None,
    ) -> None:
        if restorer not in ("auto", "torch", "triton"):
            found = ascii(restorer)[:60]
            raise UsageError("usage.argument", "unknown restorer", found=found)
        self.device = as_device(device)
        if decoder is None and self.device.type == "cpu":
            decoder = "software"
        if isinstance(decoder, str):
            decoder = make_decoder(decoder, self.device)
        self.pool = None if decoder is None else DecoderPool(decoder, sessions)
        self.fused = restorer == "triton" or (
            restorer == "auto" and self.device.type == "cuda" and load_triton() is not None
        )
        if restorer == "triton" and load_triton() is None:
            raise UsageError("usage.argument", "triton is not installed", found=restorer)
        self.tables = Tables(self.device)

    def close(self) -> None:
        """Give back the decoders."""
        if self.pool is not None:
            self.pool.close()

    @property
    def counters(self) -> Counters:
        """Of the decoder pool."""
        return Counters() if self.pool is None else self.pool.counters

    @property
    def hardware(self) -> bool:
        """Whether pictures are decoded by an engine."""
        return self.pool is not None and self.pool.decoder.name != "software"

    def on_device(self) -> Any:
        """A context in which new tensors and kernels are on the device."""
        if self.device.type == "cuda":
            return load_torch().cuda.device(self.device)
        return nullcontext()

    def put(self, array: Array) -> Any:
        """A tensor on the device with the array's bytes and axes; through pinned memory on CUDA."""
        torch = load_torch()
        order = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
        packed = np.ascontiguousarray(array.transpose(order))
        tensor = torch.from_numpy(packed if packed.flags.writeable else packed.copy())
        if self.device.type == "cuda":
            tensor = tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.permute(*np.argsort(order).tolist())

    def put_values(self, array: Array, dtype: str) -> Any:
        """The same for values: their bits, with the torch dtype of the name."""
        kind = {1: np.uint8, 2: np.int16, 4: np.int32}[ITEM_BYTES[dtype]]
        return self.put(np.ascontiguousarray(array).view(kind)).view(torch_dtype(dtype))

    def restore(
        self, context: SegmentContext, data: Data, pieces: Sequence[Piece], *, check: bool
    ) -> Spent:
        """Check stored bytes, decode them and restore ``pieces``, in the order of ORD-3.

        What is queued on the device may not be done when this returns; it is in the order of the
        device's default stream. ``check`` compares the integers too.
        """
        spent = Spent()
        check_stored(context, data)
        errand = Errand(context, parse_side_block(context, data), pieces, check)
        payload = memoryview(data)[context.record.side_bytes :]
        try:
            with self.on_device():
                if context.codec == "hevc":
                    self._pictures(errand, bytes(payload), spent)
                else:
                    self._integers(errand, payload, spent)
        except KvformatError:
            raise
        except Exception as error:  # torch and triton have many, and none says which segment
            raise device_failed(error, context.where) from error
        total_s = time.perf_counter() - spent.started_s
        spent.decode_s = total_s - spent.restore_s
        return spent

    def _pictures(self, errand: Errand, payload: bytes, spent: Spent) -> None:
        """Each picture goes to its place when it comes."""
        context = errand.context
        if self.pool is None:
            raise UsageError(
                "usage.argument",
                "an hevc segment needs a decoder",
                where=context.where,
                expected=", ".join(DECODERS),
                next_step="Name a decoder, or a track of another codec",
            )
        layout = context.layout
        if layout is None:
            raise ValueError("the hevc codec needs a layout")
        size = (layout.width, layout.height)
        check_stream(payload, layout.frames, *size, context.where)
        work = _Work(self, errand, ranked=True)
        with closing(self.pool.pictures(payload, layout.frames, size, context.where)) as pictures:
            for picture in pictures:
                started = time.perf_counter()
                work.take(frame_source(picture.planes, layout, picture.index, self.tables))
                spent.restore_s += time.perf_counter() - started
        started = time.perf_counter()
        work.finish()
        spent.restore_s += time.perf_counter() - started

    def _integers(self, errand: Errand, payload: memoryview, spent: Spent) -> None:
        """The CPU undoes the entropy coding; the integers travel as bytes."""
        context = errand.context
        decoded = CODECS[context.codec].decode(payload, context.shape(), context.where)
        if errand.check:
            check_integers(Segment(context, decoded, errand.side))
        started = time.perf_counter()
        if context.quantisation is None:
            _store_exact(self, context, decoded.integers, errand.pieces)
        else:
            tensor = self.put(decoded.integers)
            work = _Work(self, replace(errand, check=False), ranked=decoded.ranked)
            work.take(array_source(tuple(tensor), self.tables))
            work.finish()
        spent.restore_s += time.perf_counter() - started


def _store_exact(
    engine: Engine, context: SegmentContext, integers: Array, pieces: Iterable[Piece]
) -> None:
    """The bytes of an exact group are its values."""
    torch = load_torch()
    name = context.group.dtype
    for piece in pieces:
        part = piece.part
        values = np.ascontiguousarray(integers[part.layers, part.tokens, part.heads])
        tensor = engine.put_values(values.reshape(*values.shape[:3], -1), name)
        tokens = torch.arange(tensor.shape[1], device=tensor.device)
        for index, layer in enumerate(tensor):
            piece.target.store(index, tokens, layer)


def device_failed(error: Exception, where: str) -> UnsupportedError:
    """An exception of torch or triton: no memory, no compiler, a lost device."""
    said = " ".join(str(error).split())[:200]
    return UnsupportedError(
        "codec.unavailable",
        "restoring on the device failed",
        where=where,
        found=f"{type(error).__name__}: {said}",
        next_step="Free device memory, or try restorer='torch', which compiles nothing",
    )


class _Work:
    """The jobs of one quantised segment."""

    def __init__(self, engine: Engine, errand: Errand, *, ranked: bool) -> None:
        context, side = errand.context, errand.side
        if context.quantisation is None:
            raise ValueError("an exact segment has no parameters")
        self._engine, self._context, self._side = engine, context, side
        self._pieces, self._ranked, self._check = errand.pieces, ranked, errand.check
        self._item = context.quantisation
        self._scale = None
        if side is not None and side.token_index is not None:
            self._scale = engine.put(self._item.token_scale[side.token_index])
        self._jobs: list[Job | TransformJob] | None = None
        self._transforms = self._put_transforms(context)
        self._sum: DeviceSum | None = None

    def take(self, source: Source) -> None:
        """Restore what this source holds."""
        if self._jobs is None:
            self._jobs = [self._job(source, piece) for piece in self._pieces]
            if self._check:
                self._sum = self._new_sum(source)
        for job in self._jobs:
            if isinstance(job, TransformJob):
                restore_transformed(source, job)
                continue
            if self._engine.fused:
                from kvformat.gpu.kernel import fused_serves, restore_fused

                if fused_serves(job):
                    restore_fused(source, job)
                    continue
            restore_reference(source, job)
        if self._sum is not None:
            self._sum.add(source)

    def _put_transforms(self, context: SegmentContext) -> tuple[DeviceTransform, ...] | None:
        if context.transforms is None:
            return None
        cell = context.record.cell
        first = context.first_position + cell.token_start
        positions = np.arange(first, first + cell.token_count)
        tables = self._engine.tables
        return put_transforms(context.transforms, self._item.scale[:, 0, 0], positions, tables)

    def _all_offsets(self, source: Source) -> Any:
        cell = self._context.record.cell
        shape = (cell.layer_count, cell.head_count, self._context.group.head_dim)
        order = self._context.order() if self._ranked else None
        return self._engine.tables.offsets(source.geometry, order, shape)

    def _job(self, source: Source, piece: Piece) -> Job | TransformJob:
        dtype = self._context.group.dtype
        if self._transforms is not None:
            offsets = self._all_offsets(source)
            return TransformJob(
                self._transforms, offsets, self._scale, piece.part, dtype, piece.target
            )
        channels = self._engine.tables.channels(
            self._item, source.geometry, self._context.heads, piece.part, ranked=self._ranked
        )
        part = piece.part
        return Job(channels, self._scale, part.layers, part.tokens, dtype, piece.target)

    def _new_sum(self, source: Source) -> DeviceSum:
        offsets = self._all_offsets(source)
        return DeviceSum(offsets, self._context.record.cell.token_count, fused=self._engine.fused)

    def finish(self) -> None:
        """Patches come last (ARI-5); then the sum is compared."""
        if self._side is not None:
            for piece in self._pieces:
                self._patch(self._side, piece)
        if self._sum is not None:
            compare_sum(self._context, self._sum.value())

    def _patch(self, side: SideBlock, piece: Piece) -> None:
        torch = load_torch()
        part = piece.part
        for index, patches in enumerate(side.patches[part.layers]):
            mine = (patches.ordinals >= part.tokens.start) & (patches.ordinals < part.tokens.stop)
            if not mine.any():
                continue
            rows = self._engine.put_values(
                patches.rows[mine][:, part.heads], self._context.group.dtype
            )
            ordinals = torch.from_numpy(patches.ordinals[mine] - part.tokens.start)
            piece.target.store(index, ordinals.to(rows.device), rows)
