"""Objects of LMCache in a store: what the adapter and the plugin have in common.

Nothing here raises because of the storage or of what it holds.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from kvformat.identity import EngineKey, Identity, Model
from kvformat.integrations.lmcache.geometry import (
    Form,
    Geometry,
    as_bytes,
    buffers_of,
    cache_of,
    form_of,
    token_count,
)
from kvformat.integrations.settings import Settings, combined_salt
from kvformat.integrations.torch_arrays import DTYPES, as_bits
from kvformat.store import Receipt, View

OWN_SETTINGS: Final[dict[str, type | tuple[type, ...]]] = {
    "model_id": str,
    "revision": str,
    "weights_digest": str,
    "hash_algorithm": str,
    "heads": int,
    "head_dim": int,
    "latent": bool,
}
MOST_VIEWS: Final = 1024
_log = logging.getLogger("kvformat.lmcache")


@dataclass(frozen=True, slots=True)
class Filed:
    """Where an object lies: LMCache's model name, the salt of its tenant, and its key."""

    model: str
    salt: str | None
    key: EngineKey


class Objects:
    """Puts, gets and holds. Safe to share between threads."""

    def __init__(self, settings: Settings, geometry: Geometry | None) -> None:
        self.settings, self.geometry = settings, geometry
        self.store = settings.open()
        self._lock = threading.Lock()
        self._views: OrderedDict[tuple[str, str | None, Form], View] = OrderedDict()

    def form(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> Form:
        """The form of objects with tensors of these shapes and torch dtypes."""
        return form_of(shapes, [DTYPES.get(dtype) for dtype in dtypes], self.geometry)

    def form_of_object(self, item: Any) -> Form:
        """The form of a ``MemoryObj``."""
        return self.form(item.get_shapes(), item.get_dtypes())

    def view(self, filed: Filed, form: Form) -> View:
        """The namespace of an object."""
        key = (filed.model, filed.salt, form)
        with self._lock:
            found = self._views.get(key)
            if found is not None:
                self._views.move_to_end(key)
                return found
        own = self.settings.own
        model = Model(
            own.get("model_id") or filed.model, own.get("revision"), own.get("weights_digest")
        )
        made = self.store.view(
            Identity(model, form.layers, form.dtype, kind="engine_key"),
            salt=combined_salt(self.settings.salt, filed.salt),
            part=form.part,
            groups=form.groups,
        )
        with self._lock:
            self._views[key] = made
            if len(self._views) > MOST_VIEWS:
                self._views.popitem(last=False)
        return made

    def put(self, filed: Filed, item: Any) -> Receipt:
        """Copy an object and queue it for the encoder; what it holds may change afterwards."""
        form = self.form_of_object(item)
        buffers = buffers_of(form, _tensors(form, item))
        return self.view(filed, form).put_key(filed.key, cache_of(form, buffers))

    def fill(self, filed: Filed, item: Any) -> bool:
        """Restore into an object; False, and its content undefined, if that is not possible."""
        form = self.form_of_object(item)
        buffers = buffers_of(form, _tensors(form, item))
        report = self.view(filed, form).load_key(filed.key, buffers)
        if report.complete and report.tokens == token_count(buffers):
            return True
        if report.complete and report.tokens:
            _log.warning("an object holds %d rows, not %d", report.tokens, token_count(buffers))
        return False

    def pending(self, filed: Filed, form: Form) -> bool:
        """Whether it waits for the encoder."""
        return self.store.queue.pending(self.view(filed, form).key_name(filed.key).path)

    def stored_bytes(self, filed: Filed, form: Form) -> int | None:
        """The size of the file of an object; None where that cannot be asked for cheaply."""
        place = self.store.backend.locate(self.view(filed, form).key_name(filed.key))
        try:
            return Path(place).stat().st_size
        except OSError:
            return None

    def close(self) -> None:
        """Write what is queued, in ten seconds, and stop."""
        self.store.close()


def _tensors(form: Form, item: Any) -> list[NDArray[Any]]:
    if form.groups is None:
        return [as_bytes(item.byte_array)]
    return [as_bits(item.get_tensor(number)) for number in range(len(item.get_shapes()))]
