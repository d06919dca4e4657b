"""kvformat: one verified file for an LLM KV cache.

``kvformat.write(url, cache, identity=...)`` makes an artifact, ``kvformat.open(url)`` reads one,
and ``kvformat.verification.verify(url)`` checks all of it. Names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvformat.artifact import Artifact
    from kvformat.artifact import open_artifact as open  # noqa: A004 - the name users expect
    from kvformat.cache import Cache, GroupTensors, Restored, RestoredGroup
    from kvformat.cancelling import Cancellation
    from kvformat.choosing import Auto
    from kvformat.copying import copy
    from kvformat.costs import Link, Rates
    from kvformat.errors import (
        InvalidError,
        KvformatError,
        MismatchError,
        StorageError,
        UnsupportedError,
        UsageError,
    )
    from kvformat.expectations import Expectation
    from kvformat.groups import Extent, Group
    from kvformat.identity import (
        EngineKey,
        Identity,
        Lineage,
        Model,
        Reference,
        Rope,
        Rotation,
        ScaleScheme,
    )
    from kvformat.manifest import Extension, Manifest
    from kvformat.plainload import load_into
    from kvformat.report import ReadReport
    from kvformat.storage import Transport
    from kvformat.streaming import Block, Stream
    from kvformat.tokens import ContentSpan
    from kvformat.validity import Validity
    from kvformat.verification import VerifyReport, verify
    from kvformat.writer import WriteReport, write

__version__ = "0.9.0"
FORMAT_VERSION: Final = "0.9"

_HOMES: Final = {
    "Artifact": "artifact",
    "Auto": "choosing",
    "Block": "streaming",
    "Link": "costs",
    "Rates": "costs",
    "ReadReport": "report",
    "Stream": "streaming",
    "Transport": "storage",
    "Validity": "validity",
    "Cache": "cache",
    "Cancellation": "cancelling",
    "copy": "copying",
    "ContentSpan": "tokens",
    "EngineKey": "identity",
    "Expectation": "expectations",
    "Extension": "manifest",
    "Extent": "groups",
    "Group": "groups",
    "GroupTensors": "cache",
    "Identity": "identity",
    "InvalidError": "errors",
    "KvformatError": "errors",
    "Lineage": "identity",
    "Manifest": "manifest",
    "MismatchError": "errors",
    "Model": "identity",
    "Reference": "identity",
    "Restored": "cache",
    "RestoredGroup": "cache",
    "Rope": "identity",
    "Rotation": "identity",
    "ScaleScheme": "identity",
    "StorageError": "errors",
    "UnsupportedError": "errors",
    "UsageError": "errors",
    "VerifyReport": "verification",
    "WriteReport": "writer",
    "load_into": "plainload",
    "open": "artifact",
    "verify": "verification",
    "write": "writer",
}

__all__ = [
    "FORMAT_VERSION",
    "Artifact",
    "Auto",
    "Block",
    "Cache",
    "Cancellation",
    "ContentSpan",
    "EngineKey",
    "Expectation",
    "Extension",
    "Extent",
    "Group",
    "GroupTensors",
    "Identity",
    "InvalidError",
    "KvformatError",
    "Lineage",
    "Link",
    "Manifest",
    "MismatchError",
    "Model",
    "Rates",
    "ReadReport",
    "Reference",
    "Restored",
    "RestoredGroup",
    "Rope",
    "Rotation",
    "ScaleScheme",
    "StorageError",
    "Stream",
    "Transport",
    "UnsupportedError",
    "UsageError",
    "Validity",
    "VerifyReport",
    "WriteReport",
    "copy",
    "load_into",
    "open",
    "verify",
    "write",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvformat' has no attribute {name!r}")
    module = import_module(f"kvformat.{_HOMES[name]}")
    value = getattr(module, "open_artifact" if name == "open" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
