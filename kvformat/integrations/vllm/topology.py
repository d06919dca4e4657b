"""Which layers and heads each rank of an engine holds, and under which label they are stored.

Pure. A topology is a number of tensor-parallel ranks (TP) and of pipeline stages (PP). Each stores
what it holds under a part label of ``kvformat.store.names.part_name``, so that the labels of any
topology follow from its two numbers, and a rank of another topology knows which parts to read.
Where a head lies on several ranks (TP above the number of KV heads, MLA), the first of them
writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvformat.errors import UsageError
from kvformat.store import part_name
from kvformat.store.names import WHOLE

LayerSplit = Callable[[int, int, int], tuple[int, int]]
"""(layers, stage, stages) to the layers [first, stop) of a stage."""
_TEXT: Final = re.compile(r"tp([1-9][0-9]{0,3})pp([1-9][0-9]{0,3})")


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """Layers [``layers``) and KV heads [``heads``) of a model with so many of them."""

    layers: tuple[int, int]
    heads: tuple[int, int]
    layers_total: int
    heads_total: int

    @property
    def label(self) -> str:
        """Its label in the store."""
        whole = self.layers == (0, self.layers_total) and self.heads == (0, self.heads_total)
        return WHOLE if whole else part_name(self.layers, self.heads)

    def common(self, other: Part) -> Part | None:
        """What two parts share."""
        layers = _overlap(self.layers, other.layers)
        heads = _overlap(self.heads, other.heads)
        if layers is None or heads is None:
            return None
        return Part(layers, heads, self.layers_total, self.heads_total)


@dataclass(frozen=True, slots=True)
class Topology:
    """``tp`` ranks that share the heads, in each of ``pp`` stages that share the layers."""

    tp: int
    pp: int

    def __str__(self) -> str:
        return f"tp{self.tp}pp{self.pp}"


@dataclass(frozen=True, slots=True)
class Model:
    """The whole model's layers and KV heads, and how pipeline stages divide the layers."""

    layers: int
    heads: int
    split: LayerSplit

    def part(self, topology: Topology, tp_rank: int, pp_rank: int) -> Part:
        """What a rank holds; raises ``usage.argument`` where the heads cannot be divided."""
        replicas = self.replicas(topology)
        held = max(self.heads // topology.tp, 1)
        first = tp_rank // replicas * held
        layers = self.split(self.layers, pp_rank, topology.pp)
        return Part(layers, (first, first + held), self.layers, self.heads)

    def replicas(self, topology: Topology) -> int:
        """On how many ranks of a stage each head lies."""
        large, small = max(topology.tp, self.heads), min(topology.tp, self.heads)
        if large % small:
            raise UsageError(
                "usage.argument",
                "the KV heads cannot be divided among the ranks",
                expected="one number a multiple of the other",
                found=f"{self.heads} heads, {topology.tp} ranks",
            )
        return max(topology.tp // self.heads, 1)

    def writes(self, topology: Topology, tp_rank: int) -> bool:
        """Whether this rank is the one that stores its heads."""
        return tp_rank % self.replicas(topology) == 0

    def parts(self, topology: Topology) -> tuple[Part, ...]:
        """All parts of a topology, each once."""
        return tuple(
            dict.fromkeys(
                self.part(topology, tp_rank, pp_rank)
                for pp_rank in range(topology.pp)
                for tp_rank in range(topology.tp)
            )
        )

    def fits(self, topology: Topology) -> bool:
        """Whether the model can be divided so."""
        large, small = max(topology.tp, self.heads), min(topology.tp, self.heads)
        return large % small == 0 and topology.pp <= self.layers


def parse(text: str) -> Topology:
    """From ``tp2pp1``; raises ``usage.argument``."""
    found = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise UsageError(
            "usage.argument", "a topology is not understood", expected="for example tp2pp1",
            found=ascii(text)[:40],
        )  # fmt: skip
    return Topology(int(found[1]), int(found[2]))


def even_split(layers: int, stage: int, stages: int) -> tuple[int, int]:
    """Layers of a stage as vLLM divides them by default: what is left over goes to late stages.

    The last stage, which also computes the output, gets none of it.
    """
    counts = [layers // stages] * stages
    for number in range(layers % stages):
        counts[-(number + 2)] += 1
    first = sum(counts[:stage])
    return first, first + counts[stage]


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | None:
    first, stop = max(one[0], other[0]), min(one[1], other[1])
    return (first, stop) if first < stop else None
