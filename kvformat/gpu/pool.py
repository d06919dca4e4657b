"""Sessions of one decoder: as many as the device has engines, kept by picture size, counted."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from kvformat.errors import UsageError
from kvformat.gpu.frames import FrameDecoder, Picture, Session

Size = tuple[int, int]


@dataclass(slots=True)
class Counters:
    """What a pool did; ``stalls`` are waits for a session, ``waiting_peak`` the longest queue."""

    opened: int = 0
    closed: int = 0
    segments: int = 0
    frames: int = 0
    frame_bytes: int = 0
    stream_bytes: int = 0
    failures: int = 0
    stalls: int = 0
    stall_s: float = 0.0
    waiting_peak: int = 0
    busy_peak: int = 0

    def to_json(self) -> dict[str, Any]:
        """For reports."""
        return asdict(self)


class DecoderPool:
    """At most ``decoder.sessions`` open sessions. Safe to share between threads.

    A session stays open for the next segment of its picture size; where another size needs its
    place, the one that idled longest is closed.
    """

    def __init__(self, decoder: FrameDecoder, sessions: int | None = None) -> None:
        self.decoder = decoder
        self.sessions = max(1, decoder.sessions if sessions is None else sessions)
        self.counters = Counters()
        self._changed = threading.Condition()
        self._idle: OrderedDict[int, tuple[Size, Session]] = OrderedDict()
        self._busy = 0
        self._waiting = 0
        self._closed = False

    @contextmanager
    def session(self, width: int, height: int) -> Iterator[Session]:
        """A session of this size for one segment; a failed one is not used again."""
        session = self._take((width, height))
        good = False
        try:
            yield session
            good = True
        finally:
            self._give((width, height), session, good)

    def pictures(
        self, payload: bytes, frames: int, size: Size, where: str
    ) -> Generator[Picture, None, None]:
        """Decode one checked payload."""
        with self.session(*size) as session:
            for picture in session.decode(payload, frames, where):
                with self._changed:
                    self.counters.frames += 1
                    self.counters.frame_bytes += 3 * size[0] * size[1]
                yield picture
        with self._changed:
            self.counters.segments += 1
            self.counters.stream_bytes += len(payload)

    def _take(self, size: Size) -> Session:
        with self._changed:
            self._wait()
            self._busy += 1
            self.counters.busy_peak = max(self.counters.busy_peak, self._busy)
            for key in reversed(self._idle):
                if self._idle[key][0] == size:
                    return self._idle.pop(key)[1]
            spare = None
            if self._busy + len(self._idle) > self.sessions:
                spare = self._idle.popitem(last=False)[1][1]
                self.counters.closed += 1
            self.counters.opened += 1
        try:
            if spare is not None:
                spare.close()
            return self.decoder.open(*size)
        except BaseException:
            with self._changed:
                self._busy -= 1
                self.counters.opened -= 1
                self._changed.notify_all()
            raise

    def _wait(self) -> None:
        """Until a session is free; called with the lock held."""
        started = time.perf_counter()
        if self._busy >= self.sessions and not self._closed:
            self.counters.stalls += 1
            self._waiting += 1
            self.counters.waiting_peak = max(self.counters.waiting_peak, self._waiting)
            while self._busy >= self.sessions and not self._closed:
                self._changed.wait()
            self._waiting -= 1
            self.counters.stall_s += time.perf_counter() - started
        if self._closed:
            raise UsageError("usage.argument", "the decoder pool is closed")

    def _give(self, size: Size, session: Session, good: bool) -> None:
        with self._changed:
            self._busy -= 1
            keep = good and not self._closed
            if keep:
                self._idle[id(session)] = (size, session)
            else:
                self.counters.closed += 1
                self.counters.failures += not good
            self._changed.notify_all()
        if not keep:
            session.close()

    def close(self) -> None:
        """Close idle sessions now and busy ones when they are given back; wake who waits."""
        with self._changed:
            self._closed = True
            idle = [session for _, session in self._idle.values()]
            self._idle.clear()
            self.counters.closed += len(idle)
            self._changed.notify_all()
        for session in idle:
            session.close()
