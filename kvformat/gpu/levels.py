"""Rewriting the level of a stream: x265 marks lossless streams 8.5, which a decoder may refuse.

The level is one byte of VPS and SPS and means nothing to the decoded samples.
"""

from __future__ import annotations

from typing import Final

from kvformat.codecs.bitstream import parse_nal_units

LEVEL_8_5: Final = 255
LEVEL_6_2: Final = 186
_PLACES: Final = {32: 4 + 11, 33: 1 + 11}
"""NAL unit type to the byte of general_level_idc behind the unit's two header bytes."""


def with_level(payload: bytes, level_idc: int, where: str) -> bytes:
    """``payload`` with this level in its VPS and SPS."""
    out = bytearray()
    done = 0
    for unit in parse_nal_units(payload, where)[:2]:
        place = _PLACES.get(unit.kind)
        if place is None:
            continue
        body = bytearray(payload[unit.start + 2 : unit.stop].replace(b"\0\0\3", b"\0\0"))
        body[place] = level_idc
        out += payload[done : unit.start + 2] + escaped(bytes(body))
        done = unit.stop
    return bytes(out + payload[done:])


def escaped(body: bytes) -> bytes:
    """With emulation prevention."""
    out = bytearray()
    zeros = 0
    for byte in body:
        if zeros >= 2 and byte <= 3:
            out.append(3)
            zeros = 0
        out.append(byte)
        zeros = zeros + 1 if byte == 0 else 0
    return bytes(out)
