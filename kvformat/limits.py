"""The limits of spec section 12, one frozen dataclass for writer and reader alike."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from kvformat.errors import InvalidError


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds, all inclusive; units are in the names. See spec section 12."""

    integer: int = 2**53 - 1
    manifest_bytes: int = 16 * 2**20
    json_depth: int = 16
    json_values: int = 2**20
    string_bytes: int = 4096
    groups: int = 64
    layers_per_group: int = 4096
    heads: int = 65_536
    head_dim: int = 65_536
    channels: int = 2**20
    qualities: int = 16
    tracks: int = 32
    layouts_per_track: int = 64
    picture_sizes_per_track: int = 4
    picture_side: int = 8192
    picture_side_minimum: int = 144
    frames_per_segment: int = 65_536
    sets_per_quality: int = 2**16
    segments_per_track: int = 2**20
    tokens: int = 2**40
    tokens_per_segment: int = 65_536
    layers_per_segment: int = 3
    token_scales_per_set: int = 256
    side_bytes: int = 256 * 2**20
    stored_bytes_per_segment: int = 512 * 2**20
    decoded_bytes_per_segment: int = 256 * 2**20
    layers_total: int = 65_536

    def check(self, name: str, value: int, where: str) -> int:
        """Return ``value``, or raise ``limit.exceeded`` when it is above the limit ``name``."""
        bound: int = getattr(self, name)
        if value > bound:
            raise InvalidError(
                "limit.exceeded",
                f"{name} is above the limit of the format",
                where=where,
                expected=f"at most {bound}",
                found=value,
            )
        return value


LIMITS: Final = Limits()
LIMIT_NAMES: Final = tuple(field.name for field in fields(Limits))
