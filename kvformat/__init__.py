"""kvformat: one verified file for an LLM KV cache.

>>> import kvformat
>>> with kvformat.open("prefix.kvf") as artifact:          # doctest: +SKIP
...     kv = artifact.read(tokens=(0, 512)).kv             # [2, L, 512, H, D]
"""

from __future__ import annotations

from kvformat.artifact import Artifact
from kvformat.artifact import open_artifact as open  # noqa: A004 - the name users expect
from kvformat.cache import Cache, GroupTensors, Restored, RestoredGroup
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
from kvformat.manifest import VERSION as FORMAT_VERSION
from kvformat.manifest import Extension, Manifest
from kvformat.tokens import ContentSpan
from kvformat.writer import WriteReport, write

__version__ = "0.9.0"

__all__ = [
    "FORMAT_VERSION",
    "Artifact",
    "Cache",
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
    "Manifest",
    "MismatchError",
    "Model",
    "Reference",
    "Restored",
    "RestoredGroup",
    "Rope",
    "Rotation",
    "ScaleScheme",
    "StorageError",
    "UnsupportedError",
    "UsageError",
    "WriteReport",
    "open",
    "write",
]
