"""Tensors, SPEC and what follows from it, for the cases of ``encode`` (section 8 of the protocol)."""

# ruff: noqa: E501, PLR0917 - long sentences and tables

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from conformance.generate.compose import IDENTITY, Array, RawGroup, as_bytes, chain, floats, noise
from conformance.generate.suite import Case, Operation, Suite
from tests.builder import b3, canonical
from tests.reference import DTYPES

Json = dict[str, Any]
HOW = "SPEC and its tensors are made by hand; the expected members follow from them, not from any writer."


def spec_of(groups: Sequence[RawGroup], count: int, tracks: Sequence[str], **members: Any) -> Json:
    """SPEC; the file of a group is its name with the suffix ``.bin``."""
    value = {
        "content": [],
        "first_position": 0,
        "groups": [{**group.to_json(), "file": f"{group.name}.bin"} for group in groups],
        "identity": IDENTITY,
        "restored_from": None,
        "salt": None,
        "segmentation": None,
        "token_count": count,
        "token_ids": None,
        "tracks": list(tracks),
        "valid_lengths": None,
    }
    unknown = set(members) - set(value)
    if unknown:
        raise ValueError(f"SPEC has no {unknown}")
    return {**value, **members}


def encoded_of(spec: Json, groups: Sequence[RawGroup]) -> Json:
    """What the file must hold."""
    source = b3(b"".join(b3(layer.tobytes()) for group in groups for layer in group.source)).hex()
    described = [group.to_json() for group in groups]
    identified = {"groups": described, "identity": spec["identity"], "source_digest": source}
    first, count = spec["first_position"], spec["token_count"]
    return {
        "manifest": {
            "content_id": b3(canonical(identified)).hex(),
            **identified,
            "lineage": lineage_of(spec["restored_from"]),
            "tokens": {
                "chain": chain_of(spec),
                "content": [span for span in spec["content"] if span["start"] >= first],
                "count": count,
                "first_position": first,
            },
            "valid_lengths": spec["valid_lengths"],
        },
        "tracks": spec["tracks"],
        "digests": {group.name: b3(group.source.tobytes()).hex() for group in groups},
    }


def lineage_of(source: Json | None) -> Json:
    """LIN-1."""
    if source is None:
        return {"kind": "exact"}
    lineage: Json = source["lineage"]
    if source["quality"] == "exact":
        return lineage
    generations = lineage.get("generations", 0) + 1
    return {
        "generations": generations,
        "kind": "lossy",
        "profile": None,
        "quality": source["quality"],
    }


def chain_of(spec: Json) -> Json | None:
    """TOK-1 to TOK-7."""
    if spec["token_ids"] is None:
        return None
    first, count = spec["first_position"], spec["token_count"]
    spans = [span for span in spec["content"] if span["digest"] is not None]
    blocks = -(-count // 256)
    for span in spec["content"]:
        if span["digest"] is None:
            blocks = (span["start"] - first) // 256
            break
    salt = bytes.fromhex(spec["salt"] or "")
    links = chain(spec["identity"], spec["token_ids"], salt, spans, first + count)
    return {
        "block_tokens": 256,
        "hashes": [link.hex() for link in links[1 + first // 256 :][:blocks]],
        "parent": links[first // 256].hex() if first else None,
        "salted": bool(salt),
    }


def render(spec: Json) -> bytes:
    """SPEC as people read it: one member a line."""
    rows = [f'"{key}": {json.dumps(value, ensure_ascii=False)}' for key, value in spec.items()]
    return ("{\n" + ",\n".join(rows) + "\n}\n").encode()


def normal(seed: str, shape: tuple[int, int, int, int], dtype: str) -> Array:
    """Values like those of a cache, as bytes ``[..., item]``: sums of four bytes, scaled by dim."""
    raw = noise(seed, 4 * int(np.prod(shape))).reshape(4, *shape).astype(np.float32)
    values = (raw.sum(axis=0) - 510) / 128 * (1 + np.arange(shape[3]) % 3)
    return as_bytes(values.astype(np.float32).astype(DTYPES[dtype]))


def pair(count: int, dtype: str = "bfloat16", *, seed: str = "pair") -> list[RawGroup]:
    """Keys and values of three layers, two heads, four dims."""
    return [
        RawGroup(name, role, dtype, (0, 1, 3), normal(f"{seed}-{role}", (3, count, 2, 4), dtype))
        for name, role in (("keys", "key"), ("values", "value"))
    ]


def bytes_group(count: int) -> list[RawGroup]:
    """One opaque byte a token."""
    return [RawGroup("key", "key", "uint8", (0,), floats("ids", (1, count, 1, 1), "uint8"))]


def every_dtype() -> list[RawGroup]:
    """All dtypes, any bytes: NaN payloads, infinities, subnormals and negative zeros among them."""
    groups = []
    for number, (name, dtype) in enumerate(DTYPES.items()):
        shape = (2, 5, 2, 3)
        raw = noise(f"enc-{name}", int(np.prod(shape)) * dtype.itemsize)
        source = raw.reshape(*shape, dtype.itemsize).copy()
        source[0, 0, 0, :, :] = 0xFF
        source[0, 1, 0, :, :-1], source[0, 1, 0, :, -1] = 0, 0x80
        slug = name.replace("_", "-")
        groups.append(RawGroup(slug, f"role-{number}", name, (1, 4), source))
    return groups


def with_window(count: int = 10) -> list[RawGroup]:
    """A whole group, a sliding window and a state."""
    held = count - 3
    near = {"cumulative_tokens": count, "held_start": 3, "kind": "window"}
    return [
        RawGroup("far", "key", "float16", (0, 2), normal("far", (2, count, 1, 4), "float16")),
        RawGroup(
            "near", "key", "float16", (1,), normal("near", (1, held, 1, 4), "float16"), tokens=near
        ),
        RawGroup(
            "rec",
            "state",
            "float32",
            (3,),
            floats("rec", (1, 1, 2, 6), "float32"),
            tokens={"kind": "state", "shape": [2, 3]},
        ),
    ]


def with_value(groups: list[RawGroup], where: tuple[int, ...], bits: bytes) -> list[RawGroup]:
    """The last group with one element changed."""
    source = groups[-1].source.copy()
    source[where] = np.frombuffer(bits, np.uint8)
    groups[-1].source = source
    return groups


def needs(tracks: Sequence[str]) -> tuple[str, ...]:
    """What a writer must declare: the tracks, and codecs to read them."""
    codecs = sorted({track.split("/")[1] for track in tracks} - {"stored"})
    return (*(f"codec:{name}" for name in codecs), *(f"encode:{name}" for name in tracks))


def good(
    suite: Suite,
    slug: str,
    requirements: str,
    groups: Sequence[RawGroup],
    count: int,
    tracks: Sequence[str],
    what: str,
    why: str,
    *,
    level: str = "core",
    **members: Any,
) -> None:
    """A file that must be written."""
    spec = spec_of(groups, count, tracks, **members)
    operation = Operation("encode", encoded=encoded_of(spec, groups))
    suite.add(
        Case(
            "enc",
            slug,
            level,
            tuple(requirements.split()),
            render(spec),
            [operation],
            what,
            why,
            HOW,
            needs(tracks),
            {f"{group.name}.bin": group.source.tobytes() for group in groups},
        )
    )


def bad(
    suite: Suite,
    slug: str,
    requirements: str,
    groups: Sequence[RawGroup],
    count: int,
    tracks: Sequence[str],
    code: str | tuple[str, ...],
    what: str,
    why: str,
    *,
    existing: bool = False,
    files: dict[str, bytes] | None = None,
    limits: tuple[str, ...] = (),
    **members: Any,
) -> None:
    """A file that must not be written."""
    spec = spec_of(groups, count, tracks, **members)
    suite.add(
        Case(
            "enc",
            slug,
            "faulty",
            tuple(requirements.split()),
            render(spec),
            [Operation("encode", code=code, existing=existing)],
            what,
            why,
            HOW,
            needs(tracks),
            files or {f"{group.name}.bin": group.source.tobytes() for group in groups},
            limits,
        )
    )
