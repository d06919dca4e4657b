"""What can happen to a file of an object; ``other`` is that of another object."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import kvformat
from tests.lmcache_engine import LAYERS


def corrupt(path: Path, other: Path) -> None:
    del other
    content = bytearray(path.read_bytes())
    content[-20] ^= 0x10
    path.write_bytes(content)


def truncate(path: Path, other: Path) -> None:
    del other
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path, other: Path) -> None:
    del other
    path.unlink()


def another_key(path: Path, other: Path) -> None:
    path.unlink()
    shutil.copy(other, path)


def another_model(path: Path, other: Path) -> None:
    del other
    with kvformat.open(path) as artifact:
        key, kv = artifact.manifest.identity.engine_key, artifact.read()
    path.unlink()
    identity = kvformat.Identity(
        kvformat.Model("org/other", None), LAYERS, "bfloat16", kind="engine_key", engine_key=key
    )
    kvformat.write(path, kv.kv, identity=identity, tracks=["exact/zstd"])


Damage = Callable[[Path, Path], None]
DAMAGES = [corrupt, truncate, remove, another_key, another_model]
