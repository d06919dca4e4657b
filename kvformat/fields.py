"""Typed access to parsed JSON: ``object`` in, trusted values out, a JSON pointer in every error."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvformat.errors import InvalidError
from kvformat.limits import LIMITS

T = TypeVar("T")

NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,47}")
DTYPE_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,47}")
DIGEST: Final = re.compile(r"[0-9a-f]{64}")
HASH: Final = re.compile(r"(?:blake3|sha256):[0-9a-f]{64}")
FLOAT64_BITS: Final = re.compile(r"[0-9a-f]{16}")
FLOAT32_BITS: Final = re.compile(r"[0-9a-f]{8}")
FLOAT32_LIST: Final = re.compile(r"(?:[0-9a-f]{8})+")
TEXT_BYTES: Final = 1024


def schema_error(message: str, where: str, expected: object, found: object) -> InvalidError:
    """A ``manifest.schema`` error with a short form of what was found."""
    shown = ascii(found)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return InvalidError("manifest.schema", message, where=where, expected=expected, found=shown)


def semantic_error(
    message: str, where: str, *, expected: object = None, found: object = None
) -> InvalidError:
    """A ``manifest.semantics`` error."""
    return InvalidError("manifest.semantics", message, where=where, expected=expected, found=found)


def float64_bits(value: float) -> str:
    """Float bits of a binary64 (spec section 2): 16 hexadecimal digits, most significant first."""
    return struct.pack(">d", value).hex()


def float32_bits(value: float) -> str:
    """Float bits of a binary32: 8 hexadecimal digits, most significant first."""
    return struct.pack(">f", value).hex()


def float64_of(bits: str) -> float:
    """Inverse of ``float64_bits``."""
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    return value


def float32_of(bits: str) -> float:
    """Inverse of ``float32_bits``."""
    value: float = struct.unpack(">f", bytes.fromhex(bits))[0]
    return value


@dataclass(frozen=True, slots=True)
class Node:
    """One JSON value and the pointer to it."""

    value: object
    pointer: str = ""

    def members(self, *keys: str) -> dict[str, Node]:
        """The members of an object that has exactly ``keys`` (JSN-11)."""
        value = self.value
        if not isinstance(value, dict):
            raise schema_error("not an object", self.pointer or "/", "an object", value)
        for key in keys:
            if key not in value:
                raise schema_error(
                    f"the member {key!r} is missing", self.pointer or "/", key, sorted(value)
                )
        if len(value) != len(keys):
            unknown = sorted(set(value) - set(keys))
            raise schema_error(
                f"unknown member {unknown[0]!r}", self.pointer or "/", sorted(keys), unknown
            )
        return {key: Node(value[key], f"{self.pointer}/{key}") for key in keys}

    def mapping(self) -> Mapping[str, Node]:
        """The members of an object with free keys."""
        if not isinstance(self.value, dict):
            raise schema_error("not an object", self.pointer, "an object", self.value)
        return {key: Node(item, f"{self.pointer}/{key}") for key, item in self.value.items()}

    def kind(self, *kinds: str) -> str:
        """The member ``kind`` of a tagged union."""
        value = self.value
        if not isinstance(value, dict) or value.get("kind") not in kinds:
            found = value.get("kind") if isinstance(value, dict) else value
            raise schema_error("unknown kind", f"{self.pointer}/kind", " or ".join(kinds), found)
        kind: str = value["kind"]
        return kind

    def items(self, minimum: int = 0) -> tuple[Node, ...]:
        """The elements of a list."""
        value = self.value
        if not isinstance(value, list):
            raise schema_error("not a list", self.pointer, "a list", value)
        if len(value) < minimum:
            raise schema_error("the list is too short", self.pointer, minimum, len(value))
        return tuple(Node(item, f"{self.pointer}/{index}") for index, item in enumerate(value))

    def each(self, parse: Callable[[Node], T], minimum: int = 0) -> tuple[T, ...]:
        """The parsed elements of a list."""
        return tuple(parse(item) for item in self.items(minimum))

    def optional(self, parse: Callable[[Node], T]) -> T | None:
        """None for null, otherwise the parsed value."""
        return None if self.value is None else parse(self)

    def integer(self, minimum: int = 0, limit: str = "integer") -> int:
        """An integer of at least ``minimum`` and at most the named limit; no booleans (JSN-10)."""
        value = self.value
        if type(value) is not int:
            raise schema_error("not an integer", self.pointer, "an integer", value)
        if value < minimum:
            raise schema_error(
                "the integer is too small", self.pointer, f"at least {minimum}", value
            )
        return LIMITS.check(limit, value, self.pointer)

    def boolean(self) -> bool:
        """True or false; no integers (JSN-10)."""
        if type(self.value) is not bool:
            raise schema_error("not a boolean", self.pointer, "true or false", self.value)
        return self.value

    def string(self) -> str:
        """Any string."""
        if type(self.value) is not str:
            raise schema_error("not a string", self.pointer, "a string", self.value)
        return self.value

    def matching(self, pattern: re.Pattern[str]) -> str:
        """A string that the whole of ``pattern`` matches."""
        text = self.string()
        if not pattern.fullmatch(text):
            raise schema_error("the string has the wrong form", self.pointer, pattern.pattern, text)
        return text

    def name(self) -> str:
        """A ``name`` of spec section 5."""
        return self.matching(NAME)

    def digest(self) -> str:
        """A ``digest`` of spec section 5."""
        return self.matching(DIGEST)

    def hash(self) -> str:
        """A ``hash`` of spec section 6.1."""
        return self.matching(HASH)

    def text(self) -> str:
        """A ``text`` of spec section 5: 1 to 1,024 bytes."""
        text = self.string()
        size_bytes = len(text.encode("utf-8"))
        if not 1 <= size_bytes <= TEXT_BYTES:
            raise schema_error(
                "the text has the wrong length",
                self.pointer,
                f"1 to {TEXT_BYTES} bytes",
                size_bytes,
            )
        return text

    def choice(self, *values: str) -> str:
        """One of ``values``."""
        if type(self.value) is not str or self.value not in values:
            raise schema_error("unknown value", self.pointer, " or ".join(values), self.value)
        return self.value


def positive_bits(node: Node, pattern: re.Pattern[str]) -> str:
    """Float bits of one number that is finite and above 0 (IDN-8)."""
    text = node.matching(pattern)
    value = float64_of(text) if pattern is FLOAT64_BITS else float32_of(text)
    if not 0 < value < float("inf"):
        raise schema_error("the number is not finite and above 0", node.pointer, "above 0", value)
    return text


def frequency_bits(node: Node) -> str:
    """Concatenated float bits of numbers that are finite and at least +0 (IDN-8)."""
    text = node.matching(FLOAT32_LIST)
    values = float32_list(text)
    if not all(0 <= value < math.inf and math.copysign(1, value) > 0 for value in values):
        where = node.pointer
        raise schema_error("a frequency is negative or not finite", where, "at least +0", text)
    return text


def float32_list(bits: str) -> tuple[float, ...]:
    """The numbers behind concatenated float bits of binary32."""
    return struct.unpack(f">{len(bits) // 8}f", bytes.fromhex(bits))


def to_json(value: Any) -> Any:
    """The JSON form of a model object, a tuple of them, or a plain value."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    return value
