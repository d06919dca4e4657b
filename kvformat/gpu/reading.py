"""Reading into device memory: transfer, decoding and restoring at the same time, layer by layer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import kvformat
from kvformat.artifact import Artifact, choose_track
from kvformat.cancelling import Cancellation
from kvformat.errors import KvformatError, UsageError
from kvformat.fetching import Wish
from kvformat.gpu.engine import Engine
from kvformat.gpu.events import LayerEvents
from kvformat.gpu.placements import Dense, Paged, Pages, Placement, adopt, allocate
from kvformat.profile_shelf import ProfilePlaces
from kvformat.reading import Place, Reading, Request
from kvformat.report import ReadReport
from kvformat.segments import Segment
from kvformat.selection import GroupSelection
from kvformat.storage import Data

if TYPE_CHECKING:
    from kvformat.identity import Lineage

Make = Callable[["DeviceReading"], Placement]


class DeviceReading(Reading[None]):
    """A read whose segments are restored by an ``Engine``."""

    def __init__(
        self,
        artifact: Artifact,
        request: Request,
        engine: Engine,
        cancellation: Cancellation | None,
    ) -> None:
        super().__init__(artifact, with_track(artifact, request, engine), cancellation)
        self.engine = engine
        self.placement: Placement | None = None
        if engine.hardware and engine.pool is not None and "hevc" in self.track.codecs:
            self.workers = engine.pool.sessions

    def _restore(self, wish: Wish, data: Data, place: Place[None]) -> None:
        del place
        placement = self.placement
        if placement is None:
            raise ValueError("the reading has no placement")
        pieces = placement.pieces(wish.record.cell)
        spent = self._attempt(
            wish,
            data,
            lambda context, checked: self.engine.restore(
                context, checked, pieces, check=self._request.check
            ),
        )
        self.clock.worked(spent.decode_s, spent.restore_s)
        if self._switch is not None:
            group = self._artifact.groups[wish.record.cell.group]
            total_s = time.perf_counter() - spent.started_s
            self._switch.worked(wish, wish.record.cell.values(group), total_s)

    def run(self, events: LayerEvents) -> ReadReport:
        """All of it; raises the first error. Layers are announced as they become complete."""
        error: KvformatError | None = None
        try:
            for outcome in self.start(nowhere):
                self.account(outcome)
                if outcome.error is not None:
                    raise outcome.error
                events.done(self.ledger.completed(outcome.wish.record))
        except KvformatError as failed:
            failed.validity = self.ledger.validity()
            error = failed
            raise
        finally:
            self.stop()
            events.close(error)
        return self.report()


def nowhere(wish: Wish, segment: Segment) -> None:
    """The place of segments that were restored already."""
    del wish, segment


def with_track(artifact: Artifact, request: Request, engine: Engine) -> Request:
    """A hardware decoder takes the best track in its codec, unless the caller names one."""
    if request.track is not None or not engine.hardware:
        return request
    found = [item for item in artifact.manifest.tracks if item.codec == "hevc"]
    if not found:
        raise UsageError(
            "usage.selection",
            "no track for the video decoder",
            expected="a track in codec hevc",
            found=", ".join(artifact.tracks),
            next_step="Name a track, or read without a decoder",
        )
    return replace(request, track=choose_track(artifact.manifest, found).name)


@dataclass(frozen=True, slots=True, repr=False)
class DeviceRestored(Mapping[str, Any]):
    """Group name to tensor ``[L, T, H, D]``; ``base`` is ``[2, L, T, H, D]`` where they match."""

    track: str
    groups: dict[str, Any]
    base: Any | None
    lineage: Lineage
    report: ReadReport
    counters: dict[str, Any]

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {list(item.shape)}" for name, item in self.groups.items())
        return f"<kvformat.gpu.DeviceRestored {self.track}: {parts}>"

    def __getitem__(self, name: str) -> Any:
        return self.groups[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def kv(self) -> Any:
        """The one tensor; raises ``usage.selection`` where keys and values do not match."""
        if self.base is None:
            raise UsageError(
                "usage.selection",
                "these groups do not form one tensor [2, layers, tokens, heads, head_dim]",
                next_step="Take the groups one by one",
            )
        return self.base


@contextmanager
def opened(source: Any, profiles: ProfilePlaces = ()) -> Iterator[Artifact]:
    """An artifact that is open already, or one opened for this read."""
    if isinstance(source, Artifact):
        if not isinstance(profiles, tuple) or profiles:
            raise UsageError(
                "usage.argument", "an open artifact has its profiles already",
                next_step="Give them to kvformat.open",
            )  # fmt: skip
        yield source
        return
    with kvformat.open(source, profiles=profiles) as artifact:
        yield artifact


@contextmanager
def engine_for(engine: Engine | None, device: Any, decoder: Any) -> Iterator[Engine]:
    """The caller's engine, or one for this read."""
    if engine is not None:
        if decoder is not None:
            raise UsageError("usage.argument", "an engine has its decoder already", found=decoder)
        yield engine
        return
    with Engine(device, decoder) as made:
        yield made


def read(
    source: Any,
    *,
    device: Any = "cpu",
    decoder: Any = None,
    engine: Engine | None = None,
    dtype: Any = None,
    out: Any = None,
    tokens: Any = None,
    layers: Any = None,
    heads: Any = None,
    roles: Any = None,
    track: Any = None,
    check: bool = False,
    allow_partial: bool = False,
    workers: int | None = None,
    profiles: ProfilePlaces = (),
    cancellation: Cancellation | None = None,
    events: LayerEvents | None = None,
) -> DeviceRestored:
    """Restore a part of an artifact, or of the URL of one, into tensors on ``device``.

    ``decoder`` is ``"software"``, ``"nvdec"`` or ``"nvdec-pynv"``; what it cannot decode is an
    error, never decoded elsewhere. ``out`` are tensors of the caller, ``[2, L, T, H, D]`` or by
    group name; otherwise new ones are made, of ``dtype`` or the groups' own. Values are restored
    exactly (9.4) and converted only then. ``check`` compares the integers too, on the device
    where that decodes. ``profiles``, with a URL, are those of ``kvformat.open``.
    Other arguments and errors are those of ``Artifact.read``; a missing GPU or library is
    ``codec.unavailable``. Returns when the device has finished.
    """
    request = Request(tokens, layers, heads, roles, track, "stored", check, allow_partial, workers)
    with opened(source, profiles) as artifact, engine_for(engine, device, decoder) as ready:
        reading = DeviceReading(artifact, request, ready, cancellation)
        try:
            made, base = destination(reading.wanted, ready, dtype, out)
        except BaseException:
            reading.stop()
            raise
        reading.placement = Dense(reading.wanted, made, ready.tables)
        report = finish(reading, events)
        lineage = artifact.lineage(reading.track)
        counters = ready.counters.to_json()
        return DeviceRestored(reading.track.name, made, base, lineage, report, counters)


def read_beside(artifact: Artifact, *, device: Any, decoder: Any, **arguments: Any) -> Any:
    """``Artifact.read`` with a device: one named decoder alone means the first GPU."""
    if device is None:
        device = "cpu" if decoder == "software" else "cuda:0"
    return read(artifact, device=device, decoder=decoder, **arguments)


def destination(
    wanted: tuple[GroupSelection, ...], engine: Engine, dtype: Any, out: Any
) -> tuple[dict[str, Any], Any | None]:
    """The caller's tensors, or new ones."""
    if out is None:
        return allocate(wanted, engine.device, dtype)
    if dtype is not None:
        raise UsageError("usage.argument", "tensors of the caller have their dtype already")
    return adopt(wanted, out, engine.device), None if isinstance(out, Mapping) else out


def finish(reading: DeviceReading, events: LayerEvents | None) -> ReadReport:
    """Run, and wait for the device."""
    announced = events or LayerEvents(reading.engine.device)
    announced.begin()
    try:
        return reading.run(announced)
    finally:
        announced.synchronise()


def paged(
    artifact: Artifact,
    engine: Engine,
    pages: Pages,
    slots: Any,
    request: Request,
    *,
    cancellation: Cancellation | None,
) -> DeviceReading:
    """A read into pages, prepared."""
    reading = DeviceReading(artifact, request, engine, cancellation)
    try:
        reading.placement = Paged(reading.wanted, reading.tokens, pages, slots, engine.tables)
    except BaseException:
        reading.stop()
        raise
    return reading


def read_paged(
    source: Any,
    pages: Pages,
    slots: Any,
    *,
    device: Any = "cpu",
    decoder: Any = None,
    engine: Engine | None = None,
    tokens: Any = None,
    layers: Any = None,
    heads: Any = None,
    roles: Any = ("key", "value"),
    track: Any = None,
    check: bool = False,
    allow_partial: bool = False,
    workers: int | None = None,
    profiles: ProfilePlaces = (),
    cancellation: Cancellation | None = None,
    events: LayerEvents | None = None,
) -> ReadReport:
    """Restore into the pages of a serving engine, lowest layers first.

    ``slots`` is int64, one slot for each token of the read (block * block size + position), -1 to
    skip it: vLLM's slot mapping, or ``slots_of_blocks``. ``heads`` is the part of this rank under
    tensor parallelism. ``events`` tells when a layer is there. Otherwise as ``read``.
    """
    request = Request(
        tokens, layers, heads, roles, track, "layer-major", check, allow_partial, workers
    )
    with opened(source, profiles) as artifact, engine_for(engine, device, decoder) as ready:
        return finish(
            paged(artifact, ready, pages, slots, request, cancellation=cancellation), events
        )


class Load:
    """A read into pages that runs in a thread of its own: wait for layers, then for ``result``."""

    def __init__(self, run: Callable[[Cancellation, LayerEvents], ReadReport], device: Any) -> None:
        self.events = LayerEvents(device)
        self._cancellation = Cancellation()
        self._report: ReadReport | None = None
        self._error: BaseException | None = None
        self._run = run
        self.events.begin()  # here, where the caller's stream is the current one
        self._thread = threading.Thread(target=self._work, name="kvformat-load", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._report = self._run(self._cancellation, self.events)
        except BaseException as error:  # raised again by result
            self._error = error
            self.events.close(error)

    def wait_layer(self, layer: int, *, stream: Any = None, timeout_s: float | None = None) -> None:
        """See ``LayerEvents.wait``."""
        self.events.wait(layer, stream=stream, timeout_s=timeout_s)

    def cancel(self) -> None:
        """Stop; ``result`` then raises ``usage.argument``."""
        self._cancellation.cancel()

    def result(self) -> ReadReport:
        """Wait for all of it; raises what failed."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._report is None:
            raise RuntimeError("the load ended without a report")
        return self._report


def load_paged(source: Any, pages: Pages, slots: Any, **arguments: Any) -> Load:
    """``read_paged`` in the background, so that an engine can start on the first layer."""
    engine = arguments.get("engine")
    device = arguments.get("device", "cpu") if engine is None else engine.device

    def run(cancellation: Cancellation, events: LayerEvents) -> ReadReport:
        return read_paged(
            source, pages, slots, cancellation=cancellation, events=events, **arguments
        )

    return Load(run, device)
