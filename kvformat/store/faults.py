"""From an error to the reason of a miss or a refusal, and whether the storage is to blame."""

from __future__ import annotations

import errno
from typing import Final

from kvformat.errors import (
    InvalidError,
    KvformatError,
    MismatchError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from kvformat.store.results import Miss, Refusal

PROFILE: Final = ("profile.missing", "profile.content")
TRUNCATED: Final = ("file.size", "io.short")
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
BLAMED: Final = frozenset((Miss.STORAGE, Miss.SLOW, Miss.DENIED))
"""Misses that count as failures of the store for the circuit breaker."""
DAMAGED: Final = frozenset((Miss.CORRUPT, Miss.TRUNCATED))
"""Misses of which the object is the cause: the next writer may replace it."""
_IDENTITY: Final = {"/identity/model": Miss.OTHER_MODEL, "/identity/cache_dtype": Miss.OTHER_DTYPE}


class MissError(Exception):
    """Raised inside the store where the reason is known; never leaves it."""

    def __init__(self, miss: Miss, detail: str) -> None:
        super().__init__(detail)
        self.miss = miss


def miss_of(error: BaseException) -> Miss:
    """Why an extent cannot be served."""
    if isinstance(error, MissError):
        return error.miss
    if not isinstance(error, KvformatError):
        return Miss.STORAGE if isinstance(error, OSError) else Miss.INTERNAL
    code = error.code
    if code in PROFILE:
        return Miss.PROFILE
    if code == "io.not-found":
        return Miss.EVICTED
    if code in TRUNCATED:
        return Miss.TRUNCATED
    if isinstance(error, InvalidError):
        return Miss.CORRUPT
    if isinstance(error, UnsupportedError):
        return Miss.UNKNOWN_VERSION if code == "version.unknown" else Miss.UNSUPPORTED
    if isinstance(error, MismatchError):
        return Miss.OTHER_TOKENS if code in ("identity.tokens", "tokens.length") else (
            Miss.OTHER_IDENTITY
        )  # fmt: skip
    if code == "io.timeout":
        return Miss.SLOW
    if code == "io.denied":
        return Miss.DENIED
    if code == "io.changed":
        return Miss.EVICTED
    return Miss.STORAGE if isinstance(error, StorageError) else Miss.INTERNAL


def refusal_of(error: BaseException) -> Refusal:
    """Why an extent was not stored."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in FULL:
            return Refusal.FULL_DISK
        cause = cause.__cause__
    if isinstance(error, KvformatError) and error.code in PROFILE:
        return Refusal.PROFILE
    if isinstance(error, StorageError):
        return Refusal.PRESENT if error.code == "io.exists" else Refusal.STORAGE
    if isinstance(error, UsageError):
        return Refusal.INPUT
    if isinstance(error, InvalidError):
        return Refusal.INPUT
    return Refusal.STORAGE if isinstance(error, OSError) else Refusal.INTERNAL
