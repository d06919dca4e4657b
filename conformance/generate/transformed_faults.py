"""Broken artifacts with transformed groups, and profiles that are missing, broken or do not fit.

Each artifact names the profile that it comes with, also a broken one: its digest is right.
"""

# ruff: noqa: E501, PLR0917 - long sentences and tables

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from conformance.generate.compose import EXACT, STORED, put
from conformance.generate.core import HAND
from conformance.generate.suite import Case, Operation, Suite, decode, inspect, verify
from conformance.generate.transform_parts import (
    DIMS,
    FEATURE,
    HEADS,
    PROFILE,
    rope,
    tiny,
    transform,
)
from conformance.generate.transformed import GIVEN
from tests.builder import Builder
from tests.transformed import (
    MAGIC,
    MODEL,
    Transform,
    assembled,
    canonical,
    cut_profile,
    profile_file,
    profile_with,
)

MISSING, CONTENT = "profile.missing", "profile.content"


def _add(
    suite: Suite,
    slug: str,
    requirements: str,
    data: bytes,
    operations: Sequence[Operation],
    what: str,
    why: str,
    *,
    files: dict[str, bytes] | None = None,
) -> None:
    ids = tuple(requirements.split())
    needs = (f"feature:{FEATURE}",)
    suite.add(
        Case(
            ids[0][:3].lower(), slug, "faulty", ids, data, list(operations), what, why, HAND,
            needs, files=files or {},
        )
    )  # fmt: skip


def add_cases(suite: Suite) -> None:
    """All of this module."""
    _manifests(suite)
    _sets(suite)
    _missing(suite)
    _headers(suite)
    _fronts(suite)
    _structures(suite)
    _numbers(suite)
    _fits(suite)


# --- the artifact ----------------------------------------------------------------------------


def _manifests(suite: Suite) -> None:
    schema, semantics = "manifest.schema", "manifest.semantics"

    def removed(key: str) -> Callable[[Builder], Any]:
        return lambda builder: builder.manifest.pop(key)

    def changed(**members: Any) -> Callable[[Builder], Any]:
        return lambda builder: builder.manifest.update(members)

    def encodings(builder: Builder) -> None:
        builder.manifest["qualities"][0]["encodings"] = ["quantised"]

    for slug, rules, code, change, what in (
        ("no-profile", "TRF-1", schema, removed("profile"), "The feature without `profile`."),
        ("no-feature", "TRF-1 FEA-1", schema, changed(features=[]), "`profile` and no feature."),
        ("nothing-transformed", "TRF-1", semantics, encodings, "No group is transformed."),
        (
            "profile-with-place",
            "TRF-1 MAN-1 SEC-1",
            schema,
            changed(profile={"digest": "1" * 64, "url": "http://127.0.0.1:9/profile.kvp"}),
            "`profile` with a second member, a URL.",
        ),
    ):  # fmt: skip
        builder, _ = tiny()
        change(builder)
        calls = [verify(code), inspect(code)]
        why = "Who reads the manifest must know from it alone whether a profile is needed."
        _add(suite, slug, rules, builder.build(), calls, what, why)
    builder, _ = tiny()
    builder.manifest["features"] = []
    builder.manifest.pop("profile")
    calls = [verify(schema), inspect(schema)]
    what = "An encoding `transformed`, and neither the feature nor `profile`."
    why = "A reader that lacks the feature must see an unknown encoding."
    _add(suite, "encoding-alone", "TRF-1 QUA-1 FEA-1", builder.build(), calls, what, why)
    builder, _ = tiny()
    builder.manifest["groups"][0]["dtype"] = "uint8"
    calls = [verify("manifest.semantics"), inspect("manifest.semantics")]
    what = "A transformed group of opaque bytes."
    why = "What holds of quantised groups holds of transformed ones."
    _add(suite, "opaque-bytes", "QUA-3", builder.build(), calls, what, why)
    builder, _ = tiny(cut=(3, 1))
    calls = [verify("manifest.semantics"), inspect("manifest.semantics")]
    what = "Segments of a transformed group that hold one head of two."
    why = "The product needs the coefficients of all heads."
    _add(suite, "heads-cut", "TRF-2", builder.build(), calls, what, why)


def _sets(suite: Suite) -> None:
    full = (2, HEADS, DIMS)
    order = np.tile(np.arange(DIMS, dtype=np.uint8), (2, HEADS, 1))
    why = "What channels differ in is in the matrix; a reader may rely on a set without it."
    for slug, changes, what in (
        ("scale-per-channel", {"scale": np.ones(full, np.float32)}, "A scale per channel."),
        ("zero-per-channel", {"zero": np.full(full, 128, np.int16)}, "A zero per channel."),
        ("bias", {"bias": np.zeros(full, np.float32)}, "A bias of +0."),
        ("order", {"order": order}, "An order that changes nothing."),
        ("zero-127", {"zero": np.int16([128, 127])}, "The zero of one layer is 127."),
    ):
        builder, profile = tiny(patches=(), **changes)
        calls = [verify("set.content"), decode(STORED, *GIVEN, code="set.content")]
        said = f"{what} The group is transformed."
        files = {PROFILE: profile}
        _add(suite, f"set-{slug}", "TRF-3", builder.build(), calls, said, why, files=files)


# --- the profile -----------------------------------------------------------------------------


def _missing(suite: Suite) -> None:
    builder, profile = tiny()
    other = tiny(profile=lambda made: profile_file(made[:1]))[1]
    front = len(profile) - len(cut_profile(profile)[1])
    data = builder.build()
    calls = [
        verify(),
        inspect(),
        decode(EXACT),
        decode(STORED, code=MISSING),
        decode(STORED, "--profile", "other.kvp", code=MISSING),
        decode(STORED, "--profile", "cut.kvp", code="file.size"),
        decode(STORED, "--profile", "changed.kvp", code="manifest.digest"),
        decode(STORED, "--profile", "damaged.kvp", code=CONTENT),
        decode(STORED, "--profile", "flipped.kvp", code=CONTENT),
        decode(STORED, *GIVEN),
    ]
    files = {
        PROFILE: profile,
        "other.kvp": other,
        "cut.kvp": profile[:-1],
        "changed.kvp": profile[: front - 9] + b"~" + profile[front - 8 :],
        "flipped.kvp": profile[: front + 4] + b"\1" + profile[front + 5 :],
        "damaged.kvp": profile[: front + 9] + b"~~~~" + profile[front + 13 :],
    }
    what = (
        "No profile, another one, and the right one cut, changed in its manifest and in its data."
    )
    why = "Without the matrices the integers mean nothing, and values of other matrices look alike."
    rules = "TRF-4 PRF-3 HDR-5 HDR-10 ORD-1 ERR-1"
    _add(suite, "profile-missing-or-damaged", rules, data, calls, what, why, files=files)


def _headers(suite: Suite) -> None:
    builder, profile = tiny()
    manifest, data = cut_profile(profile)
    version = {"fixed": MAGIC + struct.pack("<HHI", 0, 10, 128)}
    magic = {"fixed": b"\x89KVF\r\n\x1a\n" + struct.pack("<HHI", 0, 9, 128)}
    unlike = (
        ("magic.kvp", MISSING, assembled(manifest, data, **magic)),
        ("version.kvp", MISSING, assembled(manifest, data, **version)),
        ("reserved.kvp", MISSING, assembled(manifest, data, reserved=bytes(23) + b"\1")),
        ("check.kvp", MISSING, profile[:20] + b"~" + profile[21:]),
        ("empty.kvp", MISSING, b""),
        ("longer.kvp", "file.size", profile + b"\0"),
        ("tables.kvp", CONTENT, assembled(manifest, data, tables_bytes=1)),
    )
    calls = [decode(STORED, "--profile", name, code=code) for name, code, _ in unlike]
    what = "The right manifest and data, behind seven headers that are not right."
    why = "A file that is no profile of this version is not the one that was asked for."
    files = {name: file for name, _, file in unlike}
    rules = "TRF-4 HDR-2 HDR-3 HDR-6 HDR-10 ORD-1"
    _add(suite, "profile-headers", rules, builder.build(), calls, what, why, files=files)


def _fronts(suite: Suite) -> None:
    good = tiny()[1]

    def text(change: Callable[[bytes], bytes]) -> Callable[[list[Transform]], bytes]:
        manifest, data = cut_profile(good)
        return lambda _: assembled(change(canonical(manifest)), data)

    def member(name: str, value: Any) -> Callable[[list[Transform]], bytes]:
        manifest, _ = cut_profile(good)
        return lambda _: profile_with(good, {**manifest, name: value})

    def extension(value: Any, *, must: bool = False) -> Callable[[list[Transform]], bytes]:
        return member("extensions", {"com.example.a": {"must_understand": must, "value": value}})

    nested: list[Any] = []
    for _ in range(13):
        nested = [nested]
    why = "A profile is read by the steps of an artifact, and refused with their codes."
    for slug, rules, code, what, make in (
        ("key-twice", "JSN-3", "manifest.duplicate-key", "A key twice.", text(lambda t: b'{"data_bytes":1,' + t[1:])),
        ("not-canonical", "JSN-7", "manifest.canonical", "A space at the end.", text(lambda t: t + b" ")),
        ("other-feature", "FEA-2", "feature.unknown", "A feature besides.", member("features", ["no-such-feature", FEATURE])),
        ("extension", "EXT-2", "extension.unknown", "An extension that must be understood.", extension(1, must=True)),
        ("depth-17", "JSN-8", CONTENT, "JSON of depth 17.", extension(nested)),
        ("other-format", "PRF-1", CONTENT, "The format of an artifact.", member("format", "kvformat")),
        ("other-version", "PRF-1", CONTENT, "Version 0.10, behind a header of 0.9.", member("version", "0.10")),
    ):  # fmt: skip
        _case(suite, f"profile-{slug}", f"PRF-1 ORD-1 {rules}", what, why, make, code=code)


def _case(
    suite: Suite,
    slug: str,
    rule: str,
    what: str,
    why: str,
    made: Callable[[list[Transform]], bytes],
    *,
    code: str = CONTENT,
    change: Callable[[dict[str, Any]], Any] = lambda _: None,
) -> None:
    """An artifact that names a profile which is broken, or does not fit it."""
    builder, profile = tiny(profile=made)
    change(builder.manifest["identity"])
    calls = [verify(), decode(STORED, *GIVEN, code=code)]
    _add(suite, slug, rule, builder.build(), calls, what, why, files={PROFILE: profile})


def _structures(suite: Suite) -> None:
    good = tiny()[1]

    def edited(pointer: str, value: Any) -> Callable[[list[Transform]], bytes]:
        def make(_: list[Transform]) -> bytes:
            manifest, _data = cut_profile(good)
            put(manifest, pointer, value)
            return profile_with(good, manifest)

        return make

    def longer(_: list[Transform]) -> bytes:
        manifest, data = cut_profile(good)
        return assembled(manifest, data + b"\0")

    def unnamed(_: list[Transform]) -> bytes:
        manifest, data = cut_profile(good)
        manifest["data_bytes"] += 1
        return assembled(manifest, data + b"\0")

    why = "A profile is as strict as an artifact: what a reader overlooks, another reads otherwise."
    for slug, rule, what, make in (
        ("byte-behind", "PRF-1", "A byte behind the last object.", longer),
        ("unnamed-byte", "PRF-1", "A byte that no object has.", unnamed),
        ("data-bytes", "PRF-1", "data_bytes is 1.", edited("data_bytes", 1)),
        ("unknown-member", "PRF-1", "A member that the text does not define.", edited("zz", 1)),
        ("feature-twice", "PRF-1", "The feature is listed twice.", edited("features", [FEATURE] * 2)),
        ("unknown-dtype", "PRF-1", "A matrix of int8.", edited("transforms/1/dtype", "int8")),
        ("other-dtype", "PRF-1", "int16 said of a matrix of int32.", edited("transforms/0/dtype", "int16")),
        ("pairs-0", "PRF-1", "A pairing without pairs.", edited("transforms/0/pairs", 0)),
        ("pairs-3", "PRF-1", "Three pairs of four dims.", edited("transforms/0/pairs", 3)),
        ("pairing-none", "PRF-1", "Pairs and the pairing `none`.", edited("transforms/0/pairing", "none")),
        ("descending", "PRF-1", "Transforms in descending order.", lambda made: profile_file(made[::-1])),
        ("unneeded-pairs-0", "PRF-1", "A pairing without pairs in a transform that nobody needs.", unneeded("half", 0)),
        ("unneeded-pairs-3", "PRF-1", "Three pairs of four dims there.", unneeded("half", 3)),
        ("unneeded-none", "PRF-1", "Pairs and the pairing `none` there.", unneeded("none", 2)),
        ("twice", "PRF-2", "A transform twice.", lambda made: profile_file([made[0], *made])),
        ("channels", "PRF-6", "Heads 129 and head_dim 128: 16,512 channels.", channels),
        ("writer-digest", "PRF-1", "Another digest of the writer's part.", edited("writer/digest", "0" * 64)),
    ):  # fmt: skip
        _case(suite, f"profile-{slug}", rule, what, why, make)


def unneeded(pairing: str, pairs: int) -> Callable[[list[Transform]], bytes]:
    """A further transform, of layer 63, whose object is as long as its number of pairs says."""
    last = transform("key", 63, pairing=pairing, pairs=pairs)
    return lambda made: profile_file([*made, last])


def two_dims(made: list[Transform]) -> bytes:
    """One layer's transform for smaller heads, which turns nothing."""
    return profile_file([transform("key", 1, dims=2), *made[1:]])


def channels(made: list[Transform]) -> bytes:
    """More channels than may be; nobody needs to allocate for them."""
    manifest, data = cut_profile(profile_file(made))
    manifest["transforms"][0].update(heads=129, head_dim=128)
    return assembled(manifest, data)


def _numbers(suite: Suite) -> None:
    why = "Within these ranges no operation overflows and every sum is exact, on every machine."

    def edited(name: str, index: Any, value: Any) -> Callable[[list[Transform]], bytes]:
        def make(made: list[Transform]) -> bytes:
            array = getattr(made[0], name).copy()
            array[index] = value
            setattr(made[0], name, array)
            return profile_file(made)

        return make

    row = np.array([-65_536, 65_537, 0, 0, 0, 0, 0, 0])
    turn = np.array([1.0, 1.0])
    above = np.array([1 + 2.0**-42, 0.0])
    little = np.array([0.6, 0.8]) * (1 + 2.0**-39)
    nan, inf = np.float32(np.nan), np.float32(np.inf)
    for slug, rule, what, make in (
        ("row-131073", "PRF-4", "A row that adds up to 131,073.", edited("matrix", 3, row)),
        ("smallest-integer", "PRF-4", "An integer -2^31.", edited("matrix", (7, 7), -(2**31))),
        ("row-scale-0", "PRF-5", "A row_scale of 0.", edited("row_scale", 3, 0)),
        ("row-scale-2-23", "PRF-5", "A row_scale of 2^23.", edited("row_scale", 7, 2.0**23)),
        ("row-scale-2-41", "PRF-5", "A row_scale of 2^-41.", edited("row_scale", 0, 2.0**-41)),
        ("row-scale-nan", "PRF-5", "A row_scale that is no number.", edited("row_scale", 0, nan)),
        ("mean-minus-zero", "PRF-5", "A mean of -0.", edited("mean", 0, -0.0)),
        ("mean-infinite", "PRF-5", "An infinite mean.", edited("mean", 5, inf)),
        ("mean-tiny", "PRF-5", "A mean of 2^-65.", edited("mean", 5, 2.0**-65)),
        ("cos-above-1", "PRF-5", "A cosine of 1.5.", edited("turns", (0, 1), 1.5)),
        (
            "cos-a-little-above-1",
            "PRF-5",
            "A cosine of 1 + 2^-42 and a sine of 0.",
            edited("turns", (slice(None), 1), above),
        ),
        ("sin-nan", "PRF-5", "A sine that is no number.", edited("turns", (1, 0), np.nan)),
        ("turn-that-grows", "PRF-5", "Cosine and sine 1.", edited("turns", (slice(None), 1), turn)),
        (
            "turn-a-little-long",
            "PRF-5",
            "A turn whose square is 1 + 2^-38.",
            edited("turns", (slice(None), 1), little),
        ),
    ):
        _case(suite, f"profile-{slug}", rule, what, why, make)


def _fits(suite: Suite) -> None:
    weights = {**MODEL, "weights_digest": "blake3:" + "1" * 64}

    def first(**changes: Any) -> Callable[[list[Transform]], bytes]:
        def make(made: list[Transform]) -> bytes:
            changed = [transform("key", 1, pairing="half", pairs=2, **changes), *made[1:]]
            return profile_file(sorted(changed, key=lambda t: (t.quality, t.role, t.layer)))

        return make

    def plain(made: list[Transform]) -> bytes:
        return profile_file(made)

    def setting(pointer: str, value: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda found: put(found, pointer, value)

    why = (
        "Matrices of another model, layer or shape give values that look like a cache and are none."
    )
    for slug, what, make, change in (
        ("no-such-layer", "No transform for a layer.", lambda m: profile_file(m[1:]), None),
        ("other-quality", "A layer only for another quality.", first(quality="balanced"), None),
        ("other-heads-total", "Another heads_total.", first(heads_total=4), None),
        ("other-head-start", "Another head_start.", first(head_start=2, heads_total=4), None),
        ("other-heads", "One head of eight dims, not two of four.", first(heads=1, dims=8), None),
        ("one-head", "One head of four dims, of two.", first(heads=1, heads_total=2), None),
        ("two-dims", "Heads of two dims, of four.", two_dims, None),
        ("other-model", "The artifact is of another model.", plain, setting("model/id", "b model")),
        (
            "other-weights",
            "Profile and artifact name other weights.",
            lambda m: profile_file(m, model=weights),
            setting("model/weights_digest", "blake3:" + "2" * 64),
        ),
        ("no-rope", "The artifact describes no rotary embedding.", plain, setting("rope", [])),
        ("not-rotated", "Its keys are not rotated.", plain, setting("rope/0/keys_rotated", False)),
        ("other-pairing", "Its keys have another pairing.", plain, setting("rope/0", rope(2, "interleaved", (1, 3)))),
        ("other-pairs", "Its keys have one frequency.", plain, setting("rope/0", rope(1, "half", (1, 3)))),
        ("other-layers", "Its rotary embedding is not that of a layer.", plain, setting("rope/0/layers", [1])),
    ):  # fmt: skip
        keep: Callable[[dict[str, Any]], Any] = lambda _: None  # noqa: E731 - the default change
        _case(suite, f"fit-{slug}", "TRF-5", what, why, make, change=change or keep)
    total = [
        transform("key", n, pairing="half", pairs=2, head_start=1, heads_total=4) for n in (1, 3)
    ]
    builder, profile = tiny(profile=lambda _: profile_file(total))
    builder.manifest["groups"][0]["heads_total"] = 4
    calls = [verify(), decode(STORED, *GIVEN, code=CONTENT)]
    what = "Another head_start, of as many heads."
    _add(
        suite,
        "fit-other-heads-held",
        "TRF-5",
        builder.build(),
        calls,
        what,
        why,
        files={PROFILE: profile},
    )
