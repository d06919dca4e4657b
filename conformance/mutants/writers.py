"""Mutants of what writes, and of what compares content spans: places that ``encode`` shows."""

from __future__ import annotations

from typing import Final

from conformance.mutants.texts import rows

MUTANTS: Final = (
    *rows(
        "quant",
        (
            "writer-nan-passes",
            "bad = ~np.isfinite(x[token].astype(np.float32))",
            "bad = np.isinf(x[token].astype(np.float32))",
            "a NaN is quantised",
            "enc-*-quantised-nan*",
        ),
    ),
    *rows(
        "drafting",
        (
            "writer-salted-is-false",
            "chain=Chain(held, bool(salt), parent)",
            "chain=Chain(held, False, parent)",
            "a salted chain says that it is none",
            "enc-*-chain-salted",
        ),
        (
            "writer-wrong-parent",
            "parent = hashes[before - 1] if before else None",
            "parent = hashes[0] if before else None",
            "the parent of every later part is the hash of the first block",
            "enc-*-chain-of-a-later-part",
        ),
        (
            "writer-more-ids-than-tokens",
            "if len(ids) != first_position + count:",
            "if len(ids) < first_position + count:",
            "ids behind the last token enter the chain",
            "enc-*-too-many-token-ids",
        ),
    ),
    *rows(
        "writer",
        (
            "writer-lineage-forgotten",
            "lineage=lineage or Lineage(),",
            "lineage=Lineage(),",
            "every source is said to be exact",
            "enc-*-lineage-*",
        ),
    ),
    *rows(
        "encoder",
        (
            "writer-source-digest-backwards",
            "source_digest = digest_all(item for item, _ in measured)",
            "source_digest = digest_all(item for item, _ in reversed(measured))",
            "the source digest takes the layers from the last to the first",
            "enc-*-exact-stored",
        ),
    ),
    *rows(
        "expectations",
        (
            "content-of-the-caller-ignored",
            "content=content,",
            "content=(),",
            "the caller's content spans do not enter the chain",
            "tok-*-expected-content-agrees",
        ),
        (
            "content-before-a-part-ignored",
            "content=before)",
            "content=())",
            "content before a later part does not enter its parent",
            "tok-*-expected-content-of-a-later-part",
        ),
    ),
)
