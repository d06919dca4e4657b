"""A store of KV caches for serving engines: artifacts in a directory or object-store prefix.

::

    import kvformat.store

    store = kvformat.store.open("/var/cache/kv", kvformat.store.StoreOptions(limit_bytes=2**40))
    view = store.view(identity, salt=tenant_secret)          # one model, one tenant, one part

    with view.lookup(token_ids) as hit:                      # longest stored prefix; holds it
        report = view.load_into(hit, kv)                     # [2, L, T, H, D], T >= hit.tokens
    # positions [0, report.tokens) are restored and verified; compute the rest
    view.put(kv, token_ids, lineage=report.lineage)          # copies, returns; encoded elsewhere

No method of a view raises because of the storage or of what it holds: every fault is a miss with
a reason, counted and logged. Wrong arguments do raise ``UsageError``.

Models with sliding windows or states (``store.view(windowed=True, window_tokens=...)``): an extent
can end only where the cache that is put holds the whole window and the state, so nothing ends
in front of what a window has dropped, and only prefixes up to such an end are found. Put at the
ends of cells while the prompt is computed; ``View.load`` restores what belongs to an end.

A calibration profile makes what is written smaller (``StoreOptions.profile``); objects name theirs,
and a process that does not have it counts a miss ``profile``.

Names are in ``names``, how prefixes are found in ``lookup``, what is guaranteed where in
``backend``, the fields of all answers in ``results``.
"""

from __future__ import annotations

from kvformat.store.layerwise import BlockStream, PlacedBlock
from kvformat.store.names import Namespace, ObjectName, part_name
from kvformat.store.options import StoreOptions
from kvformat.store.results import (
    ExtentFault,
    ExtentRef,
    Hit,
    LoadReport,
    Miss,
    Receipt,
    Refusal,
)
from kvformat.store.store import Store
from kvformat.store.store import open_store as open  # noqa: A004 - as kvformat.open
from kvformat.store.view import HeldHit, Loaded, View

__all__ = [
    "BlockStream",
    "ExtentFault",
    "ExtentRef",
    "HeldHit",
    "Hit",
    "LoadReport",
    "Loaded",
    "Miss",
    "Namespace",
    "ObjectName",
    "PlacedBlock",
    "Receipt",
    "Refusal",
    "Store",
    "StoreOptions",
    "View",
    "open",
    "part_name",
]
