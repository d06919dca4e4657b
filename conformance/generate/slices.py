"""A picture of as many slices as HEV-15 leaves room for, and one slice more.

The usual encoder makes at most 15 slices. Here its slices of one row of blocks each are repeated
under new addresses: all samples are 128, which every block predicts where nothing is around it.
"""

# ruff: noqa: E501 - long sentences and tables

from __future__ import annotations

import numpy as np

from conformance.generate.compose import HEVC, QUALITY, Array, Quant, RawGroup, Video, compose
from conformance.generate.core import good
from conformance.generate.faults import fault
from conformance.generate.payload_faults import encode, joined, units
from conformance.generate.suite import Suite
from conformance.generate.uncommon import layout

BLOCK = 16
WIDTH = 144
FEWEST_ROWS = 9
SLICES_AT_THE_LIMIT = 64
SETTINGS = f":ctu={BLOCK}:max-tu-size={BLOCK}:min-cu-size=8:wpp=1:pools=1"


def bits_of(data: bytes) -> str:
    """Binary digits."""
    return "".join(f"{byte:08b}" for byte in data)


def bytes_of(bits: str) -> bytes:
    """Binary digits to bytes, after the bit 1 and zeros that end a slice header."""
    bits += "1"
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8))


def address_bits(rows: int) -> int:
    """Length of slice_segment_address."""
    return (rows * WIDTH // BLOCK - 1).bit_length()


def template() -> tuple[bytes, str, bytes]:
    """NAL header, the bits of a slice header behind the address, and the coded row of blocks."""
    made = units(encode(flat(FEWEST_ROWS), extra=f"{SETTINGS}:slices={FEWEST_ROWS}"))
    first, second = (unit for unit in made[3:5])
    same = 0
    while first[-1 - same] == second[-1 - same]:
        same += 1
    for size in range(same, 0, -1):
        ends = [bits_of(unit[2:-size]).rstrip("0")[:-1] for unit in (first, second)]
        rest = ends[0][3:], ends[1][3 + address_bits(FEWEST_ROWS) :]
        if rest[0] == rest[1] and rest[0]:
            return first[:2], rest[0], first[-size:]
    raise ValueError("the slices of the encoder are not alike")


def flat(rows: int) -> Array:
    """One picture of 128, ``rows`` blocks high."""
    return np.full((1, 3, rows * BLOCK, WIDTH), 128, np.uint8)


def sliced(rows: int) -> bytes:
    """A stream of one picture with a slice for each row of blocks."""
    *sets, _, _, digest = units(encode(flat(rows), extra=f"{SETTINGS}:slices=2"))
    head, rest, blocks = template()
    slices = []
    for row in range(rows):
        place = f"{row * WIDTH // BLOCK:0{address_bits(rows)}b}" if row else ""
        slices.append(head + bytes_of(f"{int(row == 0)}01{place}{rest}") + blocks)
    return joined([*sets, *slices, digest])


def add_cases(suite: Suite) -> None:
    """All of this module."""
    what = "One picture of {} slices, each a row of blocks: with parameter sets and hash {} NAL units, {} are allowed."
    why = "The limit keeps a reader from walking through millions of units; 64 slices a picture are within it."
    for extra, name in ((0, "at-the-limit"), (1, "above-the-limit")):
        rows = SLICES_AT_THE_LIMIT + extra
        stream = suite.stream(f"slices-{name}", lambda rows=rows: sliced(rows))
        shape = (1, 8, 1, 8)
        quant = Quant(np.full(shape, 128, np.uint8), np.float32([1]), np.int16([100]))
        source = np.zeros((*shape, 4), np.uint8)
        group = RawGroup("key", "key", "float32", (0,), source, {QUALITY: quant})
        layouts = [layout("time", 1, (8, 1), (1, 1), (1, 8), height=rows * BLOCK, width=WIDTH)]
        video = Video(layouts, lambda _: 0, lambda *_, stream=stream: stream)
        data = compose([group], 8, [HEVC], video=video).build()
        count = len(units(stream))
        text = what.format(rows, count, 3 + 65)
        if extra:
            fault(
                suite,
                f"units-{name}",
                "HEV-15 HEV-6",
                data,
                "segment.bitstream",
                text,
                why,
                requires=["hevc"],
            )
        else:
            good(
                suite,
                "hev",
                f"units-{name}",
                ["HEV-15", "HEV-5", "HEV-2"],
                data,
                [HEVC],
                text,
                why,
                level="uncommon",
                how="Slices of libx265 under new addresses.",
            )
