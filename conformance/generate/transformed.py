"""Valid artifacts with transformed groups (spec 9.5), for readers that know the feature."""

# ruff: noqa: E501 - long sentences and tables

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from conformance.generate.compose import (
    EXACT,
    EXACT_ZSTD,
    HEVC,
    IDENTITY,
    LAYOUT_KEYS,
    LEVELS,
    QUALITY,
    STORED,
    ZSTD,
    RawGroup,
    Video,
    compose,
    noise,
    streams,
)
from conformance.generate.core import HAND
from conformance.generate.suite import Case, Operation, Suite, decode, inspect, verify
from conformance.generate.transform_parts import (
    FEATURE,
    PROFILE,
    TURNS,
    attach,
    coefficients,
    groups,
    identity,
    parts,
    rope,
    tiny,
    transform,
    transforms,
)
from tests.builder import Builder
from tests.transformed import MODEL, Transform, profile_file

# isort: split
from kvconform.fuzz.pieces import Array

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
    case(
        "float32",
        f"{RULES} ARI-2",
        "Keys and values in float32, with integers of 15 bits in the matrices and first_position 4,352.",
        "Nothing is rounded behind the operations, so the order and the rounding of each one shows.",
        tracks=(STORED,),
        made=every_bit(),
    )
    case(
        "numbers-at-their-limits",
        f"{RULES} PRF-5 ARI-4",
        "row_scale, mean, scale and token scales at the ends of their ranges, a cosine of 2^-20, and a turn that is a little longer than 1.",
        "Products may be subnormal and are kept; values of float16 are clamped, those of float32 need not be.",
        tracks=(STORED,),
        made=at_the_limits(),
    )
    case(
        "model-stated-in-part",
        "TRF-5 PRF-1",
        "The profile names a revision and weights, the artifact neither, and has an extension that need not be understood.",
        "Models are compared by id, and by weights where both name them.",
        tracks=(STORED,),
        made=built(tiny(profile=stated)),
    )
    case(
        "some-heads",
        f"{RULES} TRF-2 TRF-5",
        "Heads 2 and 3 of six are held.",
        "The product is that of the heads held, and a selection names heads by their global numbers.",
        tracks=(STORED,),
        operations=[decode(STORED, *GIVEN), decode(STORED, *GIVEN, "--heads", "3:4")],
        made=some_heads(),
    )
    hevc, profile = in_pictures(suite)
    suite.add(
        Case(
            "trf", "in-pictures", "uncommon", ("TRF-6", "TRF-7", "TRK-3"), hevc, restored((HEVC, STORED)),
            "Transformed keys as pictures.", "A codec carries integers, whatever they stand for.", HAND,
            ("hevc", f"feature:{FEATURE}"), files={PROFILE: profile},
        )
    )  # fmt: skip


def built(made: tuple[Builder, bytes]) -> tuple[bytes, bytes]:
    """The bytes of artifact and profile."""
    return made[0].build(), made[1]


def stated(made: list[Transform]) -> bytes:
    """A profile whose model says more than that of the artifact."""
    model = {**MODEL, "revision": "r1", "weights_digest": "blake3:" + "1" * 64}
    note = {"com.example.note": {"must_understand": False, "value": "a note"}}
    return profile_file(made, model=model, extensions=note)


def keys_alone(
    dtype: str, made: list[Transform], *, first_position: int = 0, tracks: Sequence[str] = (STORED,),
    scales: Array = LEVELS, more: Sequence[RawGroup] = (), change: Callable[[RawGroup], None] = lambda _: None,
    **options: Any,
) -> tuple[bytes, bytes]:  # fmt: skip
    """Keys of layers 1 and 3, ten tokens, and ``more`` groups; all are transformed."""
    source, quant = coefficients(f"alone-{dtype}", (2, 10, 2, 4), dtype, patches=(), scales=scales)
    group = RawGroup("keys", "key", dtype, (1, 3), source, {QUALITY: quant})
    change(group)
    named = {**copy.deepcopy(IDENTITY), "rope": [rope(2, "half", (1, 3))]}
    tokens = {"chain": None, "content": [], "count": 10, "first_position": first_position}
    held = [group, *more]
    builder = compose(held, 10, tracks, seg=6, identity=named, tokens=tokens, **options)
    profile = profile_file(made)
    return attach(builder, profile, range(len(held))).build(), profile


def every_bit() -> tuple[bytes, bytes]:
    """Matrices of odd integers up to 16,383, in float32."""
    made = [transform("key", layer, pairing="half", pairs=2) for layer in (1, 3)]
    made.append(transform("value", 3))
    for item in made:
        low = noise(f"low-{item.role}-{item.layer}", 8, 8).astype(np.int64)
        item.matrix = (item.matrix // 64 * 64 + low // 4 * 2 + 1).clip(-16_383, 16_383)
        item.mean = item.mean * np.float32(1.1)
        item.row_scale = item.row_scale * np.float32(1.7)
    source, quant = coefficients(
        "all-values", (1, 10, 2, 4), "float32", patches=(3,), scales=LEVELS
    )
    values = RawGroup("values", "value", "float32", (3,), source, {QUALITY: quant})
    return keys_alone("float32", made, first_position=4_352, more=[values])


def at_the_limits() -> tuple[bytes, bytes]:
    """Small numbers in layer 1, large ones in layer 3, and values that float16 cannot hold."""
    small, large = (transform("key", layer, pairing="half", pairs=2) for layer in (1, 3))
    longer = 1 + 2.0**-42
    small.turns = large.turns = np.array([(2.0**-20, 0.6 * longer), (1 - 2.0**-41, 0.8 * longer)])
    small.row_scale = np.full(8, 2.0**-40, np.float32)
    small.mean = np.zeros(8, np.float32)
    small.matrix = np.zeros((8, 8), np.int64)
    small.matrix[[0, 1, 4, 5], [0, 1, 2, 3]] = 1  # the second dim of each pair is 0
    large.row_scale = np.full(8, 2.0**22, np.float32)
    large.mean = np.float32([2.0**96, -(2.0**96), 2.0**-64, -(2.0**-64), 0, 1, -1, 2.0**96])
    value = transform("value", 3, row_scale=np.full(8, 1, np.float32))
    limits = np.float32([2.0**-40, 2.0**40])

    def change(group: RawGroup) -> None:
        group.quants[QUALITY].scale = limits.copy()
        group.quants[QUALITY].index = np.tile(np.uint8([0, 0, 0, 0, 1]), (2, 2))

    source, quant = coefficients("clamped", (1, 10, 2, 4), "float16", patches=(), scales=LEVELS)
    values = RawGroup("values", "value", "float16", (3,), source, {QUALITY: quant})
    made = [small, large, value]
    return keys_alone("float32", made, scales=limits, more=[values], change=change)


def some_heads() -> tuple[bytes, bytes]:
    """A rank's heads."""
    made = [
        transform("key", layer, pairing="half", pairs=2, head_start=2, heads_total=6)
        for layer in (1, 3)
    ]

    def change(group: RawGroup) -> None:
        group.head_start, group.heads_total = 2, 6

    return keys_alone("float16", made, change=change)


def in_pictures(suite: Suite) -> tuple[bytes, bytes]:
    """The integers as pictures, and as they are."""
    made = [transform("key", layer, pairing="half", pairs=2) for layer in (1, 3)]
    video = Video([LAYOUT_KEYS], lambda _: 0, streams(suite, "transformed"))
    return keys_alone("bfloat16", made, tracks=(HEVC, STORED), video=video)


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
