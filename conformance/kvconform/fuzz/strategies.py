"""Hypothesis strategies of plans of valid artifacts, of whatever the format allows in small.

``plans(codecs)`` is the one to start from: ``compose(draw(plans())).build()`` is a valid file.
Contents come from drawn seeds, so that examples stay small and shrink to the simplest structure.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Final

import numpy as np
from hypothesis import strategies as st

from kvconform.fuzz import video
from kvconform.fuzz.compose import EXACT, Group, Plan
from kvconform.fuzz.pieces import Bytes, Json, Quant, chain_hashes, noise
from kvconform.judge import ITEM_BYTES

ROLES: Final = ("key", "value", "latent", "indexer", "state", "something-new")
FLOATS: Final = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
LAYERS_TOTAL: Final = 64
MOST_VALUES: Final = 1_200
MOST_CELLS: Final = 40
_EXPONENTS: Final = {  # byte with the exponent's high bits, and a mask that clears one of them
    "float32": (3, 0xBF),
    "float16": (1, 0xBF),
    "bfloat16": (1, 0xBF),
    "float8_e4m3fn": (0, 0xBF),
    "float8_e5m2": (0, 0xBF),
}
SEEDS: Final = st.integers(0, 255)


def supported_codecs() -> frozenset[str]:
    """The codecs whose payloads can be made here; ``hevc`` needs PyAV with libx265."""
    return frozenset({"stored", "zstd", *(("hevc",) if video.available() else ())})


def finite_bytes(seed: str, shape: tuple[int, ...], dtype: str) -> Bytes:
    """Finite values of a dtype as bytes ``[..., item]``: any bits but one of the exponent."""
    raw = noise(seed, *shape, ITEM_BYTES[dtype]).copy()
    byte, mask = _EXPONENTS[dtype]
    raw[..., byte] &= mask
    return raw


@st.composite
def quants(draw: st.DrawFn, group: Group) -> Quant:
    """Integers, a set with any combination of flags, and side data for a group."""
    layers, tokens, heads, dims, item = group.source.shape
    seed = f"quant-{draw(SEEDS)}-"
    full = (layers, heads, dims)
    low = draw(st.sampled_from([128, 0, 100, 240, 255]))
    width = draw(st.sampled_from([1, 2, 3, 5, 16, 17, 256]))
    q = noise(seed + "q", layers, tokens, heads, dims).astype(np.int64)
    q = np.clip(low + q % width, 0, 255)

    def channels(name: str, many: bool) -> Any:
        return noise(seed + name, *(full if many else (layers,))).astype(np.float32)

    power = draw(st.sampled_from([-4, 0, -40, -12, 8, 39]))
    many = draw(st.booleans())
    scale = np.float32(2.0**power) * (1 + channels("scale", many) / 256)
    base = draw(st.sampled_from([128, 0, -1, 256, -32_768, 32_512]))
    zero = base + channels("zero", draw(st.booleans())).astype(np.int64) % 8
    bias = None
    if draw(st.booleans()):
        size = draw(st.sampled_from([1.0, 0.0, 2.0**-58, 2.0**95]))
        bias = ((channels("bias", True) - 128) / 64 * np.float32(size)).astype(np.float32) + 0
    order = None
    if draw(st.booleans()):
        order = np.argsort(noise(seed + "order", *full), axis=-1, kind="stable")
    count = draw(st.sampled_from([0, 1, 2, 5, 256]))
    factor = np.float32(2.0 ** draw(st.sampled_from([0, -3, 8])))
    token_scale = factor * (1 + np.arange(count, dtype=np.float32) / 64)
    index = noise(seed + "index", layers, tokens).astype(np.int64) % max(count, 1)
    places = [(layer, token) for layer in range(layers) for token in range(tokens)]
    chosen = draw(st.lists(st.sampled_from(places), max_size=4, unique=True)) if places else []
    rows = finite_bytes(seed + "patch", (len(chosen), heads, dims), group.dtype)
    return Quant(
        q=q.astype(np.uint8),
        scale=scale.astype(np.float32),
        zero=zero.astype(np.int16),
        bias=bias,
        order=order,
        token_scale=token_scale.astype(np.float32),
        index=index.astype(np.uint8),
        patches={place: rows[n].reshape(heads, dims * item) for n, place in enumerate(chosen)},
    )


@st.composite
def extents(draw: st.DrawFn, count: int, first_position: int, dims: int) -> Json:
    """Which tokens a group holds."""
    kind = draw(st.sampled_from(["all", "all", "all", "window", "state"]))
    if kind == "state":
        factors = [2, dims // 2] if dims % 2 == 0 else [dims, 1]
        return {"kind": kind, "shape": draw(st.sampled_from([[dims], factors]))}
    if kind == "window":
        start = draw(st.integers(0, count))
        return {
            "cumulative_tokens": first_position + count, "held_start": start, "kind": kind
        }  # fmt: skip
    return {"kind": kind}


@st.composite
def groups(
    draw: st.DrawFn, number: int, count: int, first_position: int, qualities: Set[str]
) -> Group:
    """A group with its quantisations; its layers are 4 of the role's own, so none clash."""
    dtype = draw(st.sampled_from([*FLOATS, "uint8"]))
    layers = draw(st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True).map(sorted))
    heads = draw(st.integers(1, 3))
    dims = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 300]))
    tokens = draw(extents(count, first_position, dims))
    held = 1 if tokens["kind"] == "state" else count - tokens.get("held_start", 0)
    if len(layers) * held * heads * dims > MOST_VALUES:
        layers, heads, dims = layers[:1], 1, min(dims, 2)
        if tokens["kind"] == "state":
            tokens = {"kind": "state", "shape": [dims]}
    seed = f"source-{draw(SEEDS)}"
    shape = (len(layers), held, heads, dims)
    first = draw(st.integers(0, 2))
    group = Group(
        f"group-{number}",
        ROLES[number],
        dtype,
        tuple(layers),
        noise(seed, *shape, ITEM_BYTES[dtype]),
        tokens,
        head_start=first,
        heads_total=first + heads + draw(st.integers(0, 1)),
        run_layers=draw(st.integers(1, 3)),
        run_heads=draw(st.integers(1, heads)),
    )
    if dtype != "uint8" and tokens["kind"] != "state":
        for quality in sorted(qualities):
            if draw(st.integers(0, 3)):
                group.quants[quality] = draw(quants(group))
    return group


@st.composite
def layouts(draw: st.DrawFn, group: Group, segment_tokens: int) -> Json:
    """A layout of section 10.4 that has room for every segment of a group."""
    channels = group.run_heads * group.source.shape[3]
    th = draw(st.integers(1, min(3, channels)))
    tw = -(-channels // th)
    fh, fw = draw(st.sampled_from([(1, 1), (2, 2), (1, 3)]))
    gr, gc = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    tokens = min(segment_tokens, max(group.source.shape[1], 1))
    return {
        "fold": [fh, fw],
        "frames": -(-tokens // (fh * fw * gr * gc)),
        "grid": [gr, gc],
        "height": max(144, -(-gr * th * fh // 16) * 16),
        "order": draw(st.sampled_from(["time", "raster"])),
        "tile": [th, tw],
        "width": max(144, -(-gc * tw * fw // 16) * 16),
    }


HASHES: Final = st.tuples(st.sampled_from(["blake3", "sha256"]), SEEDS).map(
    lambda pair: f"{pair[0]}:{noise(str(pair[1]), 32).tobytes().hex()}"
)
TEXTS: Final = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8
)


def _finite_bits(seed: int) -> str:
    return f"{0x3F000000 + seed:08x}"


@st.composite
def identities(draw: st.DrawFn, kind: str) -> Json:
    """An identity object (section 6.1)."""
    maybe_hash = st.none() | HASHES
    rope: list[Json] = []
    for start in range(draw(st.integers(0, 2))):
        digits = "".join(_finite_bits(draw(SEEDS)) for _ in range(draw(st.integers(1, 3))))
        rope.append(
            {
                "inv_freq": digits,
                "keys_rotated": draw(st.booleans()),
                "layers": [start, start + 2],
                "pairing": draw(st.sampled_from(["half", "interleaved"])),
                "scaling": "3ff0000000000000",
            }
        )
    key = {
        "engine": draw(TEXTS),
        "engine_version": draw(st.none() | TEXTS),
        "hash_algorithm": "sha256",
        "key": draw(TEXTS),
        "rank": draw(st.integers(0, 3)),
        "world_size": 4,
    }
    scales: Json = {
        "name": "per-layer",
        "scales": [{"bits": _finite_bits(draw(SEEDS)), "layer": 1, "role": "key"}],
    }
    return {
        "adapters": [{"digest": draw(maybe_hash), "id": draw(TEXTS)}]
        if draw(st.booleans())
        else [],
        "cache_dtype": draw(st.sampled_from(["bfloat16", "fp8_e5m2"])),
        "component": draw(st.sampled_from(["main", "draft"])),
        "engine_key": key if kind == "engine_key" else None,
        "kind": kind,
        "layers_total": LAYERS_TOTAL,
        "model": {
            "id": draw(TEXTS),
            "revision": draw(st.none() | TEXTS),
            "weights_digest": draw(maybe_hash),
        },
        "rope": rope,
        "rotation": draw(st.sampled_from([None, {"digest": None, "name": "hadamard"}])),
        "scale_scheme": draw(st.sampled_from([None, scales])),
        "tokenizer": draw(st.sampled_from([None, {"digest": None, "id": "t"}])),
    }


@st.composite
def bindings(draw: st.DrawFn, count: int) -> tuple[Json, Json, list[int] | None, bytes]:
    """Identity, tokens, and for a chain the ids from position 0 on and the salt."""
    kind = draw(st.sampled_from(["unbound", "tokens", "engine_key"]))
    identity = draw(identities(kind))
    if kind != "tokens":
        first = draw(st.sampled_from([0, 1, 256, 1_000_003]))
        spans: list[Json] = []
        if count and draw(st.booleans()):
            digest = draw(st.none() | HASHES)
            spans = [{"count": 1, "digest": digest, "kind": "image", "start": first + count - 1}]
        tokens: Json = {"chain": None, "content": spans, "count": count, "first_position": first}
        return identity, tokens, None, b""
    first = draw(st.sampled_from([0, 0, 256, 512]))
    salt = draw(st.sampled_from([b"", b"a salt"]))
    seed = draw(SEEDS)
    ids = [int(byte) * 97 + seed for byte in noise(f"ids-{seed}", first + count)] if count else (
        [int(byte) for byte in noise("ids", first)] if first else []
    )  # fmt: skip
    hashes = chain_hashes(identity, ids, salt, [])
    block = first // 256
    chain = {
        "block_tokens": 256,
        "hashes": [item.hex() for item in hashes[block + 1 :]],
        "parent": hashes[block].hex() if first else None,
        "salted": bool(salt),
    }
    tokens = {"chain": chain, "content": [], "count": count, "first_position": first}
    return identity, tokens, ids, salt


@st.composite
def tracks(
    draw: st.DrawFn, found: list[Group], quality: str, codecs: Set[str], first: str
) -> list[tuple[str, str, list[str]]]:
    """At least one track of a quality, each in one codec or a mixture."""
    video_fits = any(quality in g.quants and g.layout is not None for g in found)
    names = sorted(codecs - (set() if video_fits else {"hevc"}))
    chosen = draw(st.lists(st.sampled_from(names), unique=True, max_size=2))
    result = []
    for codec in dict.fromkeys([first, *chosen]) if first in names else chosen or ["stored"]:
        plain = st.sampled_from(sorted(codecs - {"hevc"}))
        mine = [codec] * len(found)
        if draw(st.booleans()):
            mine = [codec, *(draw(plain) for _ in found[1:])]
        if codec == "hevc":
            fits = [quality in g.quants and g.layout is not None for g in found]
            mine = ["hevc" if ok else draw(plain) for ok in fits]
        result.append((f"{quality}/{codec}", quality, mine))
    return result


@st.composite
def plans(draw: st.DrawFn, codecs: Set[str] = frozenset({"stored", "zstd"})) -> Plan:
    """Plans of whole artifacts; compose gives their parts."""
    count = draw(st.one_of(st.integers(0, 12), st.sampled_from([256, 257, 513])))
    identity, tokens, ids, salt = draw(bindings(count))
    names = draw(st.sampled_from([{"near-lossless"}, {"near-lossless", "small"}, set[str]()]))
    found = [
        draw(groups(number, count, tokens["first_position"], names))
        for number in range(draw(st.integers(1, 3)))
    ]
    qualities = [name for name in sorted(names) if any(name in g.quants for g in found)]
    if not qualities or draw(st.booleans()):
        qualities.append(EXACT)
    for group in found:  # what no quality uses is no part of the artifact
        group.quants = {name: item for name, item in group.quants.items() if name in qualities}
    smallest = -(-count // 4) or 1
    segment_tokens = smallest if draw(st.booleans()) else draw(
        st.sampled_from([s for s in (smallest, 5, 16, 256, 65_536) if s >= smallest])
    )  # fmt: skip
    for group in found:
        cells = -(-len(group.layers) // group.run_layers) * -(
            -group.source.shape[2] // group.run_heads
        )
        if cells * -(-count // segment_tokens) > MOST_CELLS // len(found):
            group.run_layers, group.run_heads = 3, group.source.shape[2]
        small = group.run_heads * group.source.shape[3] <= 60 and count <= 12
        if "hevc" in codecs and group.quants and group.source.shape[1] and small:
            group.layout = draw(layouts(group, segment_tokens))
    first = draw(st.sampled_from(sorted(codecs)))
    every = [item for name in qualities for item in draw(tracks(found, name, codecs, first))]
    extension = {"com.example.note": {"must_understand": False, "value": [1, {"a": "\u20ac"}]}}
    plan = Plan(
        found,
        count,
        tokens["first_position"],
        identity,
        tokens,
        qualities,
        every,
        segment_tokens=segment_tokens,
        order=draw(st.sampled_from(["token-major", "layer-major"])),
        frame_rows=draw(st.sampled_from([1_000, 1, 7])),
        extensions=draw(st.sampled_from([{}, extension])),
        token_ids=ids,
        salt=salt,
    )
    plan.alignment = draw(st.sampled_from([1, 4096])) if _objects(plan) <= 12 else 1
    return plan


def _objects(plan: Plan) -> int:
    """About how many objects the data has."""
    blocks = -(-plan.count // plan.segment_tokens) or 1
    cells = sum(
        -(-len(g.layers) // g.run_layers) * -(-int(g.source.shape[2]) // g.run_heads) * blocks
        for g in plan.groups
    )
    return cells * (len(plan.tracks) + len(plan.qualities))


@st.composite
def selections(draw: st.DrawFn, plan: Plan) -> dict[str, tuple[int, int]]:
    """Parts that an artifact holds: intervals by name of the argument of ``Restored.digests``."""
    held = sorted({layer for group in plan.groups for layer in group.layers})
    chosen: dict[str, tuple[int, int]] = {}
    selected = plan.groups
    if draw(st.booleans()):
        start = draw(st.sampled_from(held))
        runs = [stop for stop in range(start + 1, 9) if set(range(start, stop)) <= {*held}]
        stop = draw(st.sampled_from(runs))
        chosen["layers"] = (start, stop)
        selected = [g for g in plan.groups if any(start <= x < stop for x in g.layers)]
    plain = all(g.tokens["kind"] == "all" for g in plan.groups)  # others serve no part (LEN-3)
    if plan.count and plain and draw(st.booleans()):
        start = draw(st.integers(0, plan.count - 1))
        chosen["tokens"] = (start, draw(st.integers(start + 1, plan.count)))
    low = max(g.head_start for g in selected)
    high = min(g.head_start + g.source.shape[2] for g in selected)
    states = any(g.tokens["kind"] == "state" for g in selected)
    if low < high and not states and draw(st.booleans()):
        start = draw(st.integers(low, high - 1))
        chosen["heads"] = (start, draw(st.integers(start + 1, high)))
    return chosen
