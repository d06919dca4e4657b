"""LMCache: an L2 adapter for its multi-process mode and a storage plugin for the in-process one.

::

    lmcache server --l2-adapter '{
      "type": "plugin", "module_path": "kvformat.integrations.lmcache",
      "class_name": "KvformatL2Adapter", "adapter_params": {"url": "/var/cache/kv"}}'

Neither sees tokens, only keys of LMCache: artifacts have an identity of kind ``engine_key``, and
``kvformat inspect`` says that their tokens are not verified. Both work on one store, but file
under different keys. ``kvformat integration vllm-lmcache`` prints the whole configuration.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

_HOMES: Final = {"KvformatL2Adapter": "l2", "KvformatStoragePlugin": "plugin"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
