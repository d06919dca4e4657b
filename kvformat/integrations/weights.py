"""A digest of a model's files in a local folder, so that other weights under the same path differ.

Hashing 16 GB takes some seconds. The digest is remembered beside the user's other caches, under
names, sizes and times of the files, so that it is done once per machine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from blake3 import blake3

WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.npz")
_log = logging.getLogger("kvformat.weights")


def folder_digest(folder: str | os.PathLike[str]) -> str | None:
    """``blake3:...`` over names and contents of the weights in a folder or a single file.

    None where there are none, for example for the id of a model on a hub.
    """
    root = Path(folder)
    files = [root] if root.is_file() else sorted({f for p in WEIGHTS for f in root.glob(p)})
    if not files:
        return None
    memory = _memory()
    fingerprint = _fingerprint(files)
    known = _recall(memory, fingerprint)
    if known is None:
        _log.info("hashing %d files of weights in %s", len(files), root)
        known = _hash(files)
        _remember(memory, fingerprint, known)
    return f"blake3:{known}"


def _hash(files: Sequence[Path]) -> str:
    total = blake3()
    for file in files:
        one = blake3(max_threads=blake3.AUTO)
        one.update_mmap(file)
        name = file.name.encode()
        total.update(len(name).to_bytes(4, "little") + name + one.digest())
    return str(total.hexdigest())


def _fingerprint(files: Sequence[Path]) -> str:
    """What tells that the files are those of the last time, without reading them."""
    facts = []
    for file in files:
        info = file.resolve().stat()
        facts.append([str(file.resolve()), info.st_size, info.st_mtime_ns, info.st_ino])
    return str(blake3(json.dumps(facts).encode()).hexdigest())


def _memory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvformat" / "weights"


def _recall(memory: Path, fingerprint: str) -> str | None:
    with contextlib.suppress(OSError, ValueError):
        text = (memory / fingerprint).read_text("ascii").strip()
        return text if len(bytes.fromhex(text)) == 32 else None
    return None


def _remember(memory: Path, fingerprint: str, found: str) -> None:
    """Best effort: a home that cannot be written only costs time."""
    with contextlib.suppress(OSError):
        memory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=memory)
        with os.fdopen(handle, "w") as out:
            out.write(found)
        Path(draft).replace(memory / fingerprint)
