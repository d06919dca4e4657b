"""What an operator writes in the configuration of a serving engine, checked.

The same keys for every engine: ``url``, ``salt_env``, and the fields of ``StoreOptions`` under
their own names. Each engine adds its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Final

from blake3 import blake3

from kvformat.errors import UsageError
from kvformat.store import Store, StoreOptions
from kvformat.store import open as open_store

OPTIONS: Final = {item.name: item.default for item in fields(StoreOptions)}
NOT_SETTABLE: Final = ("transport",)
WHOLE_OR_NONE: Final = ("limit_bytes", "encoder_workers", "popular_loads")
SECONDS_OR_NONE: Final = ("load_deadline_s", "lookup_deadline_s")


@dataclass(frozen=True, slots=True)
class Settings:
    """``own`` holds the keys of the engine that were given."""

    url: str
    options: StoreOptions
    salt: bytes
    own: Mapping[str, Any]

    def open(self) -> Store:
        """The store; raises ``UsageError`` and ``StorageError``."""
        return open_store(self.url, self.options)


def parse(values: Mapping[str, Any], own: Mapping[str, type | tuple[type, ...]]) -> Settings:
    """Settings from an engine's configuration; ``own`` names the engine's keys and their types.

    Raises ``usage.argument`` for unknown keys, naming the nearest, and for wrong types. A secret
    salt is never in the configuration, which engines log: ``salt_env`` names the variable of the
    environment that holds it.
    """
    rest = dict(values)
    url = _typed("url", rest.pop("url", None), str)
    salt = _salt(rest.pop("salt_env", None))
    mine = {name: _typed(name, rest.pop(name), own[name]) for name in tuple(own) if name in rest}
    known = [name for name in OPTIONS if name not in NOT_SETTABLE]
    for name in rest:
        if name not in known:
            near = get_close_matches(str(name), [*known, *own, "url", "salt_env"], 1)
            raise UsageError(
                "usage.argument",
                "the configuration has an unknown key",
                where=ascii(name)[:60],
                expected=near[0] if near else ", ".join(["url", "salt_env", *own, *known]),
                found=ascii(name)[:60],
            )
    chosen = {name: _typed(name, value, _option_type(name)) for name, value in rest.items()}
    return Settings(url, StoreOptions(**chosen), salt, mine)


def combined_salt(salt: bytes, own: str | None) -> bytes:
    """The operator's salt and that of a request as one secret; ``salt`` itself without the latter.

    Every pair gives another one, also where one of the two is empty.
    """
    if own is None:
        return salt
    message = len(salt).to_bytes(8, "little") + salt + own.encode()
    return blake3(message, derive_key_context="kvformat request salt").digest()


def _option_type(name: str) -> type | tuple[type, ...]:
    if name in WHOLE_OR_NONE:
        return (int, type(None))
    if name in SECONDS_OR_NONE:
        return (int, float, type(None))
    if name == "storage_options":
        return dict
    if name == "profile":
        return (str, type(None))
    if name == "profiles":
        return list
    kind = type(OPTIONS[name])
    return (int, float) if kind is float else kind


def _typed(name: str, value: Any, kind: type | tuple[type, ...]) -> Any:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
        return value
    names = ["null" if item is type(None) else item.__name__ for item in kinds]
    raise UsageError(
        "usage.argument",
        "a value of the configuration has the wrong type",
        where=name,
        expected=" or ".join(names),
        found=type(value).__name__ if value is not None else "nothing",
        next_step='For example "url": "/var/cache/kv"' if name == "url" else "",
    )


def _salt(variable: object) -> bytes:
    if variable is None:
        return b""
    secret = os.environ.get(str(variable), "")
    if not secret:
        raise UsageError(
            "usage.argument",
            "the variable that should hold the tenant's secret is empty",
            where="salt_env",
            found=ascii(variable)[:60],
            next_step="Set it for all processes of the engine, or leave salt_env out",
        )
    return secret.encode()
