"""Valid artifacts with transformed groups (spec 9.5), for readers that know the feature."""

# ruff: noqa: E501 - long sentences and tables

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.generate.compose import EXACT, EXACT_ZSTD, QUALITY, STORED, ZSTD, compose
from conformance.generate.core import HAND
from conformance.generate.suite import Case, Operation, Suite, decode, inspect, verify
from conformance.generate.transform_parts import (
    FEATURE,
    PROFILE,
    TURNS,
    attach,
    groups,
    identity,
    parts,
    transform,
    transforms,
)
from tests.transformed import profile_file

GIVEN = ("--profile", PROFILE)
RULES = "TRF-1 TRF-6 TRF-7"
NO_SCALES = np.zeros(0, np.float32)


def restored(tracks: tuple[str, ...], *more: Operation) -> list[Operation]:
    """Verified without the profile, and every track with it."""
    return [verify(), *(decode(track, *GIVEN) for track in tracks), *more]


def add_cases(suite: Suite) -> None:
    """All of this module."""
    both = (STORED, ZSTD)

    def case(
        slug: str,
        requirements: str,
        what: str,
        why: str,
        *,
        tracks: tuple[str, ...] = both,
        operations: list[Operation] | None = None,
        made: tuple[bytes, bytes] | None = None,
        **options: Any,
    ) -> None:
        builder_file = made
        if builder_file is None:
            builder, profile = parts(tracks, **options)
            builder_file = builder.build(), profile
        zstd = ("zstd",) if any(track.endswith("zstd") for track in tracks) else ()
        suite.add(
            Case(
                "trf",
                slug,
                "core",
                tuple(requirements.split()),
                builder_file[0],
                restored(tracks) if operations is None else operations,
                what,
                why,
                HAND,
                (*zstd, f"feature:{FEATURE}"),
                files={PROFILE: builder_file[1]},
            )
        )

    case(
        "half",
        f"{RULES} TRF-3 TRF-5 PRF-1 ARI-3 ARI-4 ARI-5",
        "Keys rotated in pairs (i, i + n) and values that are not, with token scales and patches.",
        "Slots count dims before heads, channels heads before dims, and patches are values.",
    )
    case(
        "interleaved",
        RULES,
        "Keys rotated in pairs (2 i, 2 i + 1).",
        "The pairing decides which dims turn together.",
        pairing="interleaved",
    )
    for pairing in ("half", "interleaved"):
        case(
            f"one-pair-{pairing}",
            RULES,
            f"One pair of four dims turns, with the pairing `{pairing}`.",
            "Partial rotary embeddings leave the last dims alone.",
            pairing=pairing,
            pairs=1,
        )
    case(
        "no-rotation",
        "TRF-6 TRF-5",
        "No transform has pairs, and the identity describes no rotary embedding.",
        "The product alone, with the mean added last.",
        pairing="none",
        pairs=0,
    )
    case(
        "no-token-scales",
        f"{RULES} ARI-3",
        "Neither token scales nor patches.",
        "The third multiplication is left out, not done with 1.",
        scales=NO_SCALES,
        patches=(),
    )
    for slug, first, what in (
        ("above-2-24", 2**24 + 256, "first_position is 2^24 + 256"),
        ("at-the-end", 2**40 - 10, "first_position + T is 2^40"),
        ("later", 4_352, "first_position is 4,352"),
    ):
        case(
            f"position-{slug}",
            RULES,
            f"An artifact whose {what}.",
            "The angle is found by binary powers in binary64: a cosine of a product is another number.",
            first_position=first,
        )
    case(
        "window",
        f"{RULES} GRP-5",
        "Keys of a window that begins with ordinal 3, and first_position 300.",
        "The position is that of the token, not of the first token held.",
        window=True,
        first_position=300,
    )
    case(
        "slices",
        f"{RULES} TRF-2 PAR-1",
        "Parts of tokens, layers and heads.",
        "A part of the heads needs the integers of all of them.",
        operations=[
            *(
                decode(track, *GIVEN, "--tokens", part)
                for track in both
                for part in ("5:7", "9:10")
            ),
            *(decode(STORED, *GIVEN, "--heads", part) for part in ("0:1", "1:2")),
            decode(ZSTD, *GIVEN, "--layers", "3:5"),
            decode(ZSTD, *GIVEN, "--layers", "3:4", "--tokens", "1:8", "--heads", "1:2"),
        ],
    )
    case(
        "beside-exact",
        f"{RULES} TRF-4 PRF-3",
        "Transformed, and exact as well.",
        "The exact track and what the file says of itself need no profile.",
        tracks=(STORED, EXACT, EXACT_ZSTD),
        operations=[
            *restored((STORED,)),
            inspect(),
            decode(EXACT),
            decode(EXACT_ZSTD, "--tokens", "2:7"),
            decode(EXACT, *GIVEN),
        ],
    )
    file, profile = one_quantised()
    case(
        "beside-quantised",
        f"{RULES} TRF-1 TRF-3",
        "Keys are transformed, values are quantised in the same quality.",
        "One set has flags 0, the other what it likes.",
        tracks=(STORED,),
        made=(file, profile),
    )
    case(
        "row-budget",
        "TRF-6 PRF-4",
        "Every row adds up to 131,072 in magnitude, and the integers are 0 or 255.",
        "The sums reach 2^24, the last whole number before binary32 leaves some out.",
        tracks=(STORED,),
        made=at_the_budget(),
    )
    case(
        "writer-part",
        "PRF-1 TRF-4",
        "A profile with transforms of another quality and another model's layer, and 64 bytes for writers.",
        "A reader takes what the artifact needs and leaves the rest alone.",
        tracks=(STORED,),
        profile=with_more,
    )


def with_more(made: list[Any]) -> bytes:
    """Transforms that this artifact does not need, one of them broken in its numbers."""
    more = [
        transform("indexer", 0, heads=1, dims=2),
        transform("value", 63, heads=1, dims=2, row_scale=np.zeros(2, np.float32)),
        transform("key", 1, quality="balanced", heads=1, dims=2),
    ]
    items = sorted([*made, *more], key=lambda item: (item.quality, item.role, item.layer))
    return profile_file(items, writer=bytes(range(64)))


def one_quantised() -> tuple[bytes, bytes]:
    """The second group keeps an encoding of section 9.4, with zeros that are not 128."""
    held = groups()
    held[1].quants[QUALITY].zero = np.int16([100, 150])
    held[1].quants[QUALITY].patches = {}
    profile = profile_file(transforms()[:4])
    tokens = {"chain": None, "content": [], "count": 10, "first_position": 0}
    builder = compose(held, 10, (STORED,), seg=6, identity=identity(), tokens=tokens)
    return attach(builder, profile, [0]).build(), profile


def at_the_budget() -> tuple[bytes, bytes]:
    """All rows at the limit, with signs that make the largest sum of integers 0 and 255."""
    made = transforms()
    for number, item in enumerate(made):
        signs = np.where(np.arange(64).reshape(8, 8) % 3 == number % 3, -1, 1)
        item.matrix = np.full((8, 8), 16_384) * signs
        item.matrix[0] = 16_384
        item.matrix[1] = [131_072, 0, 0, 0, 0, 0, 0, 0]
        item.dtype = "int32"
        item.turns = TURNS[:, 2:4] if item.role == "key" else item.turns
    profile = profile_file(made)
    held = groups(patches=())
    for group in held:
        quant = group.quants[QUALITY]
        quant.q = np.where(quant.q < 128, 0, 255).astype(np.uint8)
        quant.q[:, 0] = 0
    tokens = {"chain": None, "content": [], "count": 10, "first_position": 0}
    builder = compose(held, 10, (STORED,), seg=6, identity=identity(), tokens=tokens)
    return attach(builder, profile).build(), profile
