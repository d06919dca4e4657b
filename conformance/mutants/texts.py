"""Mutants of header, JSON, manifest, identity, tokens and limits."""

from __future__ import annotations

from typing import Final

from conformance.mutants.mutant import Mutant

Row = tuple[str, str, str, str, str]
"""Name, old, new, what it breaks, hints with spaces between."""


def rows(module: str, *found: Row) -> tuple[Mutant, ...]:
    """The mutants of one module of kvformat."""
    return tuple(
        Mutant(name, f"kvformat.{module}", old, new, breaks, tuple(hints.split()))
        for name, old, new, breaks, hints in found
    )


def skipped(name: str, condition: str, breaks: str, hints: str) -> Row:
    """A check whose ``if`` never fires."""
    return (f"{name}", f"if {condition}:", "if False:", breaks, hints)


HEADER: Final = rows(
    "header",
    skipped(
        "magic-loose",
        "bytes(view[:8]) != magic",
        "the eight bytes of the magic are not compared",
        "hdr-0028* hdr-003*",
    ),
    skipped(
        "header-check-skipped",
        "digest(bytes(view[:16]) + bytes(view[48:header_bytes])) != check",
        "the digest of the header is not checked",
        "hdr-0039* hdr-0001*",
    ),
    (
        "version-major-only",
        "if (major, minor) != (VERSION_MAJOR, VERSION_MINOR):",
        "if major != VERSION_MAJOR:",
        "the minor version is not looked at",
        "vrs-0001*",
    ),
    (
        "version-newer-accepted",
        "if (major, minor) != (VERSION_MAJOR, VERSION_MINOR):",
        "if (major, minor) < (VERSION_MAJOR, VERSION_MINOR):",
        "a later version is read as 0.9",
        "vrs-0002*",
    ),
    skipped("header-reserved", "any(reserved)", "reserved header bytes may be set", "hdr-0005*"),
    skipped(
        "header-size-any",
        "header_bytes != HEADER_BYTES",
        "a header of another size passes in 0.9",
        "hdr-0044*",
    ),
    skipped(
        "header-size-range",
        "not HEADER_BYTES <= header_bytes <= LARGEST_HEADER_BYTES",
        "the range of header_bytes is not checked",
        "hdr-0024* hdr-0025* hdr-0026*",
    ),
    skipped(
        "front-behind-the-file",
        "header.front_bytes > file_bytes",
        "manifest and tables may be larger than the file",
        "hdr-0011* hdr-0010*",
    ),
    skipped(
        "tables-bytes-unchecked",
        "header.tables_bytes != tables_bytes",
        "tables_bytes of the header is not compared with the manifest",
        "hdr-0041* hdr-0042*",
    ),
    skipped(
        "file-bytes-unchecked",
        "header.file_bytes != data_start + data",
        "file_bytes of the header is not compared with the manifest",
        "hdr-0009* dat-0007*",
    ),
)

FRONT: Final = rows(
    "front",
    skipped(
        "manifest-digest-skipped",
        "found != header.manifest_digest",
        "the digest of the manifest is not checked",
        "hdr-0023* hdr-0004*",
    ),
    (
        "file-size-unchecked",
        "if size is None or size == header.file_bytes:",
        "if True:",
        "the length of the file is not compared with the header",
        "ord-0010* hdr-0035*",
    ),
    (
        "trailing-bytes-on-open",
        "if size is None or size == header.file_bytes:",
        "if size is None or size >= header.file_bytes:",
        "opening accepts bytes behind the end (verify still looks)",
        "hdr-0035* hdr-0036* hdr-0037* hdr-0038*",
    ),
    skipped(
        "padding-of-the-front",
        "any(padding)",
        "opening accepts padding behind the tables that is not zero",
        "hdr-0040*",
    ),
)

JSON: Final = rows(
    "strictjson",
    skipped(
        "json-last-key-wins",
        "len(result) != len(pairs)",
        "of equal keys the last one counts",
        "jsn-0018*",
    ),
    skipped(
        "json-not-canonical",
        "serialise(value) != data",
        "JSON that is not in canonical form passes",
        "jsn-0055*",
    ),
    (
        "json-floats",
        "parse_float=_float,",
        "parse_float=float,",
        "numbers with fraction or exponent pass",
        "jsn-0025* jsn-0026*",
    ),
    (
        "json-nan",
        "parse_constant=_constant,",
        "parse_constant=float,",
        "NaN and Infinity are numbers",
        "jsn-0022*",
    ),
    skipped("json-negative", "not _INTEGER.fullmatch(text)", "negative integers pass", "jsn-0028*"),
    skipped(
        "json-big-integers",
        "len(text) > _DIGITS_OF_LARGEST or int(text) > LIMITS.integer",
        "integers above 2^53 - 1 pass",
        "jsn-0039*",
    ),
    (
        "json-depth",
        "depth > LIMITS.json_depth",
        "depth > 900",
        "the limit of nesting is not kept",
        "jsn-0100*",
    ),
    skipped("json-any-key", "not KEY_PATTERN.fullmatch(key)", "any text is a key", "jsn-0046*"),
    (
        "json-key-prefix",
        "KEY_PATTERN.fullmatch(key)",
        "KEY_PATTERN.match(key)",
        "only the start of a key is matched",
        "jsn-0048*",
    ),
    (
        "json-string-characters",
        'size_bytes = len(item.encode("utf-8"))',
        'size_bytes = len(item) + 0 * len(item.encode("utf-8"))',
        "string_bytes counts characters",
        "jsn-0106*",
    ),
    (
        "json-utf8-replaced",
        'errors="strict"',
        'errors="replace"',
        "bytes that are not UTF-8 are replaced",
        "jsn-0130* jsn-0128*",
    ),
    (
        "json-any-value",
        "if type(value) is not dict:",
        "if type(value) not in (dict, list):",
        "the top-level value may be a list",
        "jsn-0013*",
    ),
)

FIELDS: Final = rows(
    "fields",
    (
        "bool-for-integer",
        "if type(value) is not int:",
        "if not isinstance(value, int):",
        "true and false are integers",
        "jsn-0158*",
    ),
    (
        "integer-for-bool",
        "if type(self.value) is not bool:",
        "if self.value not in (0, 1):",
        "0 and 1 are booleans",
        "jsn-0186* jsn-0187*",
    ),
    skipped(
        "unknown-members",
        "len(value) != len(keys)",
        "members that the specification lacks are ignored",
        "man-0022*",
    ),
    (
        "pattern-prefix",
        "pattern.fullmatch(text)",
        "pattern.match(text)",
        "only the start of a digest or name is matched",
        "cnv-0004* cnv-0002*",
    ),
    skipped("minimum-ignored", "value < minimum", "counts may be 0", "grp-0036*"),
    skipped(
        "empty-lists", "len(value) < minimum", "lists that need a member may be empty", "man-0006*"
    ),
    (
        "text-characters",
        "size_bytes = len(text.encode(",
        "size_bytes = len(text) or len(text.encode(",
        "the length of a text counts characters",
        "man-0011*",
    ),
    (
        "positive-may-be-zero",
        "if not 0 < value <",
        "if not 0 <= value <",
        "a scaling or step of 0 passes",
        "idn-0015* idn-0022*",
    ),
    (
        "minus-zero-frequency",
        " and math.copysign(1, value) > 0 for",
        " for",
        "a frequency of -0 passes",
        "idn-0011*",
    ),
)

MANIFEST: Final = rows(
    "manifest",
    (
        "features-ignored",
        "unknown = [item for item in features if item not in KNOWN_FEATURES]",
        "unknown: list[str] = []",
        "features that the reader lacks are ignored",
        "fea-0003*",
    ),
    (
        "must-understand-ignored",
        'if item.get("must_understand") is True and',
        "if False and",
        "extensions that must be understood are ignored",
        "ext-0005*",
    ),
    (
        "must-understand-truthy",
        'if item.get("must_understand") is True and',
        'if item.get("must_understand") and',
        "must_understand 1 counts as true",
        "ord-0021*",
    ),
    (
        "features-after-schema",
        "    require_known(value)\n    root = Node(value)",
        "    root = Node(value)\n    root.members(*_MANIFEST_KEYS)\n    require_known(value)",
        "the members are checked before the features",
        "fea-0011*",
    ),
    skipped("names-twice", "name in names[:index]", "two groups may share a name", "man-0019*"),
    (
        "chain-without-tokens",
        'if (manifest.tokens.chain is not None) != (manifest.identity.kind == "tokens"):',
        "if False:",
        "chain and kind of the identity may disagree",
        "idn-0035* idn-0036*",
    ),
    skipped(
        "content-id-unchecked",
        "manifest.content_id != expected",
        "the content id is not recomputed",
        "cid-0001*",
    ),
    skipped(
        "layer-held-twice", "taken & held", "a layer may be held twice in one role", "grp-0052*"
    ),
    skipped(
        "segment-heads-unchecked",
        "cut.heads > group.heads",
        "more heads a segment than the group has",
        "seg-0015*",
    ),
    skipped(
        "valid-lengths-unbound",
        "(lengths is not None) != bound",
        "windows need no valid lengths",
        "len-0002* len-0005*",
    ),
    skipped(
        "valid-lengths-any",
        "not ascending or not lengths or lengths[-1] != manifest.tokens.count",
        "any list is one of valid lengths",
        "len-0003* len-0006*",
    ),
    skipped(
        "cells-unchecked",
        "track.segments != cells",
        "the number of segments is not that of the cells",
        "tab-0002* tab-0003* tab-0004*",
    ),
    skipped(
        "parts-overlap",
        "part.data_start != cursor or part.data_stop < cursor",
        "parts of the data may overlap or leave holes",
        "dat-0005* dat-0004* dat-0003*",
    ),
    skipped(
        "data-bytes-unchecked",
        "manifest.data_bytes != cursor",
        "data_bytes is not the end of the last part",
        "dat-0030*",
    ),
    skipped("quality-without-track", "unused", "a quality without a track passes", "trk-0026*"),
)

PARTS: Final = (
    *rows(
        "groups",
        skipped(
            "layers-descend",
            "any(a >= b for a, b in pairwise(self.layers))",
            "layers of a group may descend or repeat",
            "grp-0047* grp-0048*",
        ),
        (
            "layer-unknown",
            "self.layers[-1] >= layers_total",
            "self.layers[-1] > layers_total",
            "a layer number may equal layers_total",
            "grp-0049*",
        ),
        skipped(
            "heads-behind-the-last",
            "self.head_start + self.heads > self.heads_total",
            "a group may hold more heads than the model has",
            "grp-0050* grp-0051*",
        ),
        (
            "window-counter",
            "extent.cumulative_tokens != tokens.first_position + tokens.count",
            "False",
            "cumulative_tokens is not compared",
            "grp-0054*",
        ),
        (
            "state-shape",
            'extent.kind == "state" and prod(extent.shape) != self.head_dim',
            "False",
            "the shape of a state need not fit head_dim",
            "grp-0055*",
        ),
        skipped(
            "any-alignment", "alignment not in ALIGNMENTS", "any alignment passes", "man-0015*"
        ),
        skipped(
            "window-behind-the-end",
            "extent.held_start > tokens.count",
            "a window may start behind the last token",
            "grp-0069*",
        ),
    ),
    *rows(
        "identity",
        skipped("rank-unchecked", "key.rank >= key.world_size", "any rank passes", "eng-0002*"),
        (
            "engine-key-unbound",
            'if (self.engine_key is not None) != (self.kind == "engine_key"):',
            "if False:",
            "engine_key and kind may disagree",
            "idn-0032*",
        ),
        (
            "rope-layers-descend",
            "ascending = all(a < b for a, b in pairwise(rope.layers))",
            "ascending = True",
            "rope layers may descend",
            "idn-0028*",
        ),
        skipped(
            "rope-layers-shared",
            "seen & set(rope.layers)",
            "two rope elements may share a layer",
            "idn-0030*",
        ),
        skipped(
            "cache-scale-twice",
            "len({(item.role, item.layer) for item in scales}) != len(scales)",
            "two scales for one role and layer pass",
            "idn-0038*",
        ),
        skipped(
            "cache-scale-layer",
            "any(item.layer >= self.layers_total for item in scales)",
            "a scale of a layer that the model lacks passes",
            "idn-0039*",
        ),
    ),
    *rows(
        "tracks",
        skipped(
            "encodings-count",
            "len(self.encodings) != len(groups)",
            "one encoding a group is not required",
            "qua-0007*",
        ),
        skipped(
            "exact-name",
            "(self.name == EXACT) != all_exact",
            "a quality named exact may be quantised",
            "qua-0005* qua-0006*",
        ),
        skipped(
            "quantised-state",
            "encoding != EXACT and not group.quantisable",
            "states and bytes may be quantised",
            "qua-0008* qua-0009*",
        ),
        (
            "sets-of-exact",
            "if all_exact and (self.sets or self.relative_step is not None):",
            "if False:",
            "an exact quality may have a step and sets",
            "qua-0010* qua-0011*",
        ),
        skipped(
            "track-name",
            "prefix != self.quality or label not in self.codecs",
            "the name of a track says anything",
            "trk-0007* trk-0008*",
        ),
        skipped(
            "hevc-of-exact",
            'codec == "hevc" and encoding == EXACT',
            "hevc may hold exact bytes",
            "trk-0011*",
        ),
        skipped(
            "layouts-without-hevc",
            'self.layouts and "hevc" not in self.codecs',
            "layouts without hevc pass",
            "trk-0013*",
        ),
        skipped(
            "layout-twice",
            "len(set(self.layouts)) != len(self.layouts)",
            "equal layouts pass",
            "trk-0014*",
        ),
        (
            "picture-side-multiple",
            "if side % 16 or side <",
            "if side % 8 or side <",
            "picture sides may be multiples of 8",
            "lay-0024*",
        ),
        skipped(
            "grid-too-large",
            "high > item.height or wide > item.width",
            "the grid may be larger than the picture",
            "lay-0033* lay-0034*",
        ),
    ),
)

TOKENS: Final = (
    *rows(
        "tokens",
        skipped(
            "block-of-any-size", "block != BLOCK_TOKENS", "blocks may have any size", "man-0014*"
        ),
        skipped(
            "spans-overlap",
            "span.start < position or span.start + span.count > stop",
            "content spans may overlap or leave the artifact",
            "tok-0038* tok-0040*",
        ),
        skipped(
            "position-inside-a-block",
            "self.first_position % BLOCK_TOKENS",
            "an artifact may start inside a block",
            "tok-0035*",
        ),
        skipped(
            "parent-anywhere",
            "(self.chain.parent is None) != (self.first_position == 0)",
            "a parent and position 0 pass together",
            "tok-0036* tok-0037*",
        ),
        skipped(
            "hash-count",
            "len(self.chain.hashes) != expected",
            "the chain may be shorter or longer than the tokens",
            "tok-0031* tok-0032*",
        ),
        (
            "chain-without-count",
            'message = link + len(block).to_bytes(4, "little") + block.tobytes()',
            "message = link + block.tobytes()",
            "the number of tokens of a block is not hashed",
            "tok-0001*",
        ),
        (
            "chain-without-identity",
            "keyed_digest(key, identity.canonical())",
            'keyed_digest(key, b"")',
            "the chain does not depend on the identity",
            "tok-0001*",
        ),
        (
            "chain-without-salt",
            "key = chain_key(salt)",
            'key = chain_key(b"")',
            "the salt is ignored",
            "tok-0014*",
        ),
        (
            "chain-of-64-bit-ids",
            "block.tobytes()",
            'block.astype("<u8").tobytes()',
            "ids are hashed as 64-bit numbers",
            "tok-0001*",
        ),
        (
            "chain-goes-on-behind-a-span",
            "            if span.digest is None:\n                return min(",
            "            if False:\n                return min(",
            "the chain has hashes behind a span without digest",
            "tok-0026* tok-0043* tok-0044*",
        ),
    ),
    *rows(
        "expectations",
        skipped("model-ignored", "wanted != found", "the expected model is ignored", "idn-0003*"),
        skipped(
            "parent-ignored",
            "start and (not whole or hashes[-1] != chain.parent)",
            "the tokens before the artifact are not compared",
            "tok-0021* tok-0022*",
        ),
        skipped(
            "agreement-of-the-first-block",
            "length < covered",
            "verify is content with the first block of ids",
            "tok-0008* tok-0009*",
        ),
        skipped(
            "serves-unverified",
            "stop > length",
            "decode serves tokens beyond the verified length",
            "tok-0003* tok-0008* tok-0009*",
        ),
        skipped(
            "no-token-agrees",
            "length == 0 and tokens.count",
            "a cache of other tokens opens",
            "tok-0007* tok-0005* tok-0006*",
        ),
        skipped(
            "salted-ignored",
            "bool(expected.salt) != chain.salted",
            "salted is not compared with the salt given",
            "tok-0045* tok-0046*",
        ),
    ),
)

_LIMITS: Final = {
    "integer": ("2**53 - 1", 1, "lim-0002*"),
    "manifest_bytes": ("16 * 2**20", 1, "ord-0026*"),
    "json_depth": ("16", 1, "jsn-0100* lim-0039*"),
    "string_bytes": ("4096", 1, "jsn-0104*"),
    "groups": ("64", 1, "lim-0004*"),
    "layers_per_group": ("4096", 1, "lim-0006*"),
    "heads": ("65_536", 1, "lim-0008*"),
    "head_dim": ("65_536", 1, "lim-0010*"),
    "channels": ("2**20", 65_536, "lim-0012*"),
    "qualities": ("16", 1, "lim-0014*"),
    "tracks": ("32", 1, "lim-0016*"),
    "layouts_per_track": ("64", 1, "lim-0018*"),
    "picture_sizes_per_track": ("4", 1, "lim-0020*"),
    "frames_per_segment": ("65_536", 1, "lim-0024*"),
    "sets_per_quality": ("2**16", 1, "lim-0025*"),
    "segments_per_track": ("2**20", 1, "lim-0027*"),
    "tokens": ("2**40", 1, "lim-0029*"),
    "tokens_per_segment": ("65_536", 1, "lim-0031*"),
    "layers_per_segment": ("3", 1, "lim-0033*"),
    "token_scales_per_set": ("256", 1, "set-0039*"),
    "side_bytes": ("256 * 2**20", 1, "lim-0056*"),
    "stored_bytes_per_segment": ("512 * 2**20", 1, "lim-0052*"),
    "layers_total": ("65_536", 1, "lim-0035*"),
}

LIMITS: Final = (
    *(
        Mutant(
            f"limit-{name.replace('_', '-')}-raised",
            "kvformat.limits",
            f"    {name}: int = {value}\n",
            f"    {name}: int = {value} + {more}\n",
            f"the limit {name} is {more} higher",
            tuple(hints.split()),
        )
        for name, (value, more, hints) in _LIMITS.items()
    ),
    *rows(
        "limits",
        (
            "limit-decoded-bytes-raised",
            "decoded_bytes_per_segment: int = 256 * 2**20",
            "decoded_bytes_per_segment: int = 2**60",
            "a segment may decode to any size",
            "lim-0060* lim-0062*",
        ),
        (
            "limit-picture-side-raised",
            "picture_side: int = 8192",
            "picture_side: int = 8208",
            "the limit picture_side is 16 higher",
            "lim-0022*",
        ),
        (
            "limit-picture-side-minimum-lowered",
            "picture_side_minimum: int = 144",
            "picture_side_minimum: int = 128",
            "pictures may have sides of 128",
            "lay-0023* lim-0050*",
        ),
        (
            "limit-groups-lowered",
            "    groups: int = 64\n",
            "    groups: int = 63\n",
            "an artifact at the limit of groups is refused",
            "lim-0005*",
        ),
        (
            "limit-integer-lowered",
            "integer: int = 2**53 - 1",
            "integer: int = 2**53 - 2",
            "the largest integer is refused",
            "jsn-0145* jsn-0041* lim-0003*",
        ),
        (
            "limit-token-scales-lowered",
            "token_scales_per_set: int = 256",
            "token_scales_per_set: int = 255",
            "a set with 256 token scales is refused",
            "sid-0007*",
        ),
    ),
)

MUTANTS: Final = (
    *HEADER,
    *FRONT,
    *JSON,
    *FIELDS,
    *MANIFEST,
    *PARTS,
    *TOKENS,
    *LIMITS,
)
