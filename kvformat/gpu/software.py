"""Decoding on the CPU with PyAV, behind the same interface; also the reference for hardware."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvformat.codecs.bitstream import iter_pictures
from kvformat.gpu.frames import Picture
from kvformat.gpu.libraries import load_torch
from kvformat.workers import cores


class SoftwareDecoder:
    """Pictures on the CPU, copied to ``device``; sizes and counts are checked by the core."""

    name = "software"

    def __init__(self, device: Any) -> None:
        self.device = device
        self.sessions = cores()

    def open(self, width: int, height: int) -> SoftwareSession:
        """A session; it keeps nothing."""
        return SoftwareSession(self.device, width, height)


class SoftwareSession:
    """Decodes on the calling thread."""

    def __init__(self, device: Any, width: int, height: int) -> None:
        self._device, self._size = device, (width, height)

    def decode(self, payload: bytes, frames: int, where: str) -> Iterator[Picture]:
        """See ``Session``."""
        torch = load_torch()
        for index, views in iter_pictures(payload, frames, *self._size, where):
            # One copy gives the planes one pitch and memory that torch may write to.
            planes = torch.from_numpy(np.stack(views))
            yield Picture(index, tuple(planes.to(self._device)))

    def close(self) -> None:
        """Nothing to give back."""
