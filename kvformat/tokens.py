"""Tokens of an artifact and the prefix chain that binds them (spec section 6.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvformat.digests import chain_key, keyed_digest
from kvformat.errors import InvalidError, UsageError
from kvformat.fields import Node, schema_error, semantic_error, to_json
from kvformat.identity import Identity

BLOCK_TOKENS: Final = 256
CONTENT_TOKEN_ID: Final = 2**32 - 1


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """Positions that hold an image, audio or embeddings instead of text tokens."""

    start: int
    count: int
    kind: str
    digest: str | None

    @property
    def digest_bytes(self) -> bytes | None:
        """The 32 bytes of the digest: its algorithm does not count."""
        return None if self.digest is None else bytes.fromhex(self.digest.partition(":")[2])

    @staticmethod
    def parse(node: Node) -> ContentSpan:
        """From JSON."""
        m = node.members("count", "digest", "kind", "start")
        return ContentSpan(
            m["start"].integer(),
            m["count"].integer(1),
            m["kind"].name(),
            m["digest"].optional(Node.hash),
        )

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {
            "count": self.count,
            "digest": self.digest,
            "kind": self.kind,
            "start": self.start,
        }


@dataclass(frozen=True, slots=True)
class Chain:
    """The prefix chain (section 6.2): one hash per block of 256 tokens."""

    hashes: tuple[str, ...]
    salted: bool = False
    parent: str | None = None

    @staticmethod
    def parse(node: Node) -> Chain:
        """From JSON."""
        m = node.members("block_tokens", "hashes", "parent", "salted")
        block = m["block_tokens"].integer(1)
        if block != BLOCK_TOKENS:
            raise schema_error("blocks of another size", m["block_tokens"].pointer, 256, block)
        return Chain(
            m["hashes"].each(Node.digest),
            m["salted"].boolean(),
            m["parent"].optional(Node.digest),
        )

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {
            "block_tokens": BLOCK_TOKENS,
            "hashes": list(self.hashes),
            "parent": self.parent,
            "salted": self.salted,
        }


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token count, first position, chain and content spans (section 6.2)."""

    count: int
    first_position: int = 0
    chain: Chain | None = None
    content: tuple[ContentSpan, ...] = ()

    @staticmethod
    def parse(node: Node) -> Tokens:
        """From JSON; raises ``manifest.schema`` or ``manifest.semantics``."""
        m = node.members("chain", "content", "count", "first_position")
        tokens = Tokens(
            m["count"].integer(limit="tokens"),
            m["first_position"].integer(limit="tokens"),
            m["chain"].optional(Chain.parse),
            m["content"].each(ContentSpan.parse),
        )
        tokens.check(node.pointer)
        return tokens

    def check(self, pointer: str = "/tokens") -> None:
        """TOK-5, TOK-7, TOK-8 and the limit of the last position."""
        stop = self.first_position + self.count
        Node(stop, f"{pointer}/first_position").integer(limit="tokens")
        position = self.first_position
        for index, span in enumerate(self.content):
            if span.start < position or span.start + span.count > stop:
                raise semantic_error(
                    "content spans overlap or leave the artifact",
                    f"{pointer}/content/{index}",
                    expected=f"inside [{position}, {stop})",
                    found=f"[{span.start}, {span.start + span.count})",
                )
            position = span.start + span.count
        if self.chain is None:
            return
        if self.first_position % BLOCK_TOKENS:
            raise semantic_error(
                "first_position is not at a block boundary",
                f"{pointer}/first_position",
                found=self.first_position,
            )
        if (self.chain.parent is None) != (self.first_position == 0):
            raise semantic_error(
                "a parent hash and a first position above 0 belong together",
                f"{pointer}/chain/parent",
            )
        expected = self.chained_blocks()
        if len(self.chain.hashes) != expected:
            raise semantic_error(
                "the chain has the wrong number of hashes",
                f"{pointer}/chain/hashes",
                expected=expected,
                found=len(self.chain.hashes),
            )

    def chained_blocks(self) -> int:
        """Number of blocks that have a hash (TOK-5)."""
        blocks = -(-self.count // BLOCK_TOKENS)
        for span in self.content:
            if span.digest is None:
                return min(blocks, (span.start - self.first_position) // BLOCK_TOKENS)
        return blocks

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {
            "chain": to_json(self.chain),
            "content": to_json(self.content),
            "count": self.count,
            "first_position": self.first_position,
        }


def checked_spans(content: object) -> tuple[ContentSpan, ...]:
    """Well-formed content spans of a caller; raises ``usage.argument``."""
    if not isinstance(content, (tuple, list)):
        found = type(content).__name__
        raise UsageError("usage.argument", "content is not a list of spans", found=found)
    spans: list[ContentSpan] = []
    for number, span in enumerate(content):
        where = f"content span {number}"
        if not isinstance(span, ContentSpan):
            found = type(span).__name__
            raise UsageError("usage.argument", "not a ContentSpan", where=where, found=found)
        try:
            spans.append(ContentSpan.parse(Node(span.to_json())))
        except InvalidError as error:
            raise UsageError(
                "usage.argument",
                f"the span is not well-formed: {error.message}",
                where=where + error.where,
                expected=error.expected,
                found=error.found,
            ) from error
    return tuple(spans)


def chain_hashes(
    identity: Identity,
    token_ids: NDArray[np.uint32],
    salt: bytes = b"",
    *,
    parent: str | None = None,
    first_position: int = 0,
    content: tuple[ContentSpan, ...] = (),
) -> tuple[str, ...]:
    """h(1), h(2), ... over ``token_ids`` uint32 ``[T]`` (TOK-1 to TOK-6).

    The chain ends before the first block that shares a position with a span without a digest.
    """
    ids = np.array(token_ids, dtype="<u4", copy=True)
    if (ids == CONTENT_TOKEN_ID).any():
        raise UsageError(
            "usage.argument", "a token id is reserved", expected=f"below {CONTENT_TOKEN_ID}"
        )
    for span in content:
        start = span.start - first_position
        ids[max(start, 0) : max(start + span.count, 0)] = CONTENT_TOKEN_ID
    key = chain_key(salt)
    link = bytes.fromhex(parent) if parent else keyed_digest(key, identity.canonical())
    hashes: list[str] = []
    for start in range(0, len(ids), BLOCK_TOKENS):
        block = ids[start : start + BLOCK_TOKENS]
        begin, end = first_position + start, first_position + start + len(block)
        message = link + len(block).to_bytes(4, "little") + block.tobytes()
        for span in content:
            if span.start < end and span.start + span.count > begin:
                raw = span.digest_bytes
                if raw is None:
                    return tuple(hashes)
                message += raw + span.start.to_bytes(8, "little") + span.count.to_bytes(8, "little")
        link = keyed_digest(key, message)
        hashes.append(link.hex())
    return tuple(hashes)
