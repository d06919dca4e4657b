"""BLAKE3 in the three forms that the spec uses: plain, keyed, derived key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

from blake3 import blake3

Buffer: TypeAlias = bytes | bytearray | memoryview

DIGEST_BYTES: Final = 32
CHAIN_CONTEXT: Final = "kvformat 0.9 token chain"


def digest(data: Buffer) -> bytes:
    """BLAKE3 of ``data``, 32 bytes (CNV-4)."""
    return blake3(data).digest()


def digest_all(parts: Iterable[Buffer]) -> bytes:
    """BLAKE3 of the concatenation of ``parts``."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def chain_key(salt: bytes) -> bytes:
    """The key of a tenant's prefix chain (TOK-1)."""
    return blake3(salt, derive_key_context=CHAIN_CONTEXT).digest()


def keyed_digest(key: bytes, data: Buffer) -> bytes:
    """Keyed BLAKE3 of ``data``."""
    return blake3(data, key=key).digest()
