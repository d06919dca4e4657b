"""Every error that kvformat raises, its stable code and its verdict (spec section 14).

::

    KvformatError
    +-- InvalidError        verdict invalid      exit 65   the bytes break the spec
    +-- UnsupportedError    verdict unsupported  exit 69   valid perhaps, but beyond this reader
    +-- MismatchError       verdict mismatch     exit 76   a valid artifact of something else
    +-- StorageError        verdict io_error     exit 74   the storage failed, not the bytes
    +-- UsageError          verdict usage        exit 64   the caller's request or input is wrong

Programs match on ``error.code``; the prose may change in any release. A code is registered in
``spec/registry.md`` and in ``CODES`` here; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from kvformat.validity import Validity

CODES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "invalid": (
            "header.magic",
            "header.check",
            "header.field",
            "file.size",
            "manifest.digest",
            "manifest.json",
            "manifest.duplicate-key",
            "manifest.canonical",
            "manifest.schema",
            "manifest.semantics",
            "table.digest",
            "table.record",
            "set.digest",
            "set.content",
            "segment.digest",
            "segment.side",
            "segment.payload",
            "segment.bitstream",
            "segment.integers",
            "segment.filler",
            "data.padding",
            "data.source",
            "profile.content",
            "limit.exceeded",
        ),
        "unsupported": (
            "version.unknown",
            "feature.unknown",
            "extension.unknown",
            "codec.unavailable",
            "track.none",
            "profile.missing",
        ),
        "mismatch": (
            "identity.field",
            "identity.missing",
            "identity.tokens",
            "tokens.length",
        ),
        "io_error": (
            "io.not-found",
            "io.exists",
            "io.denied",
            "io.read",
            "io.timeout",
            "io.range",
            "io.changed",
            "io.write",
            "io.short",
        ),
        "usage": (
            "usage.argument",
            "usage.selection",
            "input.shape",
            "input.dtype",
            "input.non-finite",
            "input.range",
            "input.identity",
        ),
    }
)

EXIT_CODES: Mapping[str, int] = MappingProxyType(
    {"ok": 0, "usage": 64, "invalid": 65, "unsupported": 69, "io_error": 74, "mismatch": 76}
)


class KvformatError(Exception):
    """Root of all errors of this package.

    ``where`` is a JSON pointer (``/tracks/0/codecs``), a byte offset (``byte 48``) or a named
    place (``track near-lossless/zstd, segment 3``). ``expected`` and ``found`` are short texts.
    ``validity`` is set by reads that fail in the middle: what was restored before.
    ``next_step`` says what the person at the keyboard can do.
    """

    verdict: ClassVar[str] = "invalid"

    def __init__(
        self,
        code: str,
        message: str,
        *,
        where: str = "",
        expected: object = None,
        found: object = None,
        next_step: str = "",
    ) -> None:
        if code not in CODES[self.verdict]:
            raise ValueError(f"unregistered error code {code!r} for verdict {self.verdict}")
        self.code = code
        self.message = message
        self.where = where
        self.expected = None if expected is None else str(expected)
        self.found = None if found is None else str(found)
        self.next_step = next_step
        self.validity: Validity | None = None
        super().__init__(str(self))

    @property
    def exit_code(self) -> int:
        """The process exit status of this verdict (spec section 14)."""
        return EXIT_CODES[self.verdict]

    def __str__(self) -> str:
        text = self.message
        if self.expected is not None:
            text += f"; expected {self.expected}"
            if self.found is not None:
                text += f", found {self.found}"
        elif self.found is not None:
            text += f"; found {self.found}"
        if self.where:
            text += f" (at {self.where})"
        if self.next_step:
            text += f". {self.next_step}"
        return f"[{self.code}] {text}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.as_dict()))

    def as_dict(self) -> dict[str, str | None]:
        """The fields as a JSON-ready mapping, as ``verify --json`` prints them."""
        return {
            "verdict": self.verdict,
            "code": self.code,
            "message": self.message,
            "where": self.where,
            "expected": self.expected,
            "found": self.found,
            "next_step": self.next_step,
        }


def _rebuild(kind: type[KvformatError], fields: dict[str, str | None]) -> KvformatError:
    return kind(
        fields["code"] or "",
        fields["message"] or "",
        where=fields["where"] or "",
        expected=fields["expected"],
        found=fields["found"],
        next_step=fields["next_step"] or "",
    )


class InvalidError(KvformatError):
    """The bytes break a requirement of the spec: the artifact must not be used."""

    verdict = "invalid"


class UnsupportedError(KvformatError):
    """The artifact needs a version, feature, extension or codec that this reader lacks."""

    verdict = "unsupported"


class MismatchError(KvformatError):
    """A valid artifact, but not the KV cache that the caller asked for."""

    verdict = "mismatch"


class StorageError(KvformatError):
    """The storage or the network failed; the bytes may be fine."""

    verdict = "io_error"


class UsageError(KvformatError):
    """The caller's arguments or input arrays cannot be used as they are."""

    verdict = "usage"
