"""What the scheduler's half of the connector tells the workers' half in one step. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from kvformat.integrations.vllm.identity import Tenant
from kvformat.integrations.vllm.topology import Part
from kvformat.store import Hit


@dataclass(frozen=True, slots=True)
class PartHit:
    """What is stored of one part of the model."""

    part: Part
    hit: Hit


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load positions [``begin``, ``end``) into ``block_ids``, whole blocks of the engine.

    ``parts`` together hold all layers and heads. ``layerwise`` means that this step's forward
    pass needs them.
    """

    request_id: str
    tenant: Tenant
    parts: tuple[PartHit, ...]
    begin: int
    end: int
    block_ids: tuple[int, ...]
    layerwise: bool


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Store positions [0, len(``token_ids``)), which lie in ``block_ids`` once this step ran.

    Up to ``stored`` the store holds them already. ``lossy`` says that they were computed on top
    of KV that came from a lossy store.
    """

    request_id: str
    tenant: Tenant
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    stored: int
    lossy: bool


@dataclass(frozen=True, slots=True)
class Orders:
    """All of one step. ``waiting`` are finished requests whose blocks wait for their save.

    ``preempted`` requests lose their blocks in this step.
    """

    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    waiting: frozenset[str] = frozenset()
    preempted: frozenset[str] = frozenset()
