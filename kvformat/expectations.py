"""What a caller expects an artifact to be the KV of, and the verdict ``mismatch`` (6.1, 6.2)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvformat.errors import MismatchError, UsageError
from kvformat.identity import Identity
from kvformat.manifest import Manifest
from kvformat.tokens import (
    BLOCK_TOKENS,
    CONTENT_TOKEN_ID,
    ContentSpan,
    Tokens,
    chain_hashes,
    checked_spans,
)


@dataclass(frozen=True, slots=True)
class Expectation:
    """Every field that is not None must agree (TOK-13).

    ``token_ids`` are those of the request from position 0 on, with ``salt`` the tenant's secret;
    they may be more or fewer than the artifact holds (TOK-10, TOK-14). ``content`` are the
    content spans of the request, where it has images, audio or embeddings (TOK-15).
    """

    model: str | None = None
    revision: str | None = None
    weights_digest: str | None = None
    tokenizer: str | None = None
    tokenizer_digest: str | None = None
    adapters: tuple[str, ...] | None = None
    component: str | None = None
    cache_dtype: str | None = None
    rotation: str | None = None
    engine_key: str | None = None
    token_ids: ArrayLike | None = None
    content: tuple[ContentSpan, ...] = ()
    salt: bytes = b""


_PATHS: Final[dict[str, tuple[str, ...]]] = {
    "model": ("model", "id"),
    "revision": ("model", "revision"),
    "weights_digest": ("model", "weights_digest"),
    "tokenizer": ("tokenizer", "id"),
    "tokenizer_digest": ("tokenizer", "digest"),
    "component": ("component",),
    "cache_dtype": ("cache_dtype",),
    "rotation": ("rotation", "name"),
    "engine_key": ("engine_key", "key"),
}


def check_identity(identity: Identity, expected: Expectation) -> None:
    """TOK-13: compare every expected member of the identity object."""
    for name, path in _PATHS.items():
        wanted = getattr(expected, name)
        if wanted is None:
            continue
        found: Any = identity
        for step in path:
            found = getattr(found, step) if found is not None else None
        _compare("/identity/" + "/".join(path), wanted, found)
    if expected.adapters is not None:
        if not isinstance(expected.adapters, (list, tuple)):
            found = type(expected.adapters).__name__
            raise UsageError("usage.argument", "adapters are no list of ids", found=found)
        found_ids = tuple(item.id for item in identity.adapters)
        _compare("/identity/adapters", tuple(expected.adapters), found_ids)


def _compare(pointer: str, wanted: object, found: object) -> None:
    if found is None:
        raise MismatchError(
            "identity.missing",
            "the artifact does not say what was asked for",
            where=pointer,
            expected=wanted,
            next_step="Use a cache whose writer recorded it",
        )
    if wanted != found:
        raise MismatchError(
            "identity.field",
            "this is the cache of something else",
            where=pointer,
            expected=wanted,
            found=found,
            next_step="Do not use it for this request",
        )


def token_array(token_ids: ArrayLike) -> NDArray[np.uint32]:
    """Token ids as uint32 ``[T]``; raises ``usage.argument`` for anything else."""
    try:
        array = np.asarray(token_ids)
    except ValueError:
        raise UsageError("usage.argument", "token ids are not one list") from None
    if array.size == 0:
        array = array.astype(np.uint32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError(
            "usage.argument",
            "token ids are not a list of integers",
            found=f"{array.dtype} {list(array.shape)}",
        )
    wrong = np.flatnonzero((array < 0) | (array >= CONTENT_TOKEN_ID))
    if len(wrong):
        raise UsageError(
            "usage.argument",
            "a token id is out of range",
            where=f"token {int(wrong[0])}",
            expected=f"0 to {CONTENT_TOKEN_ID - 1}",
            found=int(array[wrong[0]]),
        )
    return array.astype(np.uint32)


def verified_length(manifest: Manifest, expected: Expectation) -> int:
    """The verified length of TOK-10, in token ordinals; raises ``identity.missing``/``.tokens``."""
    tokens, chain = manifest.tokens, manifest.tokens.chain
    if chain is None:
        raise MismatchError(
            "identity.missing",
            "the artifact does not say which tokens it holds",
            where="/tokens/chain",
            expected="a prefix chain",
            next_step="Use a cache that was written with its token ids",
        )
    if expected.token_ids is None:
        raise UsageError("usage.argument", "no token ids are given")
    if bool(expected.salt) != chain.salted:
        raise MismatchError(
            "identity.tokens",
            "the chain is salted and no salt is given, or the other way round",
            where="/tokens/chain/salted",
            expected=f"salted: {bool(expected.salt)}",
            found=f"salted: {chain.salted}",
        )
    ids = token_array(expected.token_ids)
    start = tokens.first_position
    content = checked_spans(expected.content)
    before = tuple(span for span in content if span.start < start)
    hashes = chain_hashes(manifest.identity, ids[:start], expected.salt, content=before)
    whole = len(ids) >= start and len(hashes) == start // BLOCK_TOKENS
    if start and (not whole or hashes[-1] != chain.parent):
        raise MismatchError(
            "identity.tokens",
            "the tokens before this artifact are others",
            where="/tokens/chain/parent",
            expected=hashes[-1] if hashes else "a hash",
            found=chain.parent,
        )
    mine = ids[start : start + tokens.count]
    hashes = chain_hashes(
        manifest.identity,
        mine,
        expected.salt,
        parent=chain.parent,
        first_position=start,
        content=content,
    )
    blocks = 0
    for wanted, found in zip(hashes, chain.hashes, strict=False):
        whole = min((blocks + 1) * BLOCK_TOKENS, tokens.count) <= len(mine)
        if wanted != found or not whole:
            break
        blocks += 1
    length = min(blocks * BLOCK_TOKENS, tokens.count, _content_agrees(tokens, expected))
    if length == 0 and tokens.count:
        few = len(mine) < min(BLOCK_TOKENS, tokens.count)
        raise MismatchError(
            "identity.tokens",
            f"only {len(mine)} ids of this part are given: too few to check a block of 256"
            if few
            else "this is the cache of other tokens",
            where="/tokens/chain/hashes/0",
            expected=hashes[0] if hashes else "a hash",
            found=chain.hashes[0] if chain.hashes else "none",
            next_step="Do not use it for this request",
        )
    return length


def _same_content(mine: ContentSpan, other: ContentSpan) -> bool:
    """The same place and digest; algorithm and kind do not count (6.2)."""
    where = (mine.start, mine.count) == (other.start, other.count)
    return where and mine.digest_bytes is not None and mine.digest_bytes == other.digest_bytes


def _content_agrees(tokens: Tokens, expected: Expectation) -> int:
    """Tokens before the first content span on which caller and artifact differ (TOK-15)."""
    stop = tokens.first_position + tokens.count
    theirs = [
        span
        for span in expected.content
        if span.start < stop and span.start + span.count > tokens.first_position
    ]
    pairs = zip_longest(tokens.content, theirs)
    for mine, other in pairs:
        if mine is not None and other is not None and _same_content(mine, other):
            continue
        first = min(span.start for span in (mine, other) if span is not None)
        ordinal = max(first - tokens.first_position, 0)
        return ordinal - ordinal % BLOCK_TOKENS
    return tokens.count


def require_agreement(manifest: Manifest, expected: Expectation, length: int) -> None:
    """Every block of the artifact that the expected ids cover agrees with them."""
    count = manifest.tokens.count
    given = np.size(np.asarray(expected.token_ids)) - manifest.tokens.first_position
    covered = count if given >= count else given - given % BLOCK_TOKENS
    if length < covered:
        raise MismatchError(
            "identity.tokens",
            "the artifact holds other tokens from there on",
            where=f"token {length}",
            expected=f"{covered} tokens that agree with the ids given",
            found=f"{length} tokens",
            next_step="Use only the tokens before, or compute the cache anew",
        )


def require_tokens(length: int, stop: int) -> None:
    """TOK-11: a token at or above the verified length may not be served."""
    if stop > length:
        raise MismatchError(
            "identity.tokens",
            "the artifact holds other tokens from there on, or they cannot be verified",
            where=f"token {length}",
            expected=f"a request that ends at or before token {length}",
            found=stop,
            next_step="Ask for fewer tokens and compute the rest",
        )
