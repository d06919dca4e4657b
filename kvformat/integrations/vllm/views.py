"""The store's views of the parts of a model, for each tenant."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from kvformat.groups import Group
from kvformat.identity import Identity
from kvformat.integrations.settings import combined_salt
from kvformat.integrations.vllm.identity import Tenant, for_tenant
from kvformat.integrations.vllm.topology import Part
from kvformat.store import Store, View

MOST_VIEWS: Final = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """What a layer holds for one token and head: role to width, all in ``dtype``."""

    dtype: str
    widths: tuple[tuple[str, int], ...]

    def groups(self, part: Part) -> tuple[Group, ...]:
        """The groups of an artifact that holds a part."""
        return tuple(
            Group(
                name=role,
                role=role,
                dtype=self.dtype,
                layers=tuple(range(*part.layers)),
                heads=part.heads[1] - part.heads[0],
                head_dim=width,
                heads_total=part.heads_total,
                head_start=part.heads[0],
            )
            for role, width in self.widths
        )


class Views:
    """Views by tenant and part; safe to share between threads.

    Without a ``shape``, artifacts are only looked up, not compared with one.
    """

    def __init__(
        self, store: Store, identity: Identity, salt: bytes, shape: Shape | None = None
    ) -> None:
        self.store = store
        self._identity, self._salt, self._shape = identity, salt, shape
        self._lock = threading.Lock()
        self._views: OrderedDict[tuple[Tenant, Part], View] = OrderedDict()

    def get(self, tenant: Tenant, part: Part) -> View:
        """The view of one part for one tenant."""
        key = (tenant, part)
        with self._lock:
            found = self._views.get(key)
            if found is not None:
                self._views.move_to_end(key)
                return found
        made = self.store.view(
            for_tenant(self._identity, tenant),
            salt=combined_salt(self._salt, tenant.salt),
            part=part.label,
            groups=None if self._shape is None else self._shape.groups(part),
        )
        with self._lock:
            self._views[key] = made
            if len(self._views) > MOST_VIEWS:
                self._views.popitem(last=False)
        return made
