"""Level faulty: manifests whose digests are right and whose content breaks a rule of sections 5 to 9.1."""

# ruff: noqa: E501, PLR0917, PLW2901 - long sentences and tables

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from conformance.generate.compose import (
    ALL_TRACKS,
    DROP,
    EXACT,
    EXACT_ZSTD,
    STORED,
    RawGroup,
    compose,
    floats,
    small,
    tiny,
    with_members,
)
from conformance.generate.core import good, one_group
from conformance.generate.faults import fault
from conformance.generate.identity import full_parts
from conformance.generate.suite import Suite, inspect
from tests.builder import b3

Z = "0" * 64
KEY = {
    "engine": "e",
    "engine_version": None,
    "hash_algorithm": "h",
    "key": "k",
    "rank": 0,
    "world_size": 1,
}
SPAN = {"count": 1, "digest": None, "kind": "image", "start": 290}
SINGLE: list[tuple[str, str, str, Any, str]] = [
    # base, requirement, pointer, value, slug
    ("plain", "MAN-2", "/format", "kvformat2", "another-format"),
    ("plain", "MAN-2", "/version", "0.90", "version-0-90"),
    ("plain", "MAN-2", "/version", "0.8", "version-0-8"),
    ("plain", "MAN-2", "/version", "0.09", "version-0-09"),
    ("plain", "MAN-4", "/groups", [], "no-groups"),
    ("plain", "MAN-4", "/qualities", [], "no-qualities"),
    ("plain", "MAN-4", "/tracks", [], "no-tracks"),
    ("plain", "MAN-1", "/generator", "", "empty-generator"),
    ("plain", "MAN-1", "/generator", "x" * 1025, "generator-of-1025-bytes"),
    ("plain", "MAN-1", "/generator", "é" * 513, "generator-of-1026-bytes"),
    ("plain", "CNV-4", "/content_id", "A" * 64, "digest-in-upper-case"),
    ("plain", "CNV-4", "/source_digest", "blake3:" + Z, "digest-with-a-name"),
    ("plain", "CNV-4", "/source_digest", "0" * 63, "digest-of-63-digits"),
    ("plain", "CNV-4", "/source_digest", "0" * 64 + "\n", "digest-with-a-line-feed"),
    ("plain", "IDN-1", "/identity/layers_total", 0, "no-layers-in-the-model"),
    ("plain", "IDN-1", "/identity/component", "target", "unknown-component"),
    ("plain", "IDN-1", "/identity/kind", "none", "unknown-kind"),
    ("plain", "IDN-1", "/identity/cache_dtype", "Float16", "cache-dtype-in-upper-case"),
    ("full", "IDN-6", "/identity/rope/0/inv_freq", "", "no-frequencies"),
    ("full", "IDN-6", "/identity/rope/0/inv_freq", "3f8000003f80", "half-a-frequency"),
    ("full", "IDN-6", "/identity/rope/0/inv_freq", "3F800000", "frequency-in-upper-case"),
    ("full", "IDN-8", "/identity/rope/0/inv_freq", "3f80000080000000", "frequency-of-minus-zero"),
    ("full", "IDN-8", "/identity/rope/0/inv_freq", "bf800000", "negative-frequency"),
    ("full", "IDN-8", "/identity/rope/0/inv_freq", "7f800000", "infinite-frequency"),
    ("full", "IDN-8", "/identity/rope/0/inv_freq", "7fc00000", "frequency-that-is-nan"),
    ("full", "IDN-8", "/identity/rope/0/scaling", "0" * 16, "scaling-of-zero"),
    ("full", "IDN-8", "/identity/rope/0/scaling", "8000000000000000", "scaling-of-minus-zero"),
    ("full", "IDN-8", "/identity/rope/0/scaling", "7ff0000000000000", "infinite-scaling"),
    ("full", "IDN-8", "/identity/rope/0/scaling", "7ff8000000000000", "scaling-that-is-nan"),
    ("full", "IDN-8", "/identity/rope/0/scaling", "bff0000000000000", "negative-scaling"),
    ("full", "IDN-1", "/identity/rope/0/scaling", "3f800000", "scaling-in-binary32"),
    ("full", "IDN-1", "/identity/rope/0/pairing", "pairs", "unknown-pairing"),
    ("full", "IDN-8", "/identity/scale_scheme/scales/0/bits", "00000000", "cache-scale-of-zero"),
    ("full", "IDN-8", "/identity/scale_scheme/scales/0/bits", "ff800000", "infinite-cache-scale"),
    ("full", "IDN-1", "/identity/model/weights_digest", "md5:" + Z, "unknown-hash"),
    ("full", "IDN-1", "/identity/model/weights_digest", "sha256:" + Z[:-1], "short-hash"),
    ("plain", "IDN-8", "/qualities/0/relative_step", "0" * 16, "relative-step-of-zero"),
    ("plain", "IDN-8", "/qualities/0/relative_step", "fff0000000000000", "infinite-relative-step"),
    ("plain", "QUA-1", "/qualities/0/encodings/0", "lossy", "unknown-encoding"),
    ("full", "LIN-2", "/lineage/generations", 0, "no-generations"),
    ("plain", "MAN-1", "/lineage", {"kind": "exact", "generations": 1}, "generations-of-exact"),
    ("plain", "MAN-1", "/lineage", {"kind": "unknown"}, "unknown-lineage"),
    ("full", "MAN-1", "/tokens/chain/block_tokens", 512, "blocks-of-512"),
    ("full", "TOK-8", "/tokens/content/0/count", 0, "empty-span"),
    ("plain", "GRP-1", "/groups/0/dtype", "int8", "unknown-dtype"),
    ("plain", "GRP-1", "/groups/0/layers", [], "no-layers"),
    ("plain", "GRP-1", "/groups/0/heads", 0, "no-heads"),
    ("plain", "GRP-1", "/groups/0/head_dim", 0, "no-dims"),
    ("plain", "GRP-1", "/groups/0/heads_total", 0, "no-heads-in-total"),
    ("plain", "GRP-1", "/groups/0/role", "Key", "role-in-upper-case"),
    ("plain", "GRP-1", "/groups/0/name", "k" * 49, "name-of-49"),
    ("plain", "GRP-1", "/groups/0/name", "key_s", "name-with-an-underscore"),
    ("plain", "GRP-1", "/groups/0/name", "", "empty-name"),
    ("plain", "GRP-1", "/groups/0/tokens", {"kind": "most"}, "unknown-extent"),
    ("window", "GRP-6", "/groups/3/tokens/shape", [], "shape-without-factors"),
    (
        "window",
        "GRP-6",
        "/groups/3/tokens/shape",
        [1, 1, 1, 1, 1, 1, 1, 2, 2],
        "shape-of-nine-factors",
    ),
    ("window", "GRP-6", "/groups/3/tokens/shape", [0, 4], "shape-with-a-zero"),
    ("plain", "MAN-1", "/segmentation/alignment", 2, "alignment-2"),
    ("plain", "MAN-1", "/segmentation/alignment", 0, "alignment-0"),
    ("plain", "MAN-1", "/segmentation/alignment", 8192, "alignment-8192"),
    ("plain", "MAN-1", "/segmentation/order", "head-major", "unknown-order"),
    ("plain", "SEG-5", "/segmentation/tokens", 0, "segments-of-no-tokens"),
    ("plain", "SEG-4", "/segmentation/groups/0/layers", 0, "segments-of-no-layers"),
    ("plain", "SEG-4", "/segmentation/groups/0/heads", 0, "segments-of-no-heads"),
    ("plain", "TRK-3", "/tracks/0/codecs/0", "av1", "unknown-codec"),
    ("plain", "TRK-1", "/tracks/0/name", "near-lossless", "track-name-without-codec"),
    ("plain", "TRK-1", "/tracks/0/encoder", "", "empty-encoder"),
    ("video", "LAY-4", "/tracks/0/layouts/0/width", 128, "width-128"),
    ("video", "LAY-4", "/tracks/0/layouts/0/width", 152, "width-152"),
    ("video", "LAY-4", "/tracks/0/layouts/0/height", 143, "height-143"),
    ("video", "LAY-1", "/tracks/0/layouts/0/height", 0, "height-0"),
    ("video", "LAY-1", "/tracks/0/layouts/0/fold", [1], "fold-of-one"),
    ("video", "LAY-1", "/tracks/0/layouts/0/fold", [0, 1], "fold-of-zero"),
    ("video", "LAY-1", "/tracks/0/layouts/0/tile", [1, 1, 1], "tile-of-three"),
    ("video", "LAY-1", "/tracks/0/layouts/0/grid/0", 0, "grid-of-zero"),
    ("video", "LAY-1", "/tracks/0/layouts/0/frames", 0, "no-pictures"),
    ("video", "LAY-1", "/tracks/0/layouts/0/order", "zigzag", "unknown-picture-order"),
]


def contradictions(m: dict[str, Any]) -> list[tuple[str, str, str, dict[str, Any]]]:
    """Requirement, slug, base, changes; ``m`` are the manifests of the bases."""
    chain = m["full"]["tokens"]["chain"]
    plain, video = m["plain"], m["video"]
    second = plain["tracks"][1]["data_start"]
    layouts = video["tracks"][0]["layouts"]
    return [
        ("MAN-5", "group-name-twice", "plain", {"/groups/1/name": "keys"}),
        ("MAN-5", "quality-name-twice", "plain", {"/qualities/1/name": "near-lossless"}),
        ("MAN-5", "track-name-twice", "video", {"/tracks/1/name": "near-lossless/hevc"}),
        ("IDN-3", "rope-layers-descend", "full", {"/identity/rope/0/layers": [1, 0]}),
        ("IDN-3", "rope-layers-repeated", "full", {"/identity/rope/0/layers": [1, 1]}),
        ("IDN-3", "rope-layers-shared", "full", {"/identity/rope/1/layers": [2, 5]}),
        ("IDN-3", "rope-layer-unknown", "full", {"/identity/rope/1/layers": [3, 8]}),
        ("IDN-4", "engine-key-of-tokens", "full", {"/identity/engine_key": KEY}),
        ("IDN-4", "engine-key-of-unbound", "plain", {"/identity/engine_key": KEY}),
        ("IDN-4", "engine-key-missing", "plain", {"/identity/kind": "engine_key"}),
        ("IDN-5", "chain-missing", "full", {"/tokens/chain": None}),
        ("IDN-5", "chain-of-unbound", "plain", {"/tokens/chain": {**chain, "hashes": [Z]}}),
        ("IDN-5", "unbound-with-chain", "full", {"/identity/kind": "unbound"}),
        ("IDN-7", "cache-scale-twice", "full", {"/identity/scale_scheme/scales/1/role": "key"}),
        ("IDN-7", "cache-scale-of-no-layer", "full", {"/identity/scale_scheme/scales/0/layer": 8}),
        (
            "ENG-1",
            "rank-of-world-size",
            "plain",
            {"/identity/kind": "engine_key", "/identity/engine_key": {**KEY, "rank": 1}},
        ),
        (
            "ENG-1",
            "world-of-none",
            "plain",
            {"/identity/kind": "engine_key", "/identity/engine_key": {**KEY, "world_size": 0}},
        ),
        ("TOK-5", "one-hash-too-few", "full", {"/tokens/chain/hashes/1": DROP}),
        ("TOK-5", "one-hash-too-many", "full", {"/tokens/chain/hashes/-": Z}),
        ("TOK-5", "no-hashes", "full", {"/tokens/chain/hashes": []}),
        ("TOK-5", "hash-behind-a-span-without-digest", "full", {"/tokens/content/-": SPAN}),
        ("TOK-7", "first-position-inside-a-block", "later", {"/tokens/first_position": 511}),
        ("TOK-7", "parent-at-position-0", "full", {"/tokens/chain/parent": Z}),
        ("TOK-7", "later-part-without-parent", "later", {"/tokens/chain/parent": None}),
        ("TOK-8", "spans-overlap", "full", {"/tokens/content/1/start": 6}),
        ("TOK-8", "spans-descend", "full", {"/tokens/content/1/start": 1}),
        ("TOK-8", "span-behind-the-end", "full", {"/tokens/content/1/count": 294}),
        ("TOK-8", "span-before-the-start", "later", {"/tokens/content/0/start": 511}),
        ("CID-3", "other-content-id", "plain", {"/content_id": Z}),
        (
            "CID-2",
            "content-id-of-another-source",
            "plain",
            {"/source_digest": Z, "/content_id": plain["content_id"]},
        ),
        (
            "CID-2",
            "content-id-of-another-model",
            "plain",
            {"/identity/model/id": "b", "/content_id": plain["content_id"]},
        ),
        (
            "CID-2",
            "content-id-of-other-groups",
            "plain",
            {"/groups/0/role": "other", "/content_id": plain["content_id"]},
        ),
        ("GRP-2", "layers-descend", "plain", {"/groups/0/layers": [1, 3, 6, 4]}),
        ("GRP-2", "layers-repeated", "plain", {"/groups/0/layers": [1, 3, 3, 4]}),
        ("GRP-2", "layer-unknown", "plain", {"/groups/0/layers": [1, 3, 4, 64]}),
        ("GRP-3", "heads-behind-the-last", "plain", {"/groups/0/head_start": 1}),
        ("GRP-3", "more-heads-than-there-are", "plain", {"/groups/0/heads_total": 1}),
        ("GRP-4", "layer-and-role-twice", "plain", {"/groups/1/role": "key"}),
        ("GRP-5", "window-behind-the-end", "window", {"/groups/2/tokens/held_start": 11}),
        ("GRP-5", "other-counter", "window", {"/groups/2/tokens/cumulative_tokens": 11}),
        ("GRP-6", "product-is-not-the-head-dim", "window", {"/groups/3/tokens/shape": [2, 3]}),
        ("SEG-4", "segmentation-of-fewer-groups", "plain", {"/segmentation/groups/1": DROP}),
        (
            "SEG-4",
            "segmentation-of-more-groups",
            "plain",
            {"/segmentation/groups/-": {"heads": 1, "layers": 1}},
        ),
        ("SEG-4", "more-heads-a-segment-than-held", "plain", {"/segmentation/groups/1/heads": 2}),
        ("LEN-1", "valid-lengths-null", "window", {"/valid_lengths": None}),
        ("LEN-1", "valid-lengths-without-t", "window", {"/valid_lengths": [9]}),
        ("LEN-1", "valid-lengths-empty", "window", {"/valid_lengths": []}),
        ("LEN-1", "valid-lengths-not-null", "plain", {"/valid_lengths": [10]}),
        ("LEN-2", "valid-lengths-descend", "window", {"/valid_lengths": [5, 4, 10]}),
        ("LEN-2", "valid-lengths-repeated", "window", {"/valid_lengths": [10, 10]}),
        ("LEN-2", "valid-length-above-t", "window", {"/valid_lengths": [10, 11]}),
        ("TAB-2", "more-segments-than-cells", "plain", {"/tracks/0/segments": 7}),
        ("TAB-2", "fewer-segments-than-cells", "plain", {"/tracks/1/segments": 5}),
        ("TAB-2", "segments-of-another-length", "plain", {"/segmentation/tokens": 5 * 2**10}),
        ("TAB-2", "segments-of-other-heads", "plain", {"/segmentation/groups/0/heads": 1}),
        ("TRK-2", "track-of-no-quality", "plain", {"/tracks/0/quality": "small"}),
        ("TRK-2", "track-named-after-another-quality", "plain", {"/tracks/0/name": "small/stored"}),
        (
            "TRK-2",
            "track-named-after-no-codec-of-it",
            "plain",
            {"/tracks/0/codecs": ["zstd", "zstd"]},
        ),
        ("TRK-3", "codecs-of-fewer-groups", "plain", {"/tracks/1/codecs": ["stored"]}),
        ("TRK-3", "codecs-of-more-groups", "plain", {"/tracks/1/codecs": ["stored"] * 3}),
        ("TRK-3", "hevc-for-an-exact-group", "plain", {"/tracks/1/codecs": ["hevc", "stored"]}),
        ("TRK-4", "quality-without-track", "plain", {"/tracks/0/quality": "exact"}),
        ("TRK-5", "layouts-without-hevc", "video", {"/tracks/1/layouts": layouts}),
        ("TRK-6", "layout-twice", "video", {"/tracks/0/layouts/1": layouts[0]}),
        ("LAY-3", "grid-too-high", "video", {"/tracks/0/layouts/0/grid": [145, 1]}),
        ("LAY-3", "grid-too-wide", "video", {"/tracks/0/layouts/0/grid": [1, 19]}),
        ("LAY-3", "fold-too-high", "video", {"/tracks/0/layouts/1/fold": [145, 1]}),
        (
            "LAY-3",
            "fold-that-overflows",
            "video",
            {"/tracks/0/layouts/1/fold": [2**53 - 1, 2**53 - 1]},
        ),
        ("DAT-1", "first-part-starts-at-1", "plain", {"/qualities/0/data_start": 1}),
        ("DAT-1", "hole-between-parts", "plain", {"/tracks/1/data_start": second + 1}),
        ("DAT-1", "parts-overlap", "plain", {"/tracks/1/data_start": second - 1}),
        ("DAT-1", "part-stops-before-it-starts", "plain", {"/tracks/1/data_stop": 1}),
        ("DAT-4", "data-bytes-one-more", "plain", {"/data_bytes": plain["data_bytes"] + 1}),
        ("DAT-4", "data-bytes-0", "plain", {"/data_bytes": 0}),
        (
            "QUA-2",
            "exact-with-a-quantised-group",
            "plain",
            {"/qualities/1/encodings": ["quantised", "exact"]},
        ),
        (
            "QUA-2",
            "all-exact-under-another-name",
            "plain",
            {"/qualities/0/encodings": ["exact", "exact"]},
        ),
        ("QUA-2", "encodings-of-fewer-groups", "plain", {"/qualities/0/encodings": ["quantised"]}),
        ("QUA-3", "quantised-state", "window", {"/qualities/0/encodings/3": "quantised"}),
        ("QUA-3", "quantised-uint8", "plain", {"/groups/0/dtype": "uint8"}),
        ("QUA-4", "sets-of-exact", "plain", {"/qualities/1/sets": 1}),
        (
            "QUA-4",
            "relative-step-of-exact",
            "plain",
            {"/qualities/1/relative_step": "3ff0000000000000"},
        ),
    ]


def walk(value: Any, pointer: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a manifest with its pointer, the first element of lists only."""
    yield pointer, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, f"{pointer}/{key}")
    elif isinstance(value, list) and value:
        yield from walk(value[0], f"{pointer}/0")


def rule_of(pointer: str) -> str:
    """The requirement that lists the members of an object."""
    for start, rule in (
        ("/identity", "IDN-1"),
        ("/groups", "GRP-1"),
        ("/qualities", "QUA-1"),
        ("/extensions", "EXT-1"),
    ):
        if pointer.startswith(start):
            return rule
    if "/layouts" in pointer:
        return "LAY-1"
    return "TRK-1" if pointer.startswith("/tracks") else "MAN-1"


def name_of(pointer: str) -> str:
    """A pointer as a part of a slug."""
    return re.sub(r"[^a-z0-9]+", "-", pointer.replace("/0", "")).strip("-") or "manifest"


def add_cases(suite: Suite) -> None:
    """All of this module."""
    bases = {
        "plain": lambda: small(suite),
        "single": lambda: small(suite, [STORED]),
        "video": lambda: small(suite, ALL_TRACKS[:2]),
        "window": lambda: small(suite, window=True),
        "full": full_parts,
        "later": lambda: full_parts(512),
        "tiny": tiny,
        "zstd": lambda: tiny([EXACT_ZSTD]),
    }
    built: dict[str, Any] = {name: make() for name, make in bases.items()}
    for builder in built.values():
        builder.build()
    manifests = {name: builder.manifest for name, builder in built.items()}
    why = {
        "manifest.schema": "A single value that shows by itself that it is wrong is `manifest.schema`.",
        "manifest.semantics": "Values that contradict each other are `manifest.semantics`.",
        "header.field": "Header and manifest must agree.",
    }

    def broken(
        requirement: str,
        slug: str,
        base: str,
        changes: dict[str, Any],
        code: str | tuple[str, ...],
        what: str = "",
        *,
        rules: str = "ERR-5",
    ) -> None:
        text = ", ".join(
            f"`{pointer}` {'is missing' if new is DROP else 'is ' + short(new)}"
            for pointer, new in changes.items()
        )
        ids = requirement if code == "header.field" else f"{requirement} {rules}"
        fault(
            suite,
            slug,
            ids,
            with_members(copy.deepcopy(built[base]), changes),
            code,
            what or f"{text}.",
            why[code if isinstance(code, str) else code[0]],
            more=[inspect(code)],
        )

    for base, requirement, pointer, value, slug in SINGLE:
        base = "single" if base == "plain" else base
        broken(requirement, slug, base, {pointer: value}, "manifest.schema")
    for requirement, slug, base, changes in contradictions(manifests):
        # Sizes of tables and data also bind the header, in the same step of ORD-1 (ORD-6).
        sizes = set(changes) & {
            "/tracks/0/segments",
            "/tracks/1/segments",
            "/data_bytes",
            "/qualities/1/sets",
        }
        code = ("manifest.semantics", "header.field") if sizes else "manifest.semantics"
        if sizes:
            requirement += " HDR-7" if "/data_bytes" in sizes else " HDR-8"
        broken(requirement, slug, base, changes, code)
    broken("HDR-8", "fewer-sets-than-records", "plain", {"/qualities/0/sets": 2}, "header.field")
    broken("HDR-8", "more-sets-than-records", "plain", {"/qualities/0/sets": 4}, "header.field")
    seen: set[str] = set()
    for base in ("tiny", "full", "window", "video"):
        for pointer, value in walk(manifests[base]):
            if (
                not isinstance(value, dict)
                or pointer.startswith("/extensions/com.example.a/value")
                or pointer in ("/extensions",)
            ):
                continue
            place = re.sub(r"/[0-9]+", "/0", pointer) + "|" + ",".join(value)
            if place in seen:
                continue
            seen.add(place)
            rule, name = rule_of(pointer), name_of(pointer)
            suffix = (
                ""
                if not any(c.slug == f"member-unknown-{name}" for c in suite.cases)
                else f"-{base}"
            )
            broken(
                rule,
                f"member-unknown-{name}{suffix}"[:60],
                base,
                {f"{pointer}/zz": 1},
                "manifest.schema",
                rules="JSN-11 ERR-5",
            )
            for key in value:
                broken(
                    rule,
                    f"member-missing-{name}-{key.replace('_', '-').replace('.', '-')}{suffix}"[:60],
                    base,
                    {f"{pointer}/{key}": DROP},
                    "manifest.schema",
                )
    _whole(suite)
    _accepted(suite, built)


def _whole(suite: Suite) -> None:
    """Contradictions in artifacts that are made for them: everything else agrees."""

    def unread(manifest: dict[str, Any]) -> None:
        last = manifest["qualities"][-1]
        manifest["qualities"].append(
            {
                "data_start": last["data_stop"],
                "data_stop": last["data_stop"],
                "encodings": ["exact"] * len(manifest["groups"]),
                "name": "exact",
                "relative_step": None,
                "set_table_digest": b3(b"").hex(),
                "sets": 0,
            }
        )

    extent = {"cumulative_tokens": 5, "held_start": 5, "kind": "window"}
    source = floats("empty", (2, 0, 1, 2), "float16")
    groups = [
        one_group("float16", (2, 5, 1, 2)),
        RawGroup("near", "value", "float16", (0, 1), source, tokens=extent),
    ]
    behind = compose(groups, 5, [STORED, EXACT])
    behind.manifest["groups"][1]["tokens"]["held_start"] = 6
    why = "No other rule is broken: a reader that does not look for this one accepts the file."
    for requirement, slug, data, what in (
        (
            "TRK-4",
            "exact-quality-without-track",
            small(suite, [STORED]).build(edit_manifest=unread),
            "A last quality `exact` of no sets and no data, which no track names.",
        ),
        (
            "GRP-5",
            "empty-window-behind-the-end",
            behind.build(),
            "A window of no cells whose held_start is T + 1.",
        ),
    ):
        fault(
            suite,
            slug,
            f"{requirement} ERR-5",
            data,
            "manifest.semantics",
            what,
            why,
            more=[inspect("manifest.semantics")],
        )


def _accepted(suite: Suite, built: dict[str, Any]) -> None:
    """What no rule forbids."""
    for slug, family, requirements, base, changes in (
        (
            "kind-and-rotation-in-no-registry",
            "fea",
            "FEA-4",
            "full",
            {
                "/tokens/content/0/kind": "smell",
                "/identity/rotation/name": "twist",
                "/identity/scale_scheme/name": "odd",
            },
        ),
        ("salted-says-false", "tok", "TOK-1", "full", {"/tokens/chain/salted": False}),
        (
            "first-span-without-digest",
            "tok",
            "TOK-5",
            "full",
            {"/tokens/content/0/digest": None, "/tokens/chain/hashes": []},
        ),
        (
            "last-span-without-digest",
            "tok",
            "TOK-5",
            "full",
            {"/tokens/content/-": SPAN, "/tokens/chain/hashes/1": DROP},
        ),
        ("largest-model", "lim", "LIM-2", "tiny", {"/identity/layers_total": 65_536}),
        (
            "heads-of-a-rank",
            "grp",
            "GRP-3",
            "tiny",
            {"/groups/0/head_start": 65_535, "/groups/0/heads_total": 65_536},
        ),
    ):
        data = with_members(copy.deepcopy(built[base]), changes)
        tracks = [track["name"] for track in built[base].manifest["tracks"]]
        good(
            suite,
            family,
            slug,
            requirements.split(),
            data,
            tracks,
            ", ".join(
                f"`{p}` is {'missing' if v is DROP else short(v)}" for p, v in changes.items()
            )
            + ".",
            "No rule forbids it: a reader that refuses it is too strict.",
        )


def short(value: Any) -> str:
    """A value for a sentence."""
    import json

    text = json.dumps(value, ensure_ascii=False)
    return f"`{text}`" if len(text) < 70 else f"`{text[:60]}...`"
