"""The manifest: bytes to frozen dataclasses and back (spec sections 5 and 13)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from kvformat import strictjson
from kvformat.digests import digest
from kvformat.errors import UnsupportedError
from kvformat.fields import Node, schema_error, semantic_error, to_json
from kvformat.groups import Group, Segmentation, count_cells
from kvformat.identity import EXACT_LINEAGE, Identity, Lineage
from kvformat.limits import LIMITS
from kvformat.tokens import Tokens
from kvformat.tracks import TRANSFORMED, Quality, Track

VERSION_MAJOR: Final = 0
VERSION_MINOR: Final = 9
VERSION: Final = f"{VERSION_MAJOR}.{VERSION_MINOR}"
FORMAT: Final = "kvformat"
TRANSFORM_KLT: Final = "transform-klt"
KNOWN_FEATURES: Final = frozenset({TRANSFORM_KLT})
KNOWN_EXTENSIONS: Final[frozenset[str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Extension:
    """A value that other parties add (section 13.3)."""

    value: Any
    must_understand: bool = False

    @staticmethod
    def parse(node: Node) -> Extension:
        """From JSON."""
        m = node.members("must_understand", "value")
        return Extension(m["value"].value, m["must_understand"].boolean())

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {"must_understand": self.must_understand, "value": self.value}


_MANIFEST_KEYS: Final = (
    "content_id",
    "data_bytes",
    "extensions",
    "features",
    "format",
    "generator",
    "groups",
    "identity",
    "lineage",
    "qualities",
    "segmentation",
    "source_digest",
    "tokens",
    "tracks",
    "valid_lengths",
    "version",
)


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that an artifact says about itself (section 5)."""

    identity: Identity
    tokens: Tokens
    groups: tuple[Group, ...]
    segmentation: Segmentation
    qualities: tuple[Quality, ...]
    tracks: tuple[Track, ...]
    source_digest: str
    content_id: str
    data_bytes: int
    valid_lengths: tuple[int, ...] | None = None
    lineage: Lineage = EXACT_LINEAGE
    features: tuple[str, ...] = ()
    extensions: dict[str, Extension] = field(default_factory=dict)
    generator: str = "kvformat"
    profile: str | None = None
    format: str = FORMAT
    version: str = VERSION

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        result = {key: to_json(getattr(self, key)) for key in _MANIFEST_KEYS}
        result["extensions"] = {key: item.to_json() for key, item in self.extensions.items()}
        if self.profile is not None:
            result["profile"] = {"digest": self.profile}
        return result

    def to_bytes(self) -> bytes:
        """The canonical bytes that the header's digest covers."""
        return strictjson.serialise(self.to_json())

    @property
    def tables_bytes(self) -> int:
        """Length of all tables (HDR-8)."""
        sets = sum(item.table_bytes for item in self.qualities)
        return sets + sum(item.table_bytes for item in self.tracks)

    def quality(self, name: str) -> Quality:
        """The quality of that name."""
        return next(item for item in self.qualities if item.name == name)


def content_id(groups: tuple[Group, ...], identity: Identity, source_digest: str) -> str:
    """The id that all encodings of one cache share (CID-2)."""
    value = {
        "groups": to_json(groups),
        "identity": identity.to_json(),
        "source_digest": source_digest,
    }
    return digest(strictjson.serialise(value)).hex()


def parse_manifest(data: bytes) -> Manifest:
    """The manifest in ``data``, refused in the order of ORD-1 from the JSON rules on."""
    value = strictjson.parse(data)
    require_known(value)
    root = Node(value)
    with_profile = TRANSFORM_KLT in value["features"]
    m = root.members(*_MANIFEST_KEYS, *(("profile",) if with_profile else ()))
    manifest = Manifest(
        identity=Identity.parse(m["identity"]),
        tokens=Tokens.parse(m["tokens"]),
        groups=m["groups"].each(Group.parse, minimum=1),
        segmentation=Segmentation.parse(m["segmentation"]),
        qualities=m["qualities"].each(Quality.parse, minimum=1),
        tracks=m["tracks"].each(Track.parse, minimum=1),
        source_digest=m["source_digest"].digest(),
        content_id=m["content_id"].digest(),
        data_bytes=m["data_bytes"].integer(),
        valid_lengths=m["valid_lengths"].optional(
            lambda node: node.each(lambda item: item.integer(limit="tokens"))
        ),
        lineage=Lineage.parse(m["lineage"]),
        features=m["features"].each(Node.name),
        extensions={key: Extension.parse(item) for key, item in m["extensions"].mapping().items()},
        generator=m["generator"].text(),
        profile=m["profile"].members("digest")["digest"].digest() if with_profile else None,
        format=m["format"].choice(FORMAT),
        version=m["version"].choice(VERSION),
    )
    check_manifest(manifest)
    return manifest


def require_known(value: dict[str, Any]) -> None:
    """Features, then extensions, before the schema (ORD-1, ORD-5)."""
    features = value.get("features")
    if not isinstance(features, list) or not all(isinstance(item, str) for item in features):
        raise schema_error("not a list of names", "/features", "a list of names", features)
    unknown = [item for item in features if item not in KNOWN_FEATURES]
    if unknown:
        raise UnsupportedError(
            "feature.unknown",
            "the artifact needs a feature that this reader lacks",
            where="/features",
            found=ascii(unknown[0][:80]),
            next_step="Use a newer kvformat",
        )
    extensions = value.get("extensions")
    if not isinstance(extensions, dict):
        raise schema_error("not an object", "/extensions", "an object", extensions)
    for key, item in extensions.items():
        if not isinstance(item, dict):
            raise schema_error("not an object", f"/extensions/{key}", "an object", item)
        if item.get("must_understand") is True and key not in KNOWN_EXTENSIONS:
            raise UnsupportedError(
                "extension.unknown",
                "the artifact needs an extension that this reader lacks",
                where=f"/extensions/{key}",
                next_step="Use a reader that knows it",
            )


def _unique(names: list[str], pointer: str) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise semantic_error("the name occurs twice", f"{pointer}/{index}/name", found=name)


def check_manifest(manifest: Manifest) -> None:
    """The rules that tie members to each other; raises ``manifest.semantics`` or limits."""
    for limit in ("groups", "qualities", "tracks"):
        names = [item.name for item in getattr(manifest, limit)]
        LIMITS.check(limit, len(names), f"/{limit}")
        _unique(names, f"/{limit}")
    _check_transformed(manifest)
    features = manifest.features
    if any(a >= b for a, b in pairwise(features)):
        raise semantic_error("features are not in ascending order", "/features")
    if (manifest.tokens.chain is not None) != (manifest.identity.kind == "tokens"):
        raise semantic_error(
            "chain and identity kind disagree", "/tokens/chain", found=manifest.identity.kind
        )
    _check_groups(manifest)
    _check_valid_lengths(manifest)
    _check_qualities_and_tracks(manifest)
    expected = content_id(manifest.groups, manifest.identity, manifest.source_digest)
    if manifest.content_id != expected:
        raise semantic_error(
            "the content id is wrong", "/content_id", expected=expected, found=manifest.content_id
        )


def _check_transformed(manifest: Manifest) -> None:
    """TRF-1 and TRF-2."""
    found = False
    for number, quality in enumerate(manifest.qualities):
        for index, encoding in enumerate(quality.encodings):
            if encoding != TRANSFORMED:
                continue
            found = True
            pointer = f"/qualities/{number}/encodings/{index}"
            if manifest.profile is None:
                raise schema_error("unknown value", pointer, "quantised or exact", encoding)
            groups, cuts = manifest.groups, manifest.segmentation.groups
            whole = index < min(len(groups), len(cuts)) and cuts[index].heads == groups[index].heads
            if not whole:
                raise semantic_error("a transformed group whose heads are cut", pointer)
    if manifest.profile is not None and not found:
        raise semantic_error("a profile without a transformed group", "/profile")


def _check_groups(manifest: Manifest) -> None:
    taken: set[tuple[str, int]] = set()
    for index, group in enumerate(manifest.groups):
        pointer = f"/groups/{index}"
        group.check(pointer, manifest.identity.layers_total, manifest.tokens)
        held = {(group.role, layer) for layer in group.layers}
        if taken & held:
            raise semantic_error(
                "a layer is held twice in one role", f"{pointer}/layers", found=min(taken & held)
            )
        taken |= held
    cuts = manifest.segmentation.groups
    if len(cuts) != len(manifest.groups):
        raise semantic_error(
            "not one segmentation per group",
            "/segmentation/groups",
            expected=len(manifest.groups),
            found=len(cuts),
        )
    for index, (group, cut) in enumerate(zip(manifest.groups, cuts, strict=True)):
        if cut.heads > group.heads:
            raise semantic_error(
                "more heads per segment than the group has",
                f"/segmentation/groups/{index}/heads",
                expected=f"at most {group.heads}",
                found=cut.heads,
            )


def _check_valid_lengths(manifest: Manifest) -> None:
    lengths = manifest.valid_lengths
    bound = any(group.tokens.kind != "all" for group in manifest.groups)
    if (lengths is not None) != bound:
        raise semantic_error(
            "a list of lengths and window or state groups belong together", "/valid_lengths"
        )
    if lengths is None:
        return
    ascending = all(a < b for a, b in pairwise(lengths))
    if not ascending or not lengths or lengths[-1] != manifest.tokens.count:
        raise semantic_error(
            "not an ascending list that ends with the token count",
            "/valid_lengths",
            expected=manifest.tokens.count,
            found=lengths[-1] if lengths else "an empty list",
        )


def _check_qualities_and_tracks(manifest: Manifest) -> None:
    by_name = {item.name: item for item in manifest.qualities}
    for index, quality in enumerate(manifest.qualities):
        quality.check(f"/qualities/{index}", manifest.groups)
    cells = count_cells(manifest.groups, manifest.segmentation, manifest.tokens.count)
    LIMITS.check("segments_per_track", cells, "/segmentation")
    for index, track in enumerate(manifest.tracks):
        pointer = f"/tracks/{index}"
        if track.quality not in by_name:
            raise semantic_error("unknown quality", f"{pointer}/quality", found=track.quality)
        track.check(pointer, by_name[track.quality])
        if track.segments != cells:
            raise semantic_error(
                "not one segment per cell",
                f"{pointer}/segments",
                expected=cells,
                found=track.segments,
            )
    unused = set(by_name) - {track.quality for track in manifest.tracks}
    if unused:
        raise semantic_error("a quality without a track", "/qualities", found=min(unused))
    cursor = 0
    for kind in ("qualities", "tracks"):
        for index, part in enumerate(getattr(manifest, kind)):
            pointer = f"/{kind}/{index}/data_start"
            if part.data_start != cursor or part.data_stop < cursor:
                raise semantic_error(
                    "the parts of the data are not adjacent",
                    pointer,
                    expected=cursor,
                    found=part.data_start,
                )
            cursor = part.data_stop
    if manifest.data_bytes != cursor:
        raise semantic_error(
            "data_bytes is not the end of the last part",
            "/data_bytes",
            expected=cursor,
            found=manifest.data_bytes,
        )
