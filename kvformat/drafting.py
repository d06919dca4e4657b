"""What a writer says of a cache, checked before any long work: identity, tokens, lengths.

Input from callers may hold numpy integers, odd strings or values that JSON has no place for. All of
it goes through the canonical JSON of the spec here, so the manifest that is written is one that a
reader accepts, and every refusal is a ``UsageError``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from kvformat import strictjson
from kvformat.cache import Cache
from kvformat.errors import InvalidError, KvformatError, UsageError
from kvformat.expectations import token_array
from kvformat.fields import Node
from kvformat.identity import Identity
from kvformat.limits import LIMITS
from kvformat.manifest import Extension
from kvformat.tokens import BLOCK_TOKENS, Chain, ContentSpan, Tokens, chain_hashes, checked_spans

T = TypeVar("T")


def plain(value: object, depth: int = 0) -> Any:
    """``value`` with numpy integers and tuples made plain.

    Raises ``input.range`` for what is nested too deeply, ``input.identity`` for other types.
    """
    if depth > LIMITS.json_depth:
        raise UsageError("input.range", "a value is nested too deeply")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, Mapping):
        return {plain(key, depth + 1): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    raise UsageError(
        "input.identity",
        "a value has no place in the manifest",
        expected="text, whole numbers, lists, mappings",
        found=type(value).__name__,
    )


def refusal_code(error: KvformatError) -> str:
    """LIM-1: what a reader would refuse for a limit is ``input.range``."""
    limits = ("limit.exceeded", "input.range")
    return "input.range" if error.code in limits else "input.identity"


def checked(parse: Callable[[Node], T], to_json: Callable[[], Any], pointer: str) -> T:
    """A model object through JSON and back, so that a reader will accept it.

    Raises ``input.range`` for what is above a limit, otherwise ``input.identity``.
    """
    try:
        value = {"value": plain(to_json())}
        return parse(Node(strictjson.parse(strictjson.serialise(value))["value"], pointer))
    except (InvalidError, UsageError) as error:
        raise UsageError(
            refusal_code(error),
            f"this cannot be written: {error.message}",
            where=error.where.replace("manifest ", "").replace("/value", pointer),
            expected=error.expected,
            found=error.found,
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            "input.identity", f"this cannot be written: {error}", where=pointer
        ) from error


def checked_identity(identity: object) -> Identity:
    """The identity with plain values; raises ``input.identity``."""
    if not isinstance(identity, Identity):
        raise UsageError(
            "input.identity",
            "the identity is not a kvformat.Identity",
            found=type(identity).__name__,
            next_step="Write kvformat.Identity(kvformat.Model(...), layers_total=..., ...)",
        )
    return checked(Identity.parse, identity.to_json, "/identity")


def checked_extensions(extensions: Mapping[str, Extension] | None) -> dict[str, Extension]:
    """Extensions with plain values; raises ``input.identity``."""

    def parse(node: Node) -> dict[str, Extension]:
        return {key: Extension.parse(item) for key, item in node.mapping().items()}

    given = dict(extensions or {})
    return checked(
        parse, lambda: {key: item.to_json() for key, item in given.items()}, "/extensions"
    )


def whole_number(value: object, what: str, minimum: int = 0) -> int:
    """An int from an int or numpy integer; raises ``usage.argument``."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= minimum:
        return int(value)
    raise UsageError(
        "usage.argument",
        f"{what} is not a whole number",
        expected=f"at least {minimum}",
        found=ascii(value)[:60],
    )


def make_tokens(
    identity: Identity,
    count: int,
    *,
    token_ids: ArrayLike | None,
    salt: bytes,
    first_position: int,
    content: tuple[ContentSpan, ...],
) -> Tokens:
    """The tokens object with its chain (TOK-1 to TOK-9); raises ``input.identity``."""
    if identity.kind != "tokens":
        if token_ids is not None:
            raise UsageError(
                "input.identity",
                "token ids are given, but the identity is not of kind tokens",
                found=identity.kind,
            )
        if salt:
            raise UsageError(
                "input.identity",
                "a salt is given, but there is no chain to salt",
                found=f"an identity of kind {identity.kind}",
            )
        check_content(content, first_position, first_position + count)
        mine = tuple(span for span in content if span.start >= first_position)
        return Tokens(count, first_position, None, mine)
    if token_ids is None:
        raise UsageError(
            "input.identity",
            "an identity of kind tokens needs the token ids",
            next_step="Give token_ids, or set kind to unbound: readers then cannot verify tokens",
        )
    ids = token_array(token_ids)
    if len(ids) != first_position + count:
        raise UsageError(
            "input.identity",
            "the token ids do not fit the cache",
            expected=f"{first_position + count} ids, from position 0 on",
            found=len(ids),
            next_step="Check the axes too: [2, layers, tokens, heads, head_dim]",
        )
    if first_position % BLOCK_TOKENS:
        raise UsageError(
            "input.identity",
            "the first position is not at a block boundary",
            expected=f"a multiple of {BLOCK_TOKENS}",
            found=first_position,
        )
    check_content(content, first_position, first_position + count)
    hashes = chain_hashes(identity, ids, salt, content=content)
    before = first_position // BLOCK_TOKENS
    if len(hashes) < before:
        raise UsageError(
            "input.identity",
            "the sequence has content without a digest before this part, so no chain reaches it",
            next_step="Give the digest, or use an identity of kind unbound",
        )
    draft = Tokens(
        count,
        first_position,
        None,
        tuple(span for span in content if span.start >= first_position),
    )
    held = hashes[before : before + draft.chained_blocks()]
    parent = hashes[before - 1] if before else None
    return replace(draft, chain=Chain(held, bool(salt), parent))


def check_content(content: tuple[ContentSpan, ...], start: int, stop: int) -> None:
    """Content spans of the whole sequence: well-formed, ascending, none across the part's start."""
    position = 0
    for number, parsed in enumerate(checked_spans(content)):
        end = parsed.start + parsed.count
        if parsed.start < position or end > stop or parsed.start < start < end:
            raise UsageError(
                "input.identity",
                "content spans overlap, cross the first position or leave the sequence",
                where=f"span {number}",
                expected=f"inside [{position}, {stop}), not across {start}",
                found=f"[{parsed.start}, {end})",
            )
        position = end


def make_valid_lengths(cache: Cache, given: Sequence[int] | None) -> tuple[int, ...] | None:
    """The lengths of LEN-1; raises ``usage.argument``."""
    if given is not None and not isinstance(given, (list, tuple, range, np.ndarray)):
        found = type(given).__name__
        raise UsageError("usage.argument", "valid_lengths are no list", found=found)
    if any(item.group.tokens.kind != "all" for item in cache.groups):
        lengths = {whole_number(item, "a valid length") for item in given or ()}
        return tuple(sorted({*lengths, cache.token_count}))
    if given is not None:
        raise UsageError(
            "usage.argument",
            "valid_lengths belong to caches with window or state groups only",
            found=list(given)[:8],
        )
    return None
