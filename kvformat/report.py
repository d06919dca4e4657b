"""What a read did and how long each part of it took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvformat.costs import seconds
from kvformat.storage import Traffic
from kvformat.validity import Validity


@dataclass(frozen=True, slots=True)
class ReadReport:
    """One read. Times in seconds on the clock, except as said.

    ``needed_bytes`` are the stored bytes of the segments; ``traffic`` what was really fetched,
    tables and sets included. ``decode_s`` and ``restore_s`` are summed over ``workers``;
    ``wait_s`` is how long the caller waited for results, ``first_block_s`` when the first one was
    there. ``decision`` has the reasons for the track, a line each; ``tracks`` those used.
    """

    tracks: tuple[str, ...]
    segments: int
    needed_bytes: int
    traffic: Traffic
    workers: int
    decode_s: float
    restore_s: float
    wait_s: float
    first_block_s: float | None
    total_s: float
    validity: Validity
    decision: tuple[str, ...] = field(default=())

    @property
    def overlap(self) -> float:
        """Part of the shorter of transfer and work that ran beside the longer: 0 to 1."""
        work_s = (self.decode_s + self.restore_s) / self.workers
        shorter = min(self.traffic.wire_s, work_s)
        if shorter <= 0:
            return 0.0
        saved_s = self.traffic.wire_s + work_s - self.total_s
        return min(max(saved_s / shorter, 0.0), 1.0)

    def to_json(self) -> dict[str, Any]:
        """For logs and ``--json``."""
        return {
            "tracks": list(self.tracks),
            "decision": list(self.decision),
            "segments": self.segments,
            "needed_bytes": self.needed_bytes,
            "received_bytes": self.traffic.received_bytes,
            "requests": self.traffic.requests,
            "retries": self.traffic.retries,
            "transfer_s": self.traffic.wire_s,
            "decode_s": self.decode_s,
            "restore_s": self.restore_s,
            "wait_s": self.wait_s,
            "first_block_s": self.first_block_s,
            "total_s": self.total_s,
            "workers": self.workers,
            "overlap": self.overlap,
            "valid_tokens": [self.validity.tokens[0], self.validity.valid_end],
            "failures": [
                {
                    "track": item.track,
                    "group": item.group,
                    "layers": list(item.layers),
                    "tokens": list(item.tokens),
                    "error": item.error.as_dict(),
                }
                for item in self.validity.failures
            ],
        }

    def __str__(self) -> str:
        begin, end = self.validity.tokens
        text = f"tokens [{begin}, {end}) from {', '.join(self.tracks)} in {seconds(self.total_s)}: "
        text += f"{self.traffic.received_bytes:,} bytes in {self.traffic.requests} requests"
        if self.traffic.retries:
            text += f", {self.traffic.retries} repeated"
        text += (
            f", transfer {seconds(self.traffic.wire_s)}, decode {seconds(self.decode_s)} and "
            f"restore {seconds(self.restore_s)} on {self.workers} workers"
        )
        if not self.validity.complete:
            text += f"; only [{begin}, {self.validity.valid_end}) is valid"
        return text
