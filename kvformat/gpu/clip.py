"""Clips with known samples, and whether a decoder gives them back bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvformat.codecs.bitstream import encode_pictures
from kvformat.errors import KvformatError
from kvformat.gpu.frames import FrameDecoder
from kvformat.gpu.libraries import load_torch


@dataclass(frozen=True, slots=True)
class Clip:
    """A lossless stream and its samples uint8 ``[frames, 3, height, width]``."""

    payload: bytes
    planes: NDArray[np.uint8]

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.planes.shape[3], self.planes.shape[2]

    @property
    def frames(self) -> int:
        """Pictures."""
        return len(self.planes)


def make_clip(width: int, height: int, frames: int, seed: int = 0, spread: float = 6.0) -> Clip:
    """Samples around 128 with this standard deviation, as quantised caches have them."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((frames, 3, height, width), np.float32) * np.float32(spread)
    planes = np.clip(np.rint(noise) + 128, 0, 255).astype(np.uint8)
    return Clip(encode_pictures(planes), planes)


def differs(decoder: FrameDecoder, clip: Clip) -> str:
    """Decode a clip: an empty string, or what was wrong. Raises nothing of this package."""
    torch = load_torch()
    session: Any = None
    try:
        session = decoder.open(*clip.size)
        for picture in session.decode(clip.payload, clip.frames, "clip"):
            expected = torch.from_numpy(clip.planes[picture.index]).to(decoder.device)
            for number, plane in enumerate(picture.planes):
                if not torch.equal(plane, expected[number]):
                    return f"plane {number} of picture {picture.index} has other samples"
    except KvformatError as error:
        return str(error)
    finally:
        if session is not None:
            session.close()
    return ""
