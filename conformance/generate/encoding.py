"""Calls of ``encode`` that must give a file: what a writer must put into it.

Nothing here is taken from a file of the reference: the expected manifest members and digests are
computed from SPEC, and the file that the reference writes is compared with them.
"""

# ruff: noqa: E501 - long sentences and tables

from __future__ import annotations

import numpy as np

from conformance.generate.compose import (
    EXACT,
    EXACT_ZSTD,
    HEVC,
    IDENTITY,
    QUALITY,
    STORED,
    ZSTD,
    RawGroup,
    as_bytes,
    floats,
)
from conformance.generate.encoding_parts import (
    bytes_group,
    every_dtype,
    good,
    pair,
    with_window,
)
from conformance.generate.identity import BOUND, FULL, IDS, IMAGE, MEDIA
from conformance.generate.suite import Suite

SALT = b"a tenant's own salt, 32 bytes lon"
ENGINE = {
    "engine": "an engine",
    "engine_version": None,
    "hash_algorithm": "sha256",
    "key": "00ff",
    "rank": 1,
    "world_size": 2,
}


def add_cases(suite: Suite) -> None:
    """All of this module."""
    _exact(suite)
    _identities(suite)
    _quantised(suite)


def _exact(suite: Suite) -> None:
    digests = (
        "The source digest and the content id follow from the tensors, and the tracks restore them."
    )
    base = "CID-1 CID-2 ARI-8 INT-1"
    for slug, tracks in (
        ("exact-stored", [EXACT]),
        ("exact-zstd", [EXACT_ZSTD]),
        ("exact-stored-and-zstd", [EXACT, EXACT_ZSTD]),
    ):
        good(
            suite,
            slug,
            f"{base} TRK-2",
            pair(10),
            10,
            tracks,
            "Keys and values in bfloat16, ten tokens.",
            digests,
        )
    for slug, tracks in (("every-dtype-stored", [EXACT]), ("every-dtype-zstd", [EXACT_ZSTD])):
        good(
            suite,
            slug,
            f"{base} GRP-7 PUB-1",
            every_dtype(),
            5,
            tracks,
            "Six groups, one of each dtype, with any bytes: NaNs with payloads, infinities, negative zeros.",
            "An exact track keeps bits, and a NaN is no reason to refuse it.",
        )
    part = pair(5)
    for group in part:
        group.head_start, group.heads_total = 4, 8
    good(
        suite,
        "some-of-the-heads",
        f"{base} GRP-3",
        part,
        5,
        [EXACT],
        "Heads 4 and 5 of 8, layers 0, 1 and 3.",
        "Ranks of a tensor-parallel engine write their heads alone.",
    )
    good(
        suite,
        "window-and-state",
        f"{base} LEN-1 GRP-5 GRP-6",
        with_window(),
        10,
        [EXACT],
        "A sliding window and a state beside a whole group; lengths 8 and 10 can be served.",
        "The lengths are those of SPEC: a writer cannot know more.",
        valid_lengths=[8, 10],
    )
    good(
        suite,
        "alignment-and-order",
        f"{base} DAT-2 DAT-5 SEG-1 HDR-9",
        pair(11),
        11,
        [EXACT, EXACT_ZSTD],
        "Wishes: layer-major order, segments of 4 tokens, alignment 4,096.",
        "Padding is zero and every cell has its segment, however the writer cuts.",
        segmentation={"alignment": 4096, "order": "layer-major", "tokens": 4},
    )
    good(
        suite,
        "one-value",
        base,
        [RawGroup("latent", "latent", "float32", (7,), floats("one", (1, 1, 1, 1), "float32"))],
        1,
        [EXACT],
        "One layer, one token, one head, one dim.",
        "The smallest cache there is.",
    )
    good(
        suite,
        "no-tokens",
        base,
        [RawGroup("key", "key", "float16", (0,), np.zeros((1, 0, 1, 2, 2), np.uint8))],
        0,
        [EXACT],
        "No token at all.",
        "The digest of an empty layer is the digest of no bytes.",
        level="uncommon",
    )


def _identities(suite: Suite) -> None:
    odd = [0x3F800000 - 7 * n for n in range(6)]
    rope = [
        {
            "inv_freq": "".join(f"{bits:08x}" for bits in odd),
            "keys_rotated": True,
            "layers": [0, 1, 2],
            "pairing": "half",
            "scaling": "3ff0000000000001",
        }
    ]
    good(
        suite,
        "identity-as-given",
        "IDN-1 IDN-2 IDN-8 CID-2",
        pair(5),
        5,
        [EXACT],
        "An identity with every optional object; the inverse frequencies fit no base frequency.",
        "A writer copies the numbers: recomputed ones differ in the last bits, and the keys then disagree with the queries.",
        identity={**FULL, "kind": "unbound", "layers_total": 8, "rope": rope},
    )
    good(
        suite,
        "engine-key",
        "IDN-4 ENG-1",
        pair(5),
        5,
        [EXACT],
        "A cache of which only an engine's key is known.",
        "It has no chain.",
        identity={**IDENTITY, "kind": "engine_key", "engine_key": ENGINE},
    )
    chained = "TOK-1 TOK-2 TOK-3 TOK-4 TOK-5 TOK-7 IDN-5"
    bind = {"identity": BOUND}
    good(
        suite,
        "chain",
        chained,
        bytes_group(600),
        600,
        [EXACT],
        "600 tokens: three blocks, the last of 88 tokens.",
        "The suite computes the chain from the ids and compares.",
        token_ids=IDS[:600],
        **bind,
    )
    good(
        suite,
        "chain-salted",
        f"{chained} TOK-9",
        bytes_group(300),
        300,
        [EXACT],
        "The chain of a tenant with a salt.",
        "The salt is the key of the chain and must not stand anywhere in the file.",
        token_ids=IDS[:300],
        salt=SALT.hex(),
        **bind,
    )
    good(
        suite,
        "chain-of-a-later-part",
        f"{chained} TOK-14",
        bytes_group(300),
        300,
        [EXACT],
        "Tokens 512 to 811 of a sequence; the ids are those from position 0 on.",
        "The parent is the hash of the block in front.",
        token_ids=IDS[:812],
        first_position=512,
        **bind,
    )
    good(
        suite,
        "chain-with-content",
        f"{chained} TOK-6 TOK-8",
        bytes_group(300),
        300,
        [EXACT],
        "A later part of a sequence with an image before it and others in it.",
        "Spans of the whole sequence enter the chain; the manifest lists those of the part.",
        token_ids=IDS[:556],
        first_position=256,
        content=[
            {**IMAGE, "start": 30},
            *({**span, "start": 300 + int(str(span["start"]))} for span in MEDIA),
        ],
        **bind,
    )
    good(
        suite,
        "chain-that-ends-early",
        f"{chained} TOK-8",
        bytes_group(600),
        600,
        [EXACT],
        "A span without a digest from token 400 on.",
        "The chain stops before its block.",
        token_ids=IDS[:600],
        content=[{**IMAGE, "start": 400, "digest": None}],
        **bind,
    )
    lossy = {"generations": 2, "kind": "lossy", "profile": None, "quality": "small"}
    for slug, source, what in (
        (
            "after-a-lossy-track",
            {"lineage": {"kind": "exact"}, "quality": QUALITY},
            "from a lossy track of an exact source: one generation",
        ),
        (
            "after-two-lossy-tracks",
            {"lineage": lossy, "quality": QUALITY},
            "from a lossy track of a source of two generations: three",
        ),
        (
            "after-an-exact-track",
            {"lineage": lossy, "quality": "exact"},
            "from an exact track of a source of two generations: two, as before",
        ),
    ):
        good(
            suite,
            f"lineage-{slug}",
            "LIN-1 LIN-2",
            pair(5),
            5,
            [EXACT],
            f"The tensors were restored {what}.",
            "Losses add up unseen unless every writer counts them.",
            restored_from=source,
        )


def _quantised(suite: Suite) -> None:
    same = "Nothing is asked of the loss; but all tracks of a quality restore the same bits."
    base = "CID-1 CID-2 SET-4 SID-4"
    for slug, tracks, level in (
        ("quantised-stored", [STORED], "core"),
        ("quantised-two-codecs", [STORED, ZSTD], "core"),
        ("quantised-three-codecs", [HEVC, ZSTD, STORED], "uncommon"),
        ("quantised-and-exact", [ZSTD, EXACT_ZSTD, STORED], "core"),
    ):
        good(
            suite,
            slug,
            f"{base} REC-6",
            pair(40),
            40,
            tracks,
            "Keys and values in bfloat16, forty tokens, in a quality that quantises.",
            same,
            level=level,
        )
    good(
        suite,
        "quantised-beside-exact-groups",
        f"{base} QUA-3 LEN-1",
        [
            *with_window(),
            RawGroup("raw", "indexer", "uint8", (0,), floats("raw", (1, 10, 1, 5), "uint8")),
        ],
        10,
        [STORED],
        "A quality that quantises, a state and a group of opaque bytes.",
        "These two are exact in every quality.",
        valid_lengths=[10],
    )
    flat = pair(9, "float16")
    flat[0].source = np.zeros_like(flat[0].source)
    flat[1].source = as_bytes(np.full((3, 9, 2, 4), -1.5, np.float16))
    good(
        suite,
        "quantised-constant",
        base,
        flat,
        9,
        [STORED],
        "All keys are 0, all values -1.5.",
        "A step of 0 is no scale that the format has.",
    )
