"""Parts of artifacts made by hand, for the fuzzer here and for the generator of the cases.

Nothing here knows how they are put together; ``compose`` does, in either place.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Any, Final, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvconform.judge import canonical

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Json = dict[str, Any]
PER_BYTE: Final = {1: 8, 2: 8, 3: 5, 4: 4, 5: 3, 6: 3, **dict.fromkeys(range(7, 17), 2), 256: 1}
NO_SET: Final = 2**32 - 1
NO_LAYOUT: Final = 2**16 - 1
CHAIN_CONTEXT: Final = "kvformat 0.9 token chain"


def integer_sum(data: bytes) -> int:
    """INT-3, with Python's integers."""
    total = 0
    for start in range(0, len(data), 4096):
        part = data[start : start + 4096]
        total += sum(map(mul, part, COLUMNS)) * factor(4096 + start // 4096)
    return total % 2**64


def factor(n: int) -> int:
    """h of INT-3."""
    z = n * 2_654_435_761 % 2**32
    return (z ^ z >> 15) | 1


COLUMNS: Final = tuple(factor(n) for n in range(4096))


def b3(data: bytes) -> bytes:
    """BLAKE3."""
    return blake3(data).digest()


def noise(seed: str, *shape: int) -> Bytes:
    """Bytes that look random and are the same everywhere."""
    count = int(np.prod(shape))
    return np.frombuffer(blake3(seed.encode()).digest(length=count), np.uint8).reshape(shape)


@dataclass
class Quant:
    """How one quality quantises a group.

    ``q`` are integers ``[L, T, H, D]``; ``scale`` and ``zero`` have shape ``[L]`` or ``[L, H, D]``;
    ``bias`` and ``order`` ``[L, H, D]`` or None; ``index`` ``[L, T]``; ``patches`` maps (layer
    index, token index) to the bytes of a row, ``[H, D * item]`` or ``[H, D, item]``. Integers and
    indices at patches become neutral (SID-4).
    """

    q: Array
    scale: Array
    zero: Array
    bias: Array | None = None
    order: Array | None = None
    token_scale: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    index: Array = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    patches: dict[tuple[int, int], Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Copies integers and indices, and makes them neutral at patches."""
        layers, tokens = self.q.shape[:2]
        self.q = self.q.copy()
        self.index = self.index.copy() if self.index.size else np.zeros((layers, tokens), np.uint8)
        zero = self.zero if self.zero.ndim == 3 else self.zero[:, None, None]
        wide = np.broadcast_to(zero, (layers, *self.q.shape[2:]))
        for layer, token in self.patches:
            self.q[layer, token] = np.clip(wide[layer], 0, 255)
            self.index[layer, token] = 0

    def set_bytes(self, layers: slice) -> bytes:
        """Section 9.2 for a layer run."""
        scale, zero = self.scale[layers], self.zero[layers]
        heads, dims = self.q.shape[2:]
        flags = (scale.ndim == 3) | (zero.ndim == 3) << 1
        flags |= (self.bias is not None) << 2 | (self.order is not None) << 3
        data = struct.pack("<HHIIHH", len(scale), flags, heads, dims, len(self.token_scale), 0)
        data += scale.astype("<f4").tobytes() + zero.astype("<i2").tobytes()
        if self.bias is not None:
            data += self.bias[layers].astype("<f4").tobytes()
        if self.order is not None:
            data += self.order[layers].astype("u1" if dims <= 256 else "<u2").tobytes()
        return data + self.token_scale.astype("<f4").tobytes()

    def side_bytes(self, layers: slice, tokens: slice, heads: slice) -> bytes:
        """Section 9.3 for a segment; tokens are indices of those held."""
        data = self.index[layers, tokens].tobytes() if len(self.token_scale) else b""
        for layer in range(layers.start, layers.stop):
            mine = sorted(
                token
                for number, token in self.patches
                if number == layer and tokens.start <= token < tokens.stop
            )
            data += struct.pack(f"<I{len(mine)}I", len(mine), *(t - tokens.start for t in mine))
            data += b"".join(self.patches[layer, token][heads].tobytes() for token in mine)
        return data


@dataclass(frozen=True)
class Cell:
    """A cell; ``tokens`` are indices of the tokens held, ``start`` is the first ordinal."""

    group: int
    block: int
    layers: slice
    heads: slice
    start: int
    tokens: slice


class Cut(Protocol):
    """What ``cells_of`` must know of a group; ``source`` is ``[L, T, H, D, item]``."""

    layers: tuple[int, ...]
    source: Array
    tokens: Json

    @property
    def run_layers(self) -> int:
        """Layers of a run."""

    @property
    def run_heads(self) -> int:
        """Heads of a run."""


def cells_of(groups: Sequence[Cut], count: int, segment_tokens: int, order: str) -> list[Cell]:
    """Section 7.3."""
    keyed = []
    for number, group in enumerate(groups):
        layers, _, heads = group.source.shape[:3]
        for block, start, stop, first in _blocks(group, count, segment_tokens):
            for i in range(0, layers, group.run_layers):
                for j in range(0, heads, group.run_heads):
                    cell = Cell(
                        number,
                        block,
                        slice(i, min(i + group.run_layers, layers)),
                        slice(j, min(j + group.run_heads, heads)),
                        start,
                        slice(start - first, stop - first),
                    )
                    rest = (group.layers[i], number, j)
                    key = (block, *rest) if order == "token-major" else (*rest, block)
                    keyed.append((key, cell))
    return [cell for _, cell in sorted(keyed, key=lambda pair: pair[0])]


def _blocks(group: Cut, count: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    if group.tokens["kind"] == "state":
        yield -(-count // size), 0, 1, 0
        return
    first = group.tokens.get("held_start", 0)
    for block in range(first // size, -(-count // size)):
        start, stop = max(size * block, first), min(size * (block + 1), count)
        if start < stop:
            yield block, start, stop, first


def rows_of(q: Array, order: Array | None) -> Bytes:
    """Integers ``[layer, token, head, dim]`` to rows ``[layer, rank, head]`` (section 10.3)."""
    ranked = q if order is None else np.take_along_axis(q, order[:, None].astype(np.intp), axis=3)
    return np.ascontiguousarray(ranked.transpose(0, 3, 2, 1)).reshape(-1, q.shape[1])


def exact_rows(source: Bytes) -> Bytes:
    """Bytes ``[layer, token, head, dim, byte]`` to rows ``[layer, byte, dim, head]``."""
    return np.ascontiguousarray(source.transpose(0, 4, 3, 2, 1)).reshape(-1, source.shape[1])


def pack(values: Array, low: int, radix: int) -> Bytes:
    """Section 10.3: ``[rows, tokens]`` to ``[rows, ceil(tokens / p)]``."""
    per_byte = PER_BYTE[radix]
    width = -(-values.shape[1] // per_byte)
    digits = np.zeros((len(values), width * per_byte), np.int64)
    digits[:, : values.shape[1]] = values.astype(np.int64) - low
    weights = radix ** np.arange(per_byte)
    bytes_ = (digits.reshape(len(values), width, per_byte) * weights).sum(axis=-1)
    packed: Bytes = bytes_.astype(np.uint8)
    return packed


def chain_hashes(identity: Json, ids: Sequence[int], salt: bytes, spans: list[Json]) -> list[bytes]:
    """TOK-1 to TOK-6 over a whole sequence, blocks from position 0 on: h(0), h(1), ..."""
    key = blake3(salt, derive_key_context=CHAIN_CONTEXT).digest()
    result = [blake3(canonical(identity), key=key).digest()]
    for start in range(0, len(ids), 256):
        stop = min(start + 256, len(ids))
        message = result[-1] + struct.pack("<I", stop - start)
        for place in range(start, stop):
            inside = any(s["start"] <= place < s["start"] + s["count"] for s in spans)
            message += struct.pack("<I", 2**32 - 1 if inside else int(ids[place]))
        for span in spans:
            if span["start"] < stop and span["start"] + span["count"] > start:
                message += bytes.fromhex(span["digest"].split(":")[1])
                message += struct.pack("<QQ", span["start"], span["count"])
        result.append(blake3(message, key=key).digest())
    return result
