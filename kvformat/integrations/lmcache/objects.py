"""Objects of LMCache in a store: what the adapter and the plugin have in common.

Nothing here raises because of the storage or of what it holds.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from kvformat.errors import UsageError
from kvformat.identity import EXACT_LINEAGE, EngineKey, Identity, Lineage, Model
from kvformat.integrations.lmcache.geometry import (
    OWN_SETTINGS,
    Form,
    Geometry,
    as_bytes,
    buffers_of,
    cache_of,
    form_of,
    token_count,
)
from kvformat.integrations.settings import Settings, combined_salt, parse
from kvformat.integrations.torch_arrays import DTYPES, as_bits
from kvformat.profiles import Profile
from kvformat.store import Receipt, View
from kvformat.tracks import EXACT

MOST_VIEWS: Final = 1024
_log = logging.getLogger("kvformat.lmcache")


@dataclass(frozen=True, slots=True)
class Filed:
    """Where an object lies: LMCache's model name, the salt of its tenant, and its key."""

    model: str
    salt: str | None
    key: EngineKey


def settings_of(values: Mapping[str, Any]) -> Settings:
    """Settings of an adapter or plugin; quality ``exact`` unless they say otherwise.

    LMCache does not tell what an object was computed on top of. With a lossy quality it may be
    lossy KV, so that needs ``mixed``, and all that is stored then says so. Raises ``UsageError``.
    """
    found = parse({"quality": EXACT, **values}, OWN_SETTINGS)
    if found.options.quality != EXACT and not found.options.mixed:
        raise UsageError(
            "usage.argument",
            "LMCache does not say what its objects were computed on top of",
            where="quality",
            expected=EXACT,
            found=found.options.quality,
            next_step='Use exact, or allow KV on top of lossy KV with "mixed": true',
        )
    return found


class Objects:
    """Puts, gets and holds. Safe to share between threads."""

    def __init__(self, settings: Settings, geometry: Geometry | None) -> None:
        self.settings, self.geometry = settings, geometry
        self.store = settings.open()
        _check_profile(self.store.profiles.own())
        quality = settings.options.quality
        self._lineage = EXACT_LINEAGE if quality == EXACT else Lineage("lossy", 1, quality)
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
        return self.view(filed, form).put_key(
            filed.key, cache_of(form, buffers), lineage=self._lineage
        )

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


def _check_profile(profile: Profile | None) -> None:
    """Objects of LMCache say nothing of positions: rotated keys cannot be turned back."""
    if profile is not None and any(item.pairs for item in profile.records):
        raise UsageError(
            "usage.argument",
            "this profile is for rotated keys, and LMCache does not say at which positions",
            where="profile",
            next_step="Leave it out, or use vLLM's own connector (kvformat integration vllm)",
        )


def _tensors(form: Form, item: Any) -> list[NDArray[Any]]:
    if form.groups is None:
        return [as_bytes(item.byte_array)]
    return [as_bits(item.get_tensor(number)) for number in range(len(item.get_shapes()))]
