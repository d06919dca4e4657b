"""Level core: dtypes, codecs, shapes, parts, segmentation, sets and payloads that readers restore."""

# ruff: noqa: E501, PLR0917 - long sentences and tables

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from conformance.generate.compose import (
    ALL_TRACKS,
    DTYPES,
    EXACT,
    EXACT_ZSTD,
    QUALITY,
    STORED,
    ZSTD,
    Array,
    Quant,
    RawGroup,
    compose,
    floats,
    noise,
    pack,
    raw_frame,
    small,
    tiny,
    typical,
    zstd_payload,
)
from conformance.generate.suite import Case, Frozen, Operation, Suite, decode, verify

# isort: split
from kvconform.fuzz.pieces import PER_BYTE

HAND = (
    "The artifact is composed by hand in `generate/`, byte by byte, without the reference writer."
)
FLOATS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def codecs_of(tracks: Sequence[str]) -> tuple[str, ...]:
    """What a case with these tracks requires."""
    return tuple(sorted({track.split("/")[1] for track in tracks} - {"stored"}))


def good(
    suite: Suite,
    family: str,
    slug: str,
    requirements: Sequence[str],
    data: bytes | Frozen,
    tracks: Sequence[str],
    what: str,
    why: str,
    *,
    how: str = HAND,
    more: Sequence[Operation] = (),
    level: str = "core",
    requires: Sequence[str] | None = None,
    limits: Sequence[str] = (),
) -> None:
    """A valid artifact: verify it and decode every track."""
    operations = [verify(), *(decode(track) for track in tracks), *more]
    suite.add(
        Case(
            family,
            slug,
            level,
            tuple(dict.fromkeys(requirements)),
            data,
            operations,
            what,
            why,
            how,
            tuple(codecs_of(tracks) if requires is None else requires),
            limits=tuple(limits),
        )
    )


def one_group(
    dtype: str,
    shape: tuple[int, int, int, int],
    *,
    seed: str = "one",
    role: str = "key",
    **typ: Any,
) -> RawGroup:
    """One quantised group with everything that a usual set has."""
    source, quant = typical(seed, shape, dtype, **typ)
    return RawGroup(role, role, dtype, tuple(range(shape[0])), source, {QUALITY: quant})


def pair(
    dtype: str, layers: int, tokens: int, heads: int, dims: int, **more: Any
) -> list[RawGroup]:
    """Keys and values of one shape."""
    groups = []
    for role in ("key", "value"):
        group = one_group(dtype, (layers, tokens, heads, dims), seed=f"{role}-{dtype}", role=role)
        for name, value in more.items():
            setattr(group, name, value)
        groups.append(group)
    return groups


def written(dtype: str, track: str, bits: bool = False) -> bytes:
    """What the reference writer makes of a small cache."""
    import tempfile
    from pathlib import Path

    import kvformat

    kind = DTYPES[dtype]
    if dtype == "uint8" or bits:
        raw = noise(f"bits-{dtype}", 2 * 2 * 9 * 2 * 8 * kind.itemsize)
        kv = raw.view(kind).reshape(2, 2, 9, 2, 8)
    else:
        raw = noise(f"kv-{dtype}", 2 * 2 * 9 * 2 * 8).astype(np.float32)
        kv = ((raw - 128) / 32).reshape(2, 2, 9, 2, 8).astype(kind)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.kvf"
        identity = kvformat.Identity(kvformat.Model("a model"), 2, "bfloat16", kind="unbound")
        kvformat.write(
            path, np.array(kv), identity=identity, tracks=[track], segment_tokens=5, workers=1
        )
        return path.read_bytes()


def add_cases(suite: Suite) -> None:
    """All of this module."""
    _dtypes(suite)
    _heads(suite)
    _parts(suite)
    _segmentation(suite)
    _side_blocks(suite)
    _sets(suite)
    _payloads(suite)
    _zstd_frames(suite)
    _extents(suite)
    _manifests(suite)


def _dtypes(suite: Suite) -> None:
    how = "Written by the reference writer and kept, as its choices may change with its version."
    for dtype in (*FLOATS, "uint8"):
        slug = dtype.replace("_", "-")
        for track in (STORED, ZSTD, EXACT, EXACT_ZSTD):
            if dtype == "uint8" and track.startswith(QUALITY):
                continue
            exact = track.startswith("exact")
            good(
                suite,
                "ari",
                f"{slug}-{track.replace('/', '-')}",
                ["ARI-8" if exact else "ARI-6", "ARI-1", "ARI-2", "INT-1", "GRP-7", "CNV-1"]
                + (["STO-1"] if "stored" in track else ["ZST-1", "ZST-4"]),
                Frozen(lambda dtype=dtype, track=track: written(dtype, track)),
                [track],
                f"A small cache of dtype `{dtype}` in the one track `{track}`.",
                "Every dtype must come back bit for bit from every codec.",
                how=how,
            )
    for dtype in FLOATS:
        slug = dtype.replace("_", "-")
        for codec in ("stored", "zstd"):
            good(
                suite,
                "ari",
                f"any-bits-{slug}-{codec}",
                ["ARI-8", "INT-1", "CID-1"],
                compose(
                    [RawGroup("key", "key", dtype, (0, 1), special(dtype))], 16, [f"exact/{codec}"]
                ).build(),
                [f"exact/{codec}"],
                f"An exact group of `{dtype}` with both zeros, subnormals, infinities where the dtype "
                "has them and NaNs of several payloads.",
                "Exact means the bits: a reader that passes values through floating point loses NaN "
                "payloads or signs.",
            )


def special(dtype: str) -> Array:
    """Two layers of 16 tokens: special bit patterns in front, any bits behind."""
    size = DTYPES[dtype].itemsize
    patterns = {
        1: [
            0x00,
            0x80,
            0x01,
            0x81,
            0x7F,
            0xFF,
            0x7C,
            0xFC,
            0x7D,
            0xFD,
            0x7E,
            0xFE,
            0x7B,
            0x08,
            0x04,
        ],
        2: [
            0x0000,
            0x8000,
            0x0001,
            0x8001,
            0x7C00,
            0xFC00,
            0x7C01,
            0x7E00,
            0xFE01,
            0x7F80,
            0xFF80,
            0x7F81,
            0x7FC0,
            0xFFC1,
            0x7FFF,
            0xFFFF,
        ],
        4: [
            0x00000000,
            0x80000000,
            0x00000001,
            0x80000001,
            0x007FFFFF,
            0x7F800000,
            0xFF800000,
            0x7F800001,
            0x7FC00000,
            0xFFC00001,
            0x7FBFFFFF,
            0xFFFFFFFF,
        ],
    }[size]
    raw = noise(f"special-{dtype}", 2 * 16 * 2 * 3 * size).copy()
    front = np.array(patterns, f"<u{size}").view(np.uint8)
    raw[: len(front)] = front
    return raw.reshape(2, 16, 2, 3, size)


def _heads(suite: Suite) -> None:
    why = "Readers that assume one head layout mix heads up."
    for slug, heads, total, text in (
        ("mha", 4, 4, "As many KV heads as a small model has, all held"),
        ("gqa", 2, 2, "Two KV heads (grouped queries)"),
        ("mqa", 1, 1, "A single KV head (multi-query)"),
    ):
        groups = pair("bfloat16", 2, 7, heads, 8, heads_total=total)
        good(
            suite,
            "grp",
            slug,
            ["GRP-1", "GRP-7", "ARI-6"],
            compose(groups, 7, [STORED, EXACT]).build(),
            [STORED, EXACT],
            f"{text}, keys and values of one shape.",
            why,
        )


def _parts(suite: Suite) -> None:
    groups = pair("float16", 4, 11, 4, 4, cut=(3, 2))
    for tracks in ([STORED], [ZSTD], [EXACT], [EXACT_ZSTD]):
        data = compose(groups, 11, tracks, seg=4).build()
        track = tracks[0]
        cuts = (
            ("--tokens", "0:1"),
            ("--tokens", "3:5"),
            ("--tokens", "4:8"),
            ("--tokens", "0:11"),
            ("--tokens", "10:11"),
            ("--layers", "0:1"),
            ("--layers", "2:4"),
            ("--layers", "3:4"),
            ("--heads", "0:1"),
            ("--heads", "1:3"),
            ("--heads", "3:4"),
            ("--tokens", "2:9", "--layers", "1:4", "--heads", "1:4"),
        )
        good(
            suite,
            "par",
            f"parts-{track.replace('/', '-')}",
            ["PAR-1", "GRP-7", "ARI-6"],
            data,
            tracks,
            f"Intervals of tokens, layers and heads of `{track}`, across and along the borders of "
            "segments.",
            "A part must equal the same part of the whole; wrong offsets inside a segment show here.",
            more=[decode(track, *cut) for cut in cuts],
        )
    holes = small(suite)
    good(
        suite,
        "par",
        "layers-that-are-no-range",
        ["PAR-1", "PAR-4", "SEG-1"],
        holes.build(),
        [STORED, EXACT],
        "Groups that hold layers 1, 3, 4, 6 and 1, 3: intervals select by global number.",
        "Layer numbers are not indices; an interval that names a layer not held is refused.",
        more=[
            decode(STORED, "--layers", "3:5"),
            decode(STORED, "--layers", "6:7"),
            decode(STORED, "--layers", "1:2"),
            decode(STORED, "--layers", "1:4", code="usage.selection"),
            decode(STORED, "--layers", "0:1", code="usage.selection"),
        ],
    )


def _segmentation(suite: Suite) -> None:
    why = "The grid follows from the manifest; other cuts of the same cache restore the same bits."
    base = lambda **more: pair("bfloat16", 4, 10, 3, 4, **more)  # noqa: E731
    for slug, requirements, options, more, text in (
        ("layer-major", ["SEG-3"], {"order": "layer-major", "seg": 4}, {}, "Layer-major order"),
        ("token-major", ["SEG-2"], {"seg": 4}, {}, "Token-major order"),
        (
            "segments-of-one-token",
            ["SEG-5", "SEG-1"],
            {"seg": 1},
            {"cut": (3, 3)},
            "Segments of one token",
        ),
        (
            "segments-of-three-tokens",
            ["SEG-1"],
            {"seg": 3},
            {},
            "Segments of three tokens, the last short",
        ),
        ("one-segment", ["SEG-1"], {"seg": 65_536}, {}, "One segment for all tokens"),
        ("one-layer-a-segment", ["SEG-4"], {"seg": 6}, {"cut": (1, 3)}, "One layer in a segment"),
        ("two-layers-a-segment", ["SEG-4"], {"seg": 6}, {"cut": (2, 3)}, "Two layers in a segment"),
        ("one-head-a-segment", ["SEG-4"], {"seg": 6}, {"cut": (3, 1)}, "One head in a segment"),
        (
            "two-heads-a-segment",
            ["SEG-4", "SEG-2"],
            {"seg": 6, "order": "layer-major"},
            {"cut": (2, 2)},
            "Runs of two heads and two layers, layer-major",
        ),
    ):
        good(
            suite,
            "seg",
            slug,
            [*requirements, "REC-1", "DAT-2"],
            compose(base(**more), 10, [STORED], **options).build(),
            [STORED],
            f"{text}.",
            why,
        )
    page = tiny([STORED, EXACT], alignment=4096).build()
    good(
        suite,
        "dat",
        "alignment-4096",
        ["DAT-2", "DAT-3", "DAT-5", "HDR-7", "HDR-9", "DAT-1", "DAT-4"],
        page,
        [STORED, EXACT],
        "Objects at multiples of 4,096 bytes, with zeros between them.",
        "Offsets count from the data section, which itself starts at a multiple.",
    )
    every = small(suite, ALL_TRACKS[1:])
    good(
        suite,
        "rec",
        "tracks-of-one-quality",
        ["REC-6", "REC-10", "TRK-1", "TRK-2", "TRK-3", "TRK-4", "INT-1"],
        every.build(),
        ALL_TRACKS[1:],
        "Two tracks of one quantised quality and two exact ones.",
        "Tracks of one quality have equal integers and restore equal bits, whatever the codec.",
    )
    groups = pair("float16", 2, 5, 1, 4)
    for group in groups:
        quant = group.quants[QUALITY]
        group.quants["coarse"] = Quant(
            quant.q // 2,
            quant.scale * 2,
            quant.zero // 2,
            quant.bias,
            None,
            quant.token_scale,
            quant.index,
            quant.patches,
        )
    tracks = ["near-lossless/stored", "coarse/stored", "coarse/zstd", "exact/stored"]
    good(
        suite,
        "qua",
        "three-qualities",
        ["QUA-1", "QUA-2", "QUA-4", "TAB-1", "TAB-3", "TRK-2", "DAT-1"],
        compose(groups, 5, tracks).build(),
        tracks,
        "Two quantised qualities with sets of their own, and the exact bytes; the quality `coarse` is "
        "in no registry.",
        "Qualities are named freely, and set tables come before all segment tables.",
    )
    mixed = {"near-lossless/zstd": ["zstd", "stored"]}
    data = compose(pair("float16", 2, 5, 1, 4), 5, ["near-lossless/zstd"], codecs=mixed).build()
    good(
        suite,
        "trk",
        "codecs-differ-by-group",
        ["TRK-3", "TRK-2"],
        data,
        ["near-lossless/zstd"],
        "A track whose first group is coded with zstd and whose second is stored.",
        "The codec belongs to the group, not to the track's name.",
    )
    half = pair("float16", 2, 5, 1, 4)
    half[1].quants = {}
    good(
        suite,
        "qua",
        "one-group-exact",
        ["QUA-2", "REC-3", "REC-2"],
        compose(half, 5, [STORED]).build(),
        [STORED],
        "A quality that quantises keys and holds values exactly.",
        "Exact groups in a quantised quality have no set and no side block.",
    )
    null = compose(pair("float16", 1, 3, 1, 2), 3, [STORED])
    null.manifest["qualities"][0]["relative_step"] = None
    good(
        suite,
        "qua",
        "no-relative-step",
        ["QUA-1"],
        null.build(),
        [STORED],
        "A quantised quality whose relative step is not known.",
        "The member is informative.",
    )


def _side_blocks(suite: Suite) -> None:
    why = "Patches replace rows after the arithmetic; token scales multiply between scale and bias."
    for slug, patches, scales, text in (
        ("no-patches", (), None, "No patches, five token scales"),
        ("no-patches-no-token-scales", (), 0, "The shortest side block: counts of 0 only"),
        ("patches-without-token-scales", (0, 5), 0, "Patches, no token scales"),
        ("every-token-patched", range(8), None, "Every token of every layer is a patch"),
        (
            "patches-at-segment-borders",
            (3, 4, 7),
            None,
            "Patches at the last and first token of segments",
        ),
        ("one-token-scale", (0,), 1, "One token scale"),
        ("256-token-scales", (0,), 256, "256 token scales, the limit"),
    ):
        table = None if scales is None else np.linspace(0.5, 2, scales, dtype=np.float32)
        group = one_group("bfloat16", (3, 8, 2, 4), seed=slug, patches=tuple(patches), scales=table)
        good(
            suite,
            "sid",
            slug,
            ["SID-1", "SID-2", "SID-3", "SID-4", "ARI-3", "ARI-5"],
            compose([group], 8, [STORED, ZSTD], seg=4).build(),
            [STORED, ZSTD],
            f"{text}.",
            why,
            limits=["token_scales_per_set"] if scales == 256 else (),
        )
    group = one_group("float16", (3, 8, 4, 2), seed="differ", patches=())
    quant = group.quants[QUALITY]
    for layer, token in ((0, 1), (2, 0), (2, 1), (2, 7)):
        quant.patches[layer, token] = group.source[layer, token]
    quant.__post_init__()
    group.cut = (3, 2)
    good(
        suite,
        "sid",
        "patches-differ-by-layer",
        ["SID-1", "SID-3", "ARI-5", "PAR-1"],
        compose([group], 8, [STORED], seg=4).build(),
        [STORED],
        "Layers of one segment with one, no and several patches, in segments of two heads.",
        "A row of a patch holds the segment's heads only.",
        more=[decode(STORED, "--tokens", "1:2"), decode(STORED, "--heads", "1:3")],
    )


def _sets(suite: Suite) -> None:
    why = "Each flag changes the size and shape of what follows in the set."
    for flags in range(16):
        group = flagged(flags, "bfloat16", (2, 6, 2, 3), f"flags-{flags}")
        names = [
            n for bit, n in ((1, "scale"), (2, "zero"), (4, "bias"), (8, "order")) if flags & bit
        ]
        tracks = [STORED, ZSTD] if flags & 8 else [STORED]
        good(
            suite,
            "set",
            f"flags-{flags}",
            ["SET-1", "SET-2", "SET-3", "ARI-3", "ARI-6"],
            compose([group], 6, tracks, seg=4).build(),
            tracks,
            f"A set with flags {flags} (per channel: {', '.join(names) or 'nothing'}).",
            why,
        )
    group = flagged(3, "float32", (1, 6, 2, 3), "zeros")
    group.quants[QUALITY].zero = np.array([[[-32768, -1, 0], [255, 256, 32767]]], np.int16)
    group.quants[QUALITY].patches = {(0, 2): group.source[0, 2]}
    group.quants[QUALITY].__post_init__()
    good(
        suite,
        "set",
        "zero-of-any-size",
        ["SID-4", "ARI-1", "SET-1"],
        compose([group], 6, [STORED]).build(),
        [STORED],
        "Zeros from -32,768 to 32,767, and a patch whose neutral integers are clamped to 0 and 255.",
        "The subtraction happens in integers wide enough, and neutral integers are min(max(zero, 0), 255).",
    )
    for dims in (255, 256, 257, 300):
        group = one_group("float16", (1, 3, 1, dims), seed=f"dims-{dims}", patches=(0,))
        good(
            suite,
            "set",
            f"order-of-{dims}-dims",
            ["SET-3", "SET-6"],
            compose([group], 3, [ZSTD]).build(),
            [ZSTD],
            f"`order` of {dims} dims has {'one byte' if dims <= 256 else 'two bytes'} an element.",
            "The width of `order` changes above 256 dims.",
        )
    ends = flagged(5, "float32", (1, 4, 1, 4), "ends")
    quant = ends.quants[QUALITY]
    quant.scale = np.float32([[[2.0**-40, 2.0**40, 1, 1]]])
    assert quant.bias is not None
    quant.bias = np.float32([[[0, 2.0**-64, -(2.0**96), 2.0**96]]])
    quant.token_scale = np.float32([2.0**-40, 2.0**40, 1])
    quant.index = np.uint8([[0, 1, 2, 0]])
    good(
        suite,
        "set",
        "parameters-at-their-ends",
        ["SET-4", "SET-5", "ARI-2"],
        compose([ends], 4, [STORED]).build(),
        [STORED],
        "Scales and token scales of 2^-40 and 2^40, biases of +0, 2^-64 and 2^96.",
        "The ends of the ranges are allowed, and no operation there leaves the normal range of binary32.",
    )
    builder = small(suite, [STORED, ZSTD])
    sets = builder.sets[QUALITY]
    first = sets[0]
    sets.insert(
        0,
        type(first)(
            dict(first.record), first.data[:16] + struct.pack("<f", 0.75) + first.data[20:]
        ),
    )
    for track in (STORED, ZSTD):
        for item in builder.segments[track]:
            if item.record["set_index"] or item.record["token_start"]:
                item.record["set_index"] += 1
    good(
        suite,
        "rec",
        "several-sets-of-one-run",
        ["REC-7", "REC-2", "REC-5"],
        builder.build(),
        [STORED, ZSTD],
        "The first layer run has one set for its first token block and another for the second.",
        "The record names the set; it does not follow from the layers alone.",
        more=[decode(STORED, "--tokens", "4:8")],
    )


def flagged(flags: int, dtype: str, shape: tuple[int, int, int, int], seed: str) -> RawGroup:
    """A group whose set has these flags and three token scales."""
    layers, tokens, heads, dims = shape
    full, each = (layers, heads, dims), (layers,)

    def part(name: str, shape: tuple[int, ...]) -> Array:
        return noise(f"{seed}-{name}", int(np.prod(shape))).reshape(shape).astype(np.int64)

    order = np.argsort(part("order", full), axis=-1, kind="stable")
    quant = Quant(
        part("q", shape).astype(np.uint8),
        ((part("scale", full if flags & 1 else each) + 1) / 128).astype(np.float32),
        (part("zero", full if flags & 2 else each) * 3 - 300).astype(np.int16),
        ((part("bias", full) - 128) / 16).astype(np.float32) if flags & 4 else None,
        order if flags & 8 else None,
        np.float32([0.75, 1, 1.3]),
        (part("index", (layers, tokens)) % 3).astype(np.uint8),
    )
    return RawGroup(
        "key", "key", dtype, tuple(range(layers)), floats(seed, shape, dtype), {QUALITY: quant}
    )


def _payloads(suite: Suite) -> None:
    """Codec zstd: radices and cuts into frames."""
    for radix in PER_BYTE:
        tokens = 2 * PER_BYTE[radix] + 1
        q = (noise(f"radix-{radix}", 6 * tokens).astype(np.int64) % radix).reshape(1, tokens, 2, 3)
        low = 256 - radix if radix % 2 else 0
        q = (q + low).astype(np.uint8)

        def packed(rows: Array, low: int = low, radix: int = radix) -> bytes:
            return zstd_payload(
                [(len(rows), raw_frame(pack(rows, low, radix).tobytes()), low, radix)]
            )

        group = RawGroup(
            "key",
            "key",
            "float32",
            (0,),
            floats("radix", q.shape, "float32"),
            {QUALITY: Quant(q, np.float32([1]), np.int16([0]))},
        )
        good(
            suite,
            "zst",
            f"radix-{radix}",
            ["ZST-4", "ZST-5", "ZST-6"],
            compose([group], tokens, [ZSTD], frames=packed).build(),
            [ZSTD],
            f"Radix {radix} from {low} on: {PER_BYTE[radix]} tokens to a byte, {tokens} tokens.",
            "The last byte of each row is not full; radix 256 may only start at 0.",
        )


def _zstd_frames(suite: Suite) -> None:
    source, quant = typical("frames", (3, 6, 2, 4), "float16")

    def single(rows: Array, *arguments: Any) -> bytes:
        return zstd_payload([(len(rows), raw_frame(rows.tobytes(), *arguments), 0, 256)])

    def cut(*sizes: int) -> Any:
        def frames(rows: Array) -> bytes:
            places = np.cumsum((0, *sizes, len(rows) - sum(sizes)))
            parts = [rows[a:b] for a, b in itertools.pairwise(places) if a < b]
            return zstd_payload([(len(p), raw_frame(p.tobytes()), 0, 256) for p in parts])

        return frames

    def two_blocks(rows: Array) -> bytes:
        data = rows.tobytes()
        half = len(data) // 2
        blocks = (half << 3).to_bytes(3, "little") + data[:half]
        blocks += (len(data) - half << 3 | 1).to_bytes(3, "little") + data[half:]
        return single(rows, 0x20, bytes([len(data)]), blocks)

    def mixed(rows: Array) -> bytes:
        entries = []
        for row in rows:
            low, high = int(row.min()), int(row.max())
            if high - low < 16:
                body, radix = pack(row[None], low, high - low + 1), high - low + 1
            else:
                body, low, radix = row[None], 0, 256
            entries.append((1, raw_frame(body.tobytes()), low, radix))
        return zstd_payload(entries)

    eight = lambda rows: struct.pack("<Q", rows.size)  # noqa: E731
    forms: dict[str, tuple[Any, str]] = {
        "one-frame-a-row": (cut(*[1] * 23), "One frame for each row"),
        "two-frames": (cut(5), "Two frames, cut inside a layer"),
        "frames-across-layers": (cut(7, 9), "Frames that do not end where layers end"),
        "packed-and-unpacked-frames": (mixed, "Frames of different radix in one payload"),
        "two-blocks": (two_blocks, "A frame of two raw blocks"),
        "window-of-8-mib": (
            lambda rows: single(rows, 0xC0, b"\x68" + eight(rows)),
            "A window of 8 MiB, the largest allowed",
        ),
        "small-window": (
            lambda rows: single(rows, 0xC0, b"\x00" + eight(rows)),
            "A window descriptor of 1 KiB",
        ),
        "content-size-of-4-bytes": (
            lambda rows: single(rows, 0xA0, struct.pack("<I", rows.size)),
            "A content size of 4 bytes",
        ),
        "content-size-of-8-bytes": (
            lambda rows: single(rows, 0xE0, eight(rows)),
            "A content size of 8 bytes",
        ),
    }
    for slug, (frames, text) in forms.items():
        group = RawGroup("key", "key", "float16", (0, 1, 2), source, {QUALITY: quant})
        good(
            suite,
            "zst",
            slug,
            ["ZST-1", "ZST-2", "ZST-3", "ZST-4"],
            compose([group], 6, [ZSTD], frames=frames).build(),
            [ZSTD],
            f"{text}.",
            "How rows are cut into frames, and which of the legal frame headers is used, is the writer's choice.",
        )

    def constant(rows: Array) -> bytes:
        body = raw_frame(
            b"", 0x20, bytes([rows.size]), (rows.size << 3 | 3).to_bytes(3, "little") + b"\x2a"
        )
        return zstd_payload([(len(rows), body, 0, 256)])

    same = np.full((1, 6, 2, 4), 42, np.uint8)
    plain = RawGroup(
        "key",
        "key",
        "float16",
        (0,),
        floats("rle", same.shape, "float16"),
        {QUALITY: Quant(same, np.float32([1]), np.int16([0]))},
    )
    good(
        suite,
        "zst",
        "rle-block",
        ["ZST-3", "ZST-4"],
        compose([plain], 6, [ZSTD], frames=constant).build(),
        [ZSTD],
        "A frame of one RLE block.",
        "Block types are those of RFC 8878.",
    )
    for level in (-7, 1, 19):
        slug = f"level-{'minus-' if level < 0 else ''}{abs(level)}"

        def frames(rows: Array, level: int = level) -> bytes:
            import zstandard

            body = zstandard.ZstdCompressor(level=level, write_checksum=False).compress(
                rows.tobytes()
            )
            return zstd_payload([(len(rows), body, 0, 256)])

        def make(frames: Any = frames) -> bytes:
            smooth = (
                np.arange(6 * 90).reshape(1, 90, 2, 3) // 7 % 40
                + noise("s", 540).reshape(1, 90, 2, 3) // 64
            )
            q = Quant(smooth.astype(np.uint8), np.float32([1]), np.int16([20]))
            group = RawGroup(
                "key", "key", "float16", (0,), floats("zs", q.q.shape, "float16"), {QUALITY: q}
            )
            return compose([group], 90, [ZSTD], frames=frames).build()

        good(
            suite,
            "zst",
            slug,
            ["ZST-3", "ZST-4"],
            Frozen(make),
            [ZSTD],
            f"A frame that libzstd made at level {level}.",
            "Compressed blocks with matches, Huffman and FSE tables occur in real files.",
            how="Made with the package zstandard and kept.",
        )
    exact = RawGroup("key", "key", "float32", (0, 1), special("float32"))

    def planes(rows: Array) -> bytes:
        parts = np.split(rows, 8)
        return zstd_payload([(len(p), raw_frame(p.tobytes()), 0, 256) for p in parts])

    good(
        suite,
        "zst",
        "exact-byte-planes",
        ["ZST-1", "ARI-8"],
        compose([exact], 16, [EXACT_ZSTD], frames=planes).build(),
        [EXACT_ZSTD],
        "An exact group of float32, a frame for each byte plane of each layer.",
        "The rows of an exact group are `[layer, byte, dim, head]`, byte 0 first.",
    )


def _extents(suite: Suite) -> None:
    for count, text in (
        (0, "No tokens at all"),
        (1, "One token"),
        (2, "Two tokens"),
        (256, "256 tokens, one block"),
        (257, "257 tokens, a last block of one"),
    ):
        groups = pair("bfloat16", 1, count, 1, 2)
        tracks = [STORED, ZSTD, EXACT]
        good(
            suite,
            "grp",
            f"tokens-{count}",
            ["GRP-1", "SEG-1", "TAB-2", "CID-1"],
            compose(groups, count, tracks).build(),
            tracks,
            f"{text}.",
            "Edges of token blocks; without tokens there are no segments, no sets and no data.",
        )
    q = np.full((1, 9, 1, 4), 128, np.uint8)
    group = RawGroup(
        "key",
        "key",
        "float16",
        (0,),
        floats("const", q.shape, "float16"),
        {QUALITY: Quant(q, np.float32([0.5]), np.int16([128]), np.float32([[[0, 1, -2, 3.5]]]))},
    )
    good(
        suite,
        "ari",
        "constant-channels",
        ["ARI-2", "ZST-5"],
        compose([group], 9, [STORED, ZSTD]).build(),
        [STORED, ZSTD],
        "Channels that are constant: all integers are the zero, radix 1.",
        "0 * scale + bias gives the bias, and +0 where that is +0.",
    )
    single = one_group("float32", (1, 1, 1, 1), seed="single", patches=())
    good(
        suite,
        "grp",
        "one-value",
        ["GRP-1", "SEG-1"],
        compose([single], 1, [STORED, ZSTD, EXACT]).build(),
        [STORED, ZSTD, EXACT],
        "One layer, one token, one head, one dim.",
        "The smallest tensor.",
    )


def _manifests(suite: Suite) -> None:
    """Manifests with members that a reader must accept."""
    value = {
        "must_understand": False,
        "value": {"a": [1, None, {"b": "é😀\n"}], "transform": "hadamard"},
    }
    extensions = {
        "com.example.note": value,
        "0": {"must_understand": False, "value": None},
        "a" * 64: {"must_understand": False, "value": [[[[[[[[[[[[0]]]]]]]]]]]]},
    }
    forms: dict[str, tuple[str, list[str], dict[str, Any], str, str]] = {
        "extensions-to-ignore": (
            "ext",
            ["EXT-3", "EXT-4", "EXT-1", "JSN-8"],
            {"extensions": extensions},
            "Unknown extensions that need not be understood, one of them 64 characters long, one as deep as is allowed.",
            "They change nothing; the digests are those of the same file without them.",
        ),
        "lossy-lineage": (
            "lin",
            ["LIN-2"],
            {"lineage": {"generations": 3, "kind": "lossy", "profile": None, "quality": "high"}},
            "Lineage `lossy` of three generations.",
            "Where a cache came from does not change how it is read.",
        ),
        "generator-with-any-text": (
            "jsn",
            ["JSN-7", "JSN-1", "MAN-1"],
            {"generator": 'a"\\\b\t\n\f\r\u0000\u001f\u007f/é模😀\u2028\ufeff\uffff'},
            "All escapes of the canonical form, DEL, characters of 2 to 4 bytes, U+2028, U+FEFF, a noncharacter.",
            "A serialiser that escapes more or less than section 2.1 refuses or makes other bytes.",
        ),
        "longest-generator": (
            "man",
            ["MAN-1"],
            {"generator": "é" * 512},
            "A text of 1,024 bytes, the most.",
            "Texts are measured in bytes of UTF-8.",
        ),
    }
    for slug, (family, requirements, members, what, why) in forms.items():
        good(suite, family, slug, requirements, tiny(**members).build(), [STORED], what, why)
    role = pair("float16", 1, 3, 1, 2)
    role[0].role, role[0].name = "something-new", "0-9"
    good(
        suite,
        "fea",
        "unknown-role",
        ["FEA-4"],
        compose(role, 3, [STORED]).build(),
        [STORED],
        "A role that no registry knows.",
        "Roles mean something to engines; a reader restores any.",
    )
