"""Mutants of calibration profiles (spec section 9.6), and of whether one fits (TRF-4, TRF-5)."""

from __future__ import annotations

from typing import Final

from conformance.mutants.texts import Row, rows, skipped

_WANTED: Final = "wanted = (group.heads, group.heads_total, group.head_start, group.head_dim)"
_FOUND: Final = "found = (item.heads, item.heads_total, item.head_start, item.head_dim)"
_SAME: Final = "same = profile.model.id == model.id"
_MEAN: Final = "((mean.view(np.uint32) == 0) | (size >= BIAS_RANGE[0])).all()"
_ROW_SCALE: Final = "((row_scale >= ROW_SCALE_RANGE[0]) & (row_scale <= ROW_SCALE_RANGE[1])).all()"
_LENGTH: Final = "if not cursor + size == stated == len(data) or header.tables_bytes:"


def _shape(field: str, hints: str) -> Row:
    """One member of a transform's shape that is not compared."""
    return (
        f"fit-{field.replace('_', '-')}",
        f"        {_WANTED}\n        {_FOUND}\n",
        f"        {_WANTED.replace(f'group.{field},', f'item.{field},')}\n        {_FOUND}\n",
        f"{field} of transform and group are not compared",
        hints,
    )


SHELF: Final = rows(
    "profile_shelf",
    (
        "profile-of-any-digest",
        "            profile = load_profile(url) if _digest_of(url) == digest else None\n"
        "        except UsageError:\n"
        "            raise\n"
        "        except KvformatError as error:\n"
        "            failed = failed or error\n"
        "            continue\n"
        "        if profile is not None and profile.digest == digest:",
        "            profile = load_profile(url)\n"
        "        except UsageError:\n"
        "            raise\n"
        "        except KvformatError as error:\n"
        "            failed = failed or error\n"
        "            continue\n"
        "        if True:",
        "another profile than the one named is taken",
        "trf-0027*",
    ),
    (
        "profile-of-any-model",
        "check_model(profile, self._manifest.identity.model)",
        "pass",
        "the model of a profile is not compared",
        "trf-0033* trf-0034*",
    ),
    (
        "profile-length",
        "if size not in (None, header.file_bytes):",
        "if False:",
        "bytes behind a profile are ignored",
        "trf-*-profile-headers trf-0027*",
    ),
)

FIT: Final = rows(
    "profiles",
    (
        "fit-model-id",
        _SAME,
        "same = True",
        "the model's id is not compared",
        "trf-0033*",
    ),
    (
        "fit-whole-model",
        _SAME,
        "same = profile.model == model",
        "revision and weights must be stated alike",
        "trf-*-model-stated-in-part",
    ),
    (
        "fit-weights",
        "if not same or len(digests) > 1:",
        "if not same:",
        "digests of the weights are not compared",
        "trf-0034*",
    ),
    (
        "fit-any-quality",
        "record.key == key",
        "record.key[1:] == key[1:]",
        "a transform for another quality is taken",
        "trf-0015* trf-0029*",
    ),
    (
        "fit-any-role",
        "record.key == key",
        "record.key[::2] == key[::2]",
        "a transform for another role is taken",
        "trf-0001*",
    ),
    (
        "fit-any-layer",
        "record.key == key",
        "record.key[:2] == key[:2]",
        "the transform of another layer is taken",
        "trf-0001*",
    ),
    _shape("heads", "trf-*-fit-one-head"),
    _shape("heads_total", "trf-0030*"),
    _shape("head_start", "trf-*-fit-other-heads-held"),
    (
        "fit-head-dim",
        f"        {_WANTED}\n        {_FOUND}\n",
        f"        {_WANTED}\n        {_FOUND}\n".replace("item.head_dim", "group.head_dim"),
        "head_dim of transform and group are not compared",
        "trf-*-fit-two-dims",
    ),
    skipped("fit-rope", "item.pairs", "identity.rope is not looked at", "trf-0035* trf-0036*"),
    (
        "fit-rope-without-pairs",
        "        if item.pairs:\n            _check_rope(",
        "        if True:\n            _check_rope(",
        "transforms without pairs need an element of rope",
        "trf-0001* trf-0005*",
    ),
    (
        "fit-keys-rotated",
        "if rope is None or not rope.keys_rotated:",
        "if rope is None:",
        "keys_rotated is not looked at",
        "trf-0036*",
    ),
    (
        "fit-rope-of-any-layer",
        "if item.layer in found.layers)",
        "if found.layers)",
        "the rope of another layer is taken",
        "trf-0039*",
    ),
    (
        "fit-pairing",
        "found = (rope.pairing, len(rope.inv_freq) // 8)",
        "found = (item.pairing, len(rope.inv_freq) // 8)",
        "the pairing is not compared",
        "trf-0037*",
    ),
    (
        "fit-pairs",
        "found = (rope.pairing, len(rope.inv_freq) // 8)",
        "found = (rope.pairing, item.pairs)",
        "the number of frequencies is not compared",
        "trf-0038*",
    ),
)

NUMBERS: Final = rows(
    "profiles",
    (
        "matrix-transposed",
        "np.ascontiguousarray(matrix.T, np.float32)",
        "np.ascontiguousarray(matrix, np.float32)",
        "the matrix is transposed",
        "trf-0001*",
    ),
    (
        "matrix-in-16-bits",
        "np.ascontiguousarray(matrix.T, np.float32)",
        "np.ascontiguousarray(matrix.T.astype(np.int16), np.float32)",
        "integers of a matrix wrap at 16 bits",
        "trf-0014*",
    ),
    (
        "mean-and-row-scale-swapped",
        "mean, row_scale = np.frombuffer(",
        "row_scale, mean = np.frombuffer(",
        "row_scale stands before the mean",
        "trf-0001*",
    ),
    (
        "sine-before-cosine",
        "Rotation(item.pairing, turns[0], turns[1])",
        "Rotation(item.pairing, turns[1], turns[0])",
        "the sines stand before the cosines",
        "trf-0001*",
    ),
    (
        "turns-interleaved",
        ".reshape(2, n).astype(np.float64)",
        ".reshape(n, 2).T.astype(np.float64)",
        "cosine and sine of a pair stand side by side",
        "trf-0001*",
    ),
    skipped(
        "object-digest",
        "digest(raw).hex() != item.digest",
        "digests of transforms are not checked",
        "trf-0027*",
    ),
    (
        "row-budget-unchecked",
        "(rows <= ROW_BUDGET).all()",
        "True",
        "the sum of a row may be any",
        "prf-0014* prf-0015*",
    ),
    (
        "row-budget-one-more",
        "(rows <= ROW_BUDGET).all()",
        "(rows <= ROW_BUDGET + 1).all()",
        "a row may add up to 131,073",
        "prf-0014*",
    ),
    (
        "row-budget-one-less",
        "(rows <= ROW_BUDGET).all()",
        "(rows < ROW_BUDGET).all()",
        "a row that adds up to 131,072 is refused",
        "trf-0014*",
    ),
    (
        "row-budget-with-signs",
        "rows = np.abs(matrix.astype(np.int64)).sum(axis=1)",
        "rows = np.abs(matrix.astype(np.int64).sum(axis=1))",
        "signs cancel in the sum of a row",
        "prf-0014*",
    ),
    (
        "row-budget-by-column",
        "np.abs(matrix.astype(np.int64)).sum(axis=1)",
        "np.abs(matrix.astype(np.int64)).sum(axis=0)",
        "columns are summed, not rows",
        "trf-0014* prf-0014*",
    ),
    (
        "row-budget-in-32-bits",
        "np.abs(matrix.astype(np.int64)).sum(axis=1)",
        "np.abs(matrix.astype(np.int32)).sum(axis=1)",
        "the magnitude of -2^31 is taken as negative",
        "prf-0015*",
    ),
    (
        "row-scale-unchecked",
        _ROW_SCALE,
        "True",
        "a row_scale may be any",
        "prf-0016* prf-0017*",
    ),
    (
        "row-scale-as-a-scale",
        "ROW_SCALE_RANGE: Final = (2.0**-40, 2.0**22)",
        "ROW_SCALE_RANGE: Final = (2.0**-40, 2.0**40)",
        "a row_scale may be as large as a scale of a set",
        "prf-0017*",
    ),
    (
        "row-scale-least",
        "(row_scale >= ROW_SCALE_RANGE[0])",
        "(row_scale > 0)",
        "a row_scale may be as small as it likes",
        "prf-0018*",
    ),
    (
        "row-scale-at-the-limits",
        _ROW_SCALE,
        "((row_scale > ROW_SCALE_RANGE[0]) & (row_scale < ROW_SCALE_RANGE[1])).all()",
        "a row_scale at a limit of its range is refused",
        "trf-*-numbers-at-their-limits",
    ),
    (
        "mean-least",
        _MEAN,
        "((mean.view(np.uint32) == 0) | (size > 0)).all()",
        "a mean may be as small as it likes",
        "prf-0022*",
    ),
    (
        "mean-minus-zero",
        "(mean.view(np.uint32) == 0)",
        "(mean == 0)",
        "a mean of -0 passes",
        "prf-0020*",
    ),
    (
        "mean-never-zero",
        "((mean.view(np.uint32) == 0) | (size >= BIAS_RANGE[0])).all()",
        "(size >= BIAS_RANGE[0]).all()",
        "a mean of +0 is refused",
        "trf-*-numbers-at-their-limits",
    ),
    (
        "mean-most",
        "(size <= BIAS_RANGE[1]).all()",
        "True",
        "a mean may be infinite",
        "prf-0021*",
    ),
    (
        "turns-unbounded",
        "(np.abs(turns) <= 1).all()",
        "not np.isnan(turns).any()",
        "a cosine may be above 1",
        "prf-*-cos-a-little-above-1",
    ),
    (
        "turns-grow",
        "(turns[0] * turns[0] + turns[1] * turns[1] <= LARGEST_TURN).all()",
        "True",
        "cosine and sine may be any two numbers up to 1",
        "prf-0025*",
    ),
    (
        "turns-grow-a-little",
        "LARGEST_TURN: Final = 1 + 2.0**-40",
        "LARGEST_TURN: Final = 1 + 2.0**-24",
        "the bound of a turn is loose, as of numbers in binary32",
        "prf-*-turn-a-little-long",
    ),
    (
        "turns-at-most-one",
        "LARGEST_TURN: Final = 1 + 2.0**-40",
        "LARGEST_TURN: Final = 1.0",
        "a turn that rounding made longer than 1 is refused",
        "trf-*-numbers-at-their-limits",
    ),
)

STRUCTURE: Final = rows(
    "profiles",
    skipped(
        "profile-manifest-digest",
        "digest(raw) != header.manifest_digest",
        "the digest of a profile's manifest is not checked",
        "trf-0027*",
    ),
    (
        "profile-extensions-ignored",
        "    require_known(value)\n",
        "",
        "features and extensions of a profile are not looked at",
        "prf-*-profile-extension",
    ),
    (
        "profile-any-member",
        "m = Node(value).members(*_KEYS)",
        "m = {key: Node(value).members(*value)[key] for key in _KEYS}",
        "members of a profile that the text lacks are ignored",
        "prf-0003*",
    ),
    (
        "profile-any-format",
        'm["format"].choice(FORMAT)',
        'm["format"].text()',
        "the member `format` of a profile is not looked at",
        "prf-*-other-format",
    ),
    skipped(
        "profile-features",
        "features != (TRANSFORM_KLT,)",
        "the features of a profile may be repeated or none",
        "prf-0004*",
    ),
    skipped(
        "profile-any-order",
        "records and records[-1].key >= found.key",
        "transforms may come in any order, and twice",
        "prf-0010* prf-0011*",
    ),
    (
        "profile-twice",
        "records[-1].key >= found.key",
        "records[-1].key > found.key",
        "a transform may be there twice",
        "prf-0011*",
    ),
    (
        "profile-pairs-of-none",
        'found.head_dim // 2 if found.pairing != "none" else 0',
        'found.head_dim // 2 if found.pairing != "none" else found.pairs',
        "the pairing `none` may have pairs",
        "prf-*-unneeded-none",
    ),
    (
        "profile-pairs-0",
        "if not least <= found.pairs <= bound:",
        "if not found.pairs <= bound:",
        "a pairing may have no pairs",
        "prf-*-unneeded-pairs-0",
    ),
    (
        "profile-pairs-most",
        "if not least <= found.pairs <= bound:",
        "if not least <= found.pairs:",
        "a head may have more pairs than half its dims",
        "prf-*-unneeded-pairs-3",
    ),
    (
        "profile-data-bytes",
        _LENGTH,
        "if not cursor + size == len(data) or header.tables_bytes:",
        "data_bytes of a profile is not compared",
        "prf-0002*",
    ),
    (
        "profile-byte-behind",
        f"    {_LENGTH}\n        raise content("
        '"the data has another length", "profile", cursor + size, len(data))\n'
        "    writer = bytes(data[cursor:])\n",
        "    writer = bytes(data[cursor : cursor + size])\n",
        "bytes behind the last object are ignored",
        "prf-*-unnamed-byte prf-0001*",
    ),
    (
        "profile-tables",
        "header = parse_header(data, MAGIC)",
        "header = replace(parse_header(data, MAGIC), tables_bytes=0)",
        "tables_bytes of a profile is ignored",
        "trf-*-profile-headers",
    ),
    skipped(
        "profile-writer-digest",
        'digest(writer).hex() != last["digest"].digest()',
        "without a writer's part its digest may be any",
        "prf-0013*",
    ),
)

MUTANTS: Final = (*SHELF, *FIT, *NUMBERS, *STRUCTURE)
