"""Level uncommon: valid files of rare shape, and everything in codec hevc."""

# ruff: noqa: E501, PLR0917 - long sentences and tables

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.generate.compose import (
    EXACT,
    EXACT_ZSTD,
    HEVC,
    QUALITY,
    STORED,
    ZSTD,
    Quant,
    RawGroup,
    Video,
    compose,
    floats,
    noise,
    small,
    streams,
    typical,
)
from conformance.generate.core import good, one_group, pair, special
from conformance.generate.suite import Suite, decode


def add_cases(suite: Suite) -> None:
    """All of this module."""
    _shapes(suite)
    _hevc(suite)


def _shapes(suite: Suite) -> None:
    def add(
        slug: str,
        requirements: str,
        groups: list[RawGroup],
        count: int,
        what: str,
        why: str,
        tracks: tuple[str, ...] = (STORED, ZSTD),
        family: str = "grp",
        more: Any = (),
        seg: int = 256,
        **members: Any,
    ) -> None:
        data = compose(groups, count, tracks, seg=seg, **members).build()
        good(
            suite,
            family,
            slug,
            requirements.split(),
            data,
            list(tracks),
            what,
            why,
            level="uncommon",
            more=more,
        )

    for dims in (1, 3, 64, 80, 96, 128, 192, 256, 512, 576):
        group = one_group("bfloat16", (1, 3, 1, dims), seed=f"wide-{dims}", patches=(0,))
        add(
            f"head-dim-{dims}",
            "GRP-1 SET-3",
            [group],
            3,
            f"A head dim of {dims}.",
            "Head dims of real models are not all 64 or 128.",
        )
    keys, values = (
        one_group("float16", (2, 5, 2, 6)),
        one_group("float16", (2, 5, 2, 4), seed="v", role="value"),
    )
    add(
        "wide-keys",
        "GRP-1",
        [keys, values],
        5,
        "Keys of 6 dims, values of 4.",
        "Keys and values need not have one shape.",
    )
    groups = []
    for name, layers, heads, dims in (
        ("key-1", (0, 2, 4), 2, 4),
        ("key-2", (1, 3), 1, 8),
        ("value", (0, 1, 2, 3, 4), 1, 4),
    ):
        source, quant = typical(name, (len(layers), 5, heads, dims), "bfloat16")
        groups.append(
            RawGroup(name, name.split("-")[0], "bfloat16", layers, source, {QUALITY: quant})
        )
    add(
        "several-groups-of-one-role",
        "GRP-4 GRP-2 SEG-2",
        groups,
        5,
        "Keys of two shapes in interleaved layers: two groups of one role.",
        "The order of segments follows global layer numbers, not groups.",
        seg=3,
        more=[decode(STORED, "--layers", "1:3"), decode(STORED, "--layers", "4:5")],
    )
    source, quant = typical("subset", (2, 5, 2, 4), "float16")
    held = RawGroup(
        "key", "key", "float16", (7, 9), source, {QUALITY: quant}, head_start=4, heads_total=8
    )
    add(
        "heads-held",
        "GRP-3 PAR-4",
        [held],
        5,
        "Heads 4 and 5 of 8, layers 7 and 9: one rank's part.",
        "Head numbers of a request are those of the model.",
        more=[
            decode(STORED, "--heads", "5:6"),
            decode(STORED, "--heads", "4:6"),
            decode(STORED, "--heads", "3:5", code="usage.selection"),
            decode(STORED, "--heads", "0:2", code="usage.selection"),
            decode(STORED, "--heads", "6:7", code="usage.selection"),
        ],
    )
    latent, indexer = (
        one_group("bfloat16", (3, 4, 1, 36), seed="latent", role="latent"),
        one_group("float8_e4m3fn", (3, 4, 1, 8), seed="indexer", role="indexer"),
    )
    add(
        "latent-and-indexer",
        "GRP-1 FEA-4",
        [latent, indexer],
        4,
        "A latent cache (MLA) with an indexer.",
        "There are no keys and values; two groups of one head.",
    )
    rows = RawGroup("key", "key", "uint8", (0, 1), floats("rows", (2, 5, 1, 34), "uint8"))
    add(
        "packed-rows",
        "QUA-3 GRP-1",
        [rows],
        5,
        "Opaque rows of `uint8`, as engines with quantised caches have.",
        "Such groups are exact in every quality.",
        (EXACT, EXACT_ZSTD),
    )
    both = [
        *pair("float16", 2, 5, 1, 4),
        RawGroup("scales", "scale", "uint8", (0, 1), floats("sc", (2, 5, 1, 2), "uint8")),
    ]
    add(
        "quantised-beside-opaque",
        "QUA-3 REC-3",
        both,
        5,
        "A quantised quality that holds a `uint8` group exactly.",
        "One track mixes segments with and without sets.",
    )

    # windows and states
    builder = small(suite, (STORED, EXACT), window=True)
    builder.manifest["valid_lengths"] = [0, 4, 10]
    good(
        suite,
        "len",
        "window-and-state",
        ["LEN-1", "LEN-2", "LEN-3", "GRP-5", "GRP-6", "SEG-1"],
        builder.build(),
        [STORED, EXACT],
        "A group with a window from token 3 on and a state; prefixes of 0, 4 and 10 tokens can be served.",
        "A window holds the end of the sequence: other prefixes would lack what an engine needs.",
        level="uncommon",
        more=[
            decode(STORED, "--tokens", "0:10"),
            decode(STORED, "--tokens", "0:4"),
            decode(STORED, "--tokens", "0:5", code="tokens.length"),
            decode(STORED, "--tokens", "0:3", code="tokens.length"),
            decode(EXACT, "--tokens", "0:9", code="tokens.length"),
            decode(EXACT, "--tokens", "3:10", code="tokens.length"),
        ],
    )
    source = floats("empty", (2, 0, 1, 2), "float16")
    extent = {"cumulative_tokens": 5, "held_start": 5, "kind": "window"}
    empty = RawGroup("near", "value", "float16", (0, 1), source, tokens=extent)
    add(
        "empty-window",
        "GRP-5 SEG-1",
        [one_group("float16", (2, 5, 1, 2)), empty],
        5,
        "A window that holds no token.",
        "held_start may equal T; the group then has no cells.",
        (STORED, EXACT),
    )
    aligned = RawGroup(
        "near",
        "value",
        "float16",
        (0,),
        floats("near", (1, 4, 1, 2), "float16"),
        tokens={"cumulative_tokens": 10, "held_start": 6, "kind": "window"},
    )
    odd = RawGroup(
        "far",
        "key",
        "float16",
        (0,),
        floats("far", (1, 9, 1, 2), "float16"),
        tokens={"cumulative_tokens": 10, "held_start": 1, "kind": "window"},
    )
    add(
        "windows-and-blocks",
        "GRP-5 SEG-1",
        [odd, aligned],
        10,
        "Windows that start inside a token block and at its border.",
        "Token blocks are those of the whole sequence, cut by the window.",
        (EXACT,),
        seg=3,
    )
    state = RawGroup(
        "conv",
        "state",
        "float32",
        (2,),
        special("float32")[:1, :1].reshape(1, 1, 1, 6, 4),
        tokens={"kind": "state", "shape": [1, 3, 2]},
    )
    deep = RawGroup(
        "rec",
        "state",
        "bfloat16",
        (3,),
        floats("rec", (1, 1, 3, 4), "bfloat16"),
        tokens={"kind": "state", "shape": [2, 1, 1, 1, 1, 1, 1, 2]},
    )
    for order in ("token-major", "layer-major"):
        add(
            f"states-{order}",
            "GRP-6 SEG-1 SEG-2 SEG-3 QUA-3",
            [one_group("float16", (2, 7, 1, 2)), state, deep],
            7,
            f"States of three and of eight factors, {order}: one pseudo-token each, behind all token blocks.",
            "Block number ceil(T / S) puts a state behind the tokens in token-major order.",
            (STORED, EXACT),
            seg=3,
            order=order,
        )
    only = RawGroup(
        "rec",
        "state",
        "float16",
        (3,),
        floats("only", (1, 1, 3, 4), "float16"),
        tokens={"kind": "state", "shape": [4]},
    )
    add(
        "state-without-tokens",
        "GRP-6 LEN-1",
        [only],
        0,
        "A state and no tokens.",
        "The state is there even with T = 0.",
        (EXACT,),
    )
    state_exact = small(suite, (STORED, ZSTD, EXACT), window=True).build()
    good(
        suite,
        "rec",
        "exact-in-two-qualities",
        ["REC-10", "QUA-3"],
        state_exact,
        [STORED, ZSTD, EXACT],
        "A state that two qualities hold exactly.",
        "What two qualities hold exactly has equal digests.",
        level="uncommon",
    )
    for count, cut in ((4, 3), (5, 3), (7, 2)):
        group = one_group("bfloat16", (count, 4, 1, 3), seed=f"runs-{count}")
        group.cut = (cut, 1)
        add(
            f"layers-{count}-in-runs-of-{cut}",
            "SEG-1 SET-1 REC-5",
            [group],
            4,
            f"{count} layers in runs of {cut}: the last run is shorter.",
            "Sets and segments of the last run have fewer layers.",
        )


def layout(
    order: str,
    frames: int,
    grid: tuple[int, int],
    fold: tuple[int, int],
    tile: tuple[int, int],
    width: int = 144,
    height: int = 144,
) -> dict[str, Any]:
    """A layout as the manifest has it."""
    return {
        "fold": list(fold),
        "frames": frames,
        "grid": list(grid),
        "height": height,
        "order": order,
        "tile": list(tile),
        "width": width,
    }


def smooth(shape: tuple[int, int, int, int], seed: str) -> RawGroup:
    """A group whose integers compress well."""
    source, quant = typical(seed, shape, "bfloat16", patches=(1,))
    wave = (
        np.arange(shape[1])[:, None, None] // 2
        + noise(seed, shape[2] * shape[3]).reshape(shape[2:]) // 16
        + 118
    )
    q = np.broadcast_to(wave, shape).astype(np.uint8) + (np.arange(shape[0]) % 5)[
        :, None, None, None
    ].astype(np.uint8)
    new = Quant(
        q,
        quant.scale,
        quant.zero,
        quant.bias,
        quant.order,
        quant.token_scale,
        quant.index,
        quant.patches,
    )
    return RawGroup("key", "key", "bfloat16", tuple(range(shape[0])), source, {QUALITY: new})


def _hevc(suite: Suite) -> None:
    stream = streams(suite, "lay")

    def add(
        slug: str,
        requirements: str,
        layouts: list[dict[str, Any]],
        what: str,
        why: str,
        *,
        shape: tuple[int, int, int, int] = (3, 10, 2, 4),
        seg: int = 256,
        cut: tuple[int, int] = (3, 65_536),
        choose: Any = lambda _: 0,
        tracks: tuple[str, ...] = (HEVC, ZSTD),
    ) -> None:
        group = smooth(shape, f"hevc-{shape}")
        group.cut = cut
        video = Video(layouts, choose, stream)
        data = compose([group], shape[1], tracks, seg=seg, video=video).build()
        good(
            suite,
            "lay",
            slug,
            [
                "LAY-1",
                "LAY-2",
                "LAY-3",
                "LAY-4",
                "LAY-5",
                "LAY-6",
                "LAY-7",
                "HEV-1",
                "HEV-2",
                "HEV-9",
                "HEV-14",
                *requirements.split(),
            ],
            data,
            list(tracks),
            what,
            why,
            level="uncommon",
            how="Composed by hand; the streams are from libx265, encoded without loss, and kept.",
            more=[
                decode(HEVC, "--tokens", f"1:{shape[1] - 1}"),
                decode(HEVC, "--layers", f"{shape[0] - 1}:{shape[0]}"),
            ],
        )

    formula = (
        "Each number of the layout moves samples; one slip in the formula shows in the digests."
    )
    rows = (1, 8)
    for order in ("time", "raster"):
        add(
            f"{order}-three-pictures",
            "HEV-3",
            [layout(order, 3, (1, 4), (1, 1), rows)],
            f"Order `{order}`, three pictures, a grid of 1 x 4.",
            formula,
        )
        add(
            f"{order}-fold-2-2",
            "",
            [layout(order, 1, (1, 3), (2, 2), (2, 4))],
            f"Order `{order}`, folds of 2 x 2, tiles of 2 x 4.",
            formula,
        )
        add(
            f"{order}-fold-3-2-two-pictures",
            "HEV-3",
            [layout(order, 2, (1, 1), (3, 2), (3, 3))],
            f"Order `{order}`, folds of 3 x 2, tiles of 3 x 3 for 8 channels, two pictures.",
            formula,
        )
    add(
        "fold-1-4-columns",
        "",
        [layout("time", 2, (2, 1), (1, 4), (8, 1))],
        "Folds of 1 x 4, tiles of one column.",
        formula,
    )
    add(
        "fold-4-1-rows",
        "",
        [layout("raster", 1, (3, 1), (4, 1), (1, 8))],
        "Folds of 4 x 1, a grid of 3 x 1.",
        formula,
    )
    add(
        "tile-larger-than-channels",
        "",
        [layout("time", 1, (3, 4), (1, 1), (4, 4))],
        "Tiles of 4 x 4 for 8 channels.",
        "What the formula does not address is filler, 128.",
    )
    add(
        "picture-160-144",
        "LAY-4",
        [layout("time", 1, (2, 5), (1, 1), (2, 4), 160, 144)],
        "A picture of 160 x 144.",
        "Sides are multiples of 16, not of 32 or 64.",
    )
    add(
        "picture-144-208",
        "LAY-4",
        [layout("raster", 2, (5, 1), (1, 1), (4, 2), 144, 208)],
        "A picture of 144 x 208.",
        "Width and height must not be swapped.",
    )
    add(
        "room-for-more-tokens",
        "HEV-2",
        [layout("time", 4, (1, 5), (1, 1), rows)],
        "Room for 20 tokens, 10 held: pictures hold filler only in part.",
        "The stream has all F pictures all the same.",
    )
    add(
        "empty-pictures",
        "HEV-2",
        [layout("raster", 4, (1, 10), (1, 1), rows)],
        "All tokens are in the first of four pictures; the others are filler.",
        "F is exact.",
    )
    add(
        "forty-pictures",
        "HEV-3",
        [layout("time", 40, (1, 1), (1, 1), rows)],
        "Forty pictures of one token each.",
        "Pictures refer to the one before; order of decoding and output are equal.",
        shape=(2, 40, 2, 4),
    )
    for layers in (1, 2, 3, 4, 5):
        add(
            f"layers-{layers}",
            "TRK-3",
            [layout("time", 1, (2, 6), (1, 1), (2, 4))],
            f"{layers} layers: planes without a layer are 128.",
            "Y, Cb and Cr are layers, not colours.",
            shape=(layers, 10, 2, 4),
        )
    sizes = [
        layout("time", 1, (1, 6), (1, 1), rows),
        layout("raster", 2, (2, 1), (1, 1), (4, 2), 160, 144),
    ]
    add(
        "two-layouts",
        "TRK-5 TRK-6 REC-8",
        sizes,
        "Full segments and the last one have layouts of two sizes.",
        "The record names the layout.",
        seg=6,
        choose=lambda cell: int(cell.start > 0),
        shape=(3, 10, 2, 4),
    )
    add(
        "one-head-a-segment",
        "SEG-1",
        [layout("time", 1, (2, 5), (1, 1), (2, 2))],
        "Segments of one head.",
        "Channels count from the segment's first head.",
        cut=(3, 1),
    )
    add(
        "hevc-alone",
        "TRK-4",
        [layout("time", 1, (1, 10), (1, 1), rows)],
        "hevc is the only track.",
        "A reader without the codec answers `unsupported`, one with it restores.",
        tracks=(HEVC,),
    )
    five = small(suite, (HEVC, ZSTD, STORED, EXACT_ZSTD, EXACT), window=True).build()
    good(
        suite,
        "trk",
        "five-tracks",
        ["TRK-3", "REC-6", "REC-10", "VER-1", "VER-2"],
        five,
        [HEVC, ZSTD, STORED, EXACT_ZSTD, EXACT],
        "Three codecs of one quality and two exact tracks, with a window and a state.",
        "In the hevc track the groups that are held exactly are coded with zstd.",
        level="uncommon",
    )
