"""Mutants of tables, sets, side blocks, segments, arithmetic, selection and verification."""

from __future__ import annotations

from typing import Final

from conformance.mutants.texts import rows, skipped

TABLES: Final = rows(
    "tables",
    skipped(
        "table-digest-skipped",
        "found != expected",
        "digests of tables are not checked",
        "tab-0014* tab-0013*",
    ),
    (
        "coordinates-unchecked",
        "_require(table, name, records[name].astype(np.int64), grid.fields[name])",
        "pass",
        "coordinates of records are not compared with the grid",
        "rec-0004* rec-0008* rec-0014*",
    ),
    (
        "token-start-limit",
        '_require_at_most(table, "token_start", records["token_start"], "integer")',
        "pass",
        "token_start may be above the largest integer",
        "cnv-0005* cnv-0006*",
    ),
    (
        "offsets-unchecked",
        '_require(table, "offset", begin, -(-cursor // alignment) * alignment)',
        "pass",
        "objects need not be adjacent",
        "dat-0022* dat-0009* dat-0014*",
    ),
    skipped("end-of-part", "last != stop", "a part need not end with its last object", "dat-0029*"),
    (
        "record-reserved",
        '_require(table, "reserved", raw.any(axis=1), False)',
        "pass",
        "reserved bytes of records may be set",
        "tab-0006*",
    ),
    (
        "set-index-range",
        '_require(table, "set_index", (index < len(sets)) | exact, True)',
        "pass",
        "the index of a set is not checked",
        "rec-0026* rec-0027*",
    ),
    (
        "set-index-of-exact",
        '_require(table, "set_index", (index == NO_SET) | ~exact, True)',
        "pass",
        "an exact segment may name a set",
        "rec-0029* rec-0030*",
    ),
    (
        "side-bytes-of-exact",
        '_require(table, "side_bytes", (records["side_bytes"] == 0) | ~exact, True)',
        "pass",
        "an exact segment may have a side block",
        "rec-0031* rec-0037*",
    ),
    (
        "set-of-another-run",
        "differs = sets.records[field][index[named]] != records[field][named]",
        "differs = sets.records[field][index[named]] < 0",
        "a segment may use the set of other layers",
        "rec-0045* rec-0025*",
    ),
    skipped("unused-sets", "len(used) != len(sets)", "a set need not be used", "rec-0053*"),
    (
        "empty-payload",
        'records["stored_bytes"] > records["side_bytes"], True',
        'records["stored_bytes"] >= records["side_bytes"], True',
        "a segment may have no payload",
        "rec-0033* rec-0035* rec-0036*",
    ),
    (
        "layout-of-stored",
        '_require(table, "layout", (records["layout"] == NO_LAYOUT) | hevc, True)',
        "pass",
        "a segment without pictures may name a layout",
        "rec-0032*",
    ),
    skipped(
        "layout-unused",
        "len(used) != len(track.layouts)",
        "a layout need not be used",
        "trk-0025*",
    ),
    (
        "sets-descend",
        '_require(table, "order of sets", np.diff(order) >= 0, True)',
        "pass",
        "sets may come in any order",
        "rec-0054*",
    ),
    (
        "set-bytes-unbounded",
        '_require(table, "bytes", records["bytes"] <= largest, True)',
        "pass",
        "a set may have any number of bytes",
        "rec-0059* rec-0064*",
    ),
    skipped("layout-does-not-fit", "reason", "the layout need not hold the segment", "lay-0046*"),
    (
        "picture-bytes-unbounded",
        "layout.frames * layout.width * layout.height * 3,",
        "0,",
        "pictures may have any size together",
        "lim-0067* lim-0068*",
    ),
)

SETS: Final = rows(
    "sets",
    skipped(
        "set-shape",
        "(found_layers, found_heads, found_dim) != (layers, heads, head_dim)",
        "the shape in a set is not compared",
        "set-0023* set-0031* set-0033*",
    ),
    (
        "set-flags",
        "if flags & ~15 or reserved:",
        "if reserved:",
        "unknown flags of a set are ignored",
        "set-0025*",
    ),
    (
        "set-reserved",
        "if flags & ~15 or reserved:",
        "if flags & ~15:",
        "reserved bytes of a set may be set",
        "set-0037*",
    ),
    (
        "set-length",
        "if total != len(data):",
        "if total > len(data):",
        "bytes behind a set are ignored",
        "set-0042* set-0043*",
    ),
    (
        "scale-range",
        "good = (values >= SCALE_RANGE[0]) & (values <= SCALE_RANGE[1])",
        "good = (values > 0) & np.isfinite(values)",
        "any positive scale passes",
        "set-0050* set-0047*",
    ),
    (
        "bias-range",
        "good = (size >= BIAS_RANGE[0]) & (size <= BIAS_RANGE[1])",
        "good = np.isfinite(size) & (size > 0)",
        "any finite bias passes",
        "set-0064* set-0066*",
    ),
    (
        "bias-minus-zero",
        "good |= item.bias.view(np.uint32) == 0",
        "good |= item.bias == 0",
        "a bias of -0 passes",
        "set-0063*",
    ),
    skipped(
        "order-no-permutation",
        "not (ranks == np.arange(item.head_dim)).all()",
        "an order need not be a permutation",
        "set-0072*",
    ),
    (
        "order-width",
        "if head_dim <= 256",
        "if head_dim < 256",
        "ranks of 256 dims are read as 16-bit numbers",
        "set-0019*",
    ),
    (
        "zero-unsigned",
        "np.ascontiguousarray(arrays[1], np.int16)",
        'np.ascontiguousarray(arrays[1].view("<u2"), np.int32)',
        "zero is read as unsigned",
        "ari-0048*",
    ),
    (
        "token-index-bound",
        "if tokens and int(index.max()) >= len(item.token_scale):",
        "if False:",
        "indices of token scales are not checked",
        "sid-0018*",
    ),
    skipped("side-length", "cursor != size_bytes", "bytes behind a side block pass", "sid-0016*"),
    (
        "patches-descend",
        "(ordinals[-1] >= tokens or (np.diff(ordinals) <= 0).any())",
        "(ordinals >= tokens).any()",
        "ordinals of patches may descend or repeat",
        "sid-0020* sid-0021*",
    ),
    (
        "patches-behind-the-end",
        "(ordinals[-1] >= tokens or (np.diff(ordinals) <= 0).any())",
        "(np.diff(ordinals) <= 0).any()",
        "patches may lie behind the last token",
        "sid-0023*",
    ),
    (
        "neutral-without-clip",
        "np.clip(item.zero, 0, 255)",
        "item.zero",
        "the neutral integer of a zero outside 0..255 wraps",
        "set-0017* sid-*",
    ),
)

SEGMENTS: Final = rows(
    "segments",
    (
        "segment-digest-skipped",
        " or digest(data) != record.digest:",
        ":",
        "digests of segments are not checked",
        "cnv-0008* ord-0001*",
    ),
    skipped(
        "integer-digest-skipped",
        "found != segment.context.record.integer_digest",
        "integer digests are not recomputed",
        "int-0003*",
    ),
    skipped(
        "neutral-unchecked",
        "(canonical[layer, patches.ordinals] != neutral[layer]).any()",
        "integers at a patch may have any value",
        "sid-0039*",
    ),
    skipped(
        "index-at-a-patch",
        "index is not None and index[layer, patches.ordinals].any()",
        "the token scale at a patch may have any index",
        "sid-0034*",
    ),
    skipped(
        "patch-not-finite",
        "not np.isfinite(patches.rows.astype(np.float32)).all()",
        "patches may hold NaN and infinity",
        "sid-0035*",
    ),
    skipped("filler-unchecked", "not segment.decoded.clean", "filler may be anything", "lay-0050*"),
    (
        "patches-not-applied",
        "    if segment.side is not None:\n        _patch(segment.side, target, part)",
        "",
        "patches are ignored, as if the arithmetic came after them",
        "sid-0003*",
    ),
    (
        "patches-of-the-first-layer",
        "enumerate(side.patches[part.layers])",
        "enumerate([side.patches[0]] * target.shape[0])",
        "all layers get the patches of the first",
        "sid-0008*",
    ),
    (
        "patch-place-in-parts",
        "patches.ordinals[mine] - part.tokens.start",
        "patches.ordinals[mine]",
        "patches of a part of a segment land at their place in the whole",
        "par-0001*",
    ),
    (
        "token-scale-skipped",
        "token_scale=token_scale,",
        "token_scale=None,",
        "token scales are not applied",
        "sid-0006* sid-0007*",
    ),
    (
        "bias-skipped",
        "bias=None if item.bias is None else item.bias[part.layers, heads],",
        "bias=None,",
        "the bias is not added",
        "set-0005*",
    ),
    (
        "order-inverted",
        "inverse = np.argsort(item.order[part.layers, heads], axis=-1)",
        "inverse = item.order[part.layers, heads]",
        "order is taken as dim to rank when values are restored",
        "ari-0002*",
    ),
    (
        "order-inverted-in-digests",
        "inverse = np.argsort(order, axis=-1)",
        "inverse = order",
        "order is taken as dim to rank when integers are digested",
        "ari-0002*",
    ),
    (
        "heads-from-the-first",
        "start = self.record.cell.head_start",
        "start = 0",
        "every segment takes the parameters of the first heads",
        "seg-0008*",
    ),
)

ARTIFACT: Final = rows(
    "artifact",
    skipped(
        "set-digest-skipped",
        "found != record.digest",
        "digests of sets are not checked",
        "cnv-0007*",
    ),
    (
        "valid-lengths-ignored",
        "and (begin or end not in lengths)",
        "and False",
        "windows and states serve any prefix",
        "len-0001*",
    ),
    (
        "valid-lengths-from-anywhere",
        "and (begin or end not in lengths)",
        "and end not in lengths",
        "windows and states serve parts that do not start at 0",
        "len-0001*",
    ),
)

GRID: Final = rows(
    "groups",
    (
        "layers-by-index",
        "first_layer = np.asarray(group.layers, dtype=np.int64)[layer_index[run]]",
        "first_layer = layer_index[run]",
        "segments of unlike layers are ordered by index, not by number",
        "grp-0021* grp-0029* grp-0028*",
    ),
    (
        "groups-before-layers",
        "np.lexsort((heads, members, layers, blocks))",
        "np.lexsort((heads, layers, members, blocks))",
        "token-major puts groups before layers",
        "seg-0002*",
    ),
    (
        "blocks-before-heads",
        "np.lexsort((blocks, heads, members, layers))",
        "np.lexsort((heads, blocks, members, layers))",
        "layer-major puts blocks before heads",
        "seg-0009*",
    ),
    (
        "orders-swapped",
        'if segmentation.order == "token-major":',
        'if segmentation.order == "layer-major":',
        "token-major and layer-major are swapped",
        "seg-0001*",
    ),
    (
        "states-first",
        "return np.array([-(-count // step)]), np.array([0])",
        "return np.array([0]), np.array([0])",
        "states come before the tokens",
        "grp-0028*",
    ),
    (
        "window-blocks-from-its-start",
        "begin = np.maximum(block * step, start)",
        "block = np.arange(-(-(stop - start) // step), dtype=np.int64)\n"
        "    return block, start + block * step, "
        "np.minimum(start + (block + 1) * step, stop) - (start + block * step)\n"
        "    begin = np.maximum(block * step, start)",
        "blocks of a window are counted from its start",
        "grp-0027*",
    ),
)

SELECTION: Final = rows(
    "selection",
    (
        "head-start-ignored",
        "return (begin - first, end - first)",
        "return (begin, end)",
        "global head numbers are taken as indices",
        "grp-0068* grp-0022*",
    ),
    (
        "layers-as-indices",
        "or layer in wanted_layers",
        "or position in wanted_layers",
        "global layer numbers are taken as indices",
        "par-0005*",
    ),
    (
        "outside-clipped",
        "if not 0 <= begin <= end <= stop:",
        "begin, end = min(begin, stop), min(end, stop)\n    if not 0 <= begin <= end:",
        "an interval outside the artifact is clipped",
        "par-0006*",
    ),
    (
        "missing-layers",
        "missing = sorted(wanted - held)",
        "missing: list[int] = []",
        "layers that the artifact lacks are left out",
        "par-0006* par-0005*",
    ),
)

_ROUND: Final = "_round(x, out.view(rounding.unsigned), rounding)"
_CUT: Final = "(x.view(np.int32) & np.int32(-1 << int(rounding.shift))).view(np.float32)"

ARITHMETIC: Final = rows(
    "quant",
    *(
        (
            f"truncated-{label}",
            _ROUND,
            f"_round({_CUT} if out.dtype == {kind} else x, out.view(rounding.unsigned), rounding)",
            f"{label} is truncated instead of rounded",
            hints,
        )
        for label, kind, hints in (
            ("float16", "_FLOAT16", "ari-0036*"),
            ("float8-e4m3fn", "_E4M3", "ari-0042*"),
            ("float8-e5m2", "_E5M2", "ari-0045*"),
        )
    ),
    *(
        (
            f"flushed-{label}",
            _ROUND,
            f"_round(np.where((np.abs(x) < np.float32({least})) & (out.dtype == {kind}), "
            "x * np.float32(0), x), out.view(rounding.unsigned), rounding)",
            f"subnormals of {label} become 0",
            hints,
        )
        for label, kind, least, hints in (
            ("float16", "_FLOAT16", "2.0**-14", "ari-0037*"),
            ("float8-e4m3fn", "_E4M3", "2.0**-6", "ari-0043*"),
            ("float8-e5m2", "_E5M2", "2.0**-14", "ari-0046*"),
        )
    ),
    (
        "float8-through-float16",
        _ROUND,
        "_round(x if out.dtype == _FLOAT16 else x.astype(np.float16).astype(np.float32), "
        "out.view(rounding.unsigned), rounding)",
        "float8 is rounded twice, first to float16",
        "ari-0013*",
    ),
    (
        "truncated-bfloat16",
        "np.add(odd, np.uint32(0x7FFF), out=odd)",
        "np.copyto(odd, bits)",
        "bfloat16 is truncated instead of rounded",
        "ari-0039*",
    ),
    (
        "bfloat16-ties-away",
        "np.bitwise_and(odd, np.uint32(1), out=odd)",
        "odd[...] = 1",
        "ties of bfloat16 go away from zero",
        "ari-0039*",
    ),
    (
        "no-clamp",
        "clamp = _bound(scales, zeros, biases, token_scale) > 0.999 * limit",
        "clamp = False",
        "values beyond the largest finite one are not clamped",
        "ari-0035* ari-0034*",
    ),
    (
        "e4m3fn-clamped-to-240",
        "_E4M3: 448.0,",
        "_E4M3: 240.0,",
        "float8_e4m3fn ends at 240, as another format does",
        "ari-0041*",
    ),
    (
        "fused",
        "            np.multiply(x, scales[tile], out=x)\n"
        "            if token_scale is not None:\n"
        "                np.multiply(x, token_scale[tile.layer, tile.tokens, None], out=x)\n"
        "            if biases is not None:\n"
        "                np.add(x, biases[tile], out=x)\n",
        "            wide = x.astype(np.float64) * scales[tile]\n"
        "            if token_scale is not None:\n"
        "                x[...] = wide\n"
        "                wide = x * token_scale[tile.layer, tile.tokens, None].astype(np.float64)\n"
        "            if biases is not None:\n"
        "                wide = wide + biases[tile]\n"
        "            x[...] = wide\n",
        "the last product and the bias are one operation (fused multiply-add)",
        "ari-0047*",
    ),
    (
        "scales-multiplied-first",
        "            np.multiply(x, scales[tile], out=x)\n"
        "            if token_scale is not None:\n"
        "                np.multiply(x, token_scale[tile.layer, tile.tokens, None], out=x)\n",
        "            np.multiply(x, scales[tile] * (1 if token_scale is None else "
        "token_scale[tile.layer, tile.tokens, None]), out=x)\n",
        "the two scales are multiplied with each other first",
        "ari-0048*",
    ),
    (
        "bias-before-token-scale",
        "            if token_scale is not None:\n"
        "                np.multiply(x, token_scale[tile.layer, tile.tokens, None], out=x)\n"
        "            if biases is not None:\n"
        "                np.add(x, biases[tile], out=x)\n",
        "            if biases is not None:\n"
        "                np.add(x, biases[tile], out=x)\n"
        "            if token_scale is not None:\n"
        "                np.multiply(x, token_scale[tile.layer, tile.tokens, None], out=x)\n",
        "the token scale is applied to the bias too",
        "ari-0048* set-0008*",
    ),
    (
        "zero-folded",
        "            np.subtract(x, zeros[tile], out=x)\n"
        "            np.multiply(x, scales[tile], out=x)\n",
        "            np.multiply(x, scales[tile], out=x)\n"
        "            np.subtract(x, zeros[tile] * scales[tile], out=x)\n",
        "the zero is subtracted behind the product",
        "ari-0048* ari-0001*",
    ),
)

SEQUENCE: Final = rows(
    "sequence",
    (
        "padding-unchecked",
        "padding = self._bytes(self.cursor, offset - self.cursor)",
        'padding = b""',
        "padding between objects may be anything",
        "dat-0002* dat-0024*",
    ),
)

VERIFICATION: Final = rows(
    "verification",
    (
        "tracks-sets-differ",
        'for name in ("set_index", "integer_digest", "side_bytes"):',
        'for name in ("integer_digest", "side_bytes"):',
        "tracks of one quality may use other sets",
        "rec-0061*",
    ),
    (
        "tracks-integers-differ",
        'for name in ("set_index", "integer_digest", "side_bytes"):',
        'for name in ("set_index", "side_bytes"):',
        "tracks of one quality may hold other integers",
        "rec-0060*",
    ),
    skipped(
        "tracks-sides-differ",
        "mine != theirs",
        "tracks of one quality may have other side blocks",
        "rec-0062*",
    ),
    (
        "exact-groups-differ",
        "        self._compare_exact_groups()\n",
        "",
        "two qualities may differ in a group that both hold exactly",
        "rec-0063*",
    ),
    skipped(
        "source-digest-unchecked",
        "found != self.manifest.source_digest",
        "the source digest is not recomputed",
        "cid-0005* cid-0007*",
    ),
)

MUTANTS: Final = (
    *TABLES,
    *SETS,
    *SEGMENTS,
    *ARTIFACT,
    *GRID,
    *SELECTION,
    *ARITHMETIC,
    *SEQUENCE,
    *VERIFICATION,
)
