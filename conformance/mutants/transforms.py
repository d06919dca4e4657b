"""Mutants of transformed groups (spec section 9.5): manifest, sets, product and rotation."""

from __future__ import annotations

from typing import Final

from conformance.mutants.texts import Row, rows, skipped

_STEPS: Final = (
    "np.multiply(z, self.row_scale, out=z)",
    "np.multiply(z, scale, out=z)",
    "if token_scale is not None:\n            np.multiply(z, token_scale[:, None], out=z)",
    "np.add(z, self.mean, out=z)",
)
_BREAK: Final = "\n        "
_ROW, _SCALE, _TOKEN, _MEAN = _STEPS
_TURN: Final = (
    "        x = z.reshape(tokens, heads, head_dim)\n"
    "        if self.rotation is not None:\n"
    "            self.rotation.turn(x, positions)\n"
    "        return x\n"
)
_ROTATE: Final = (
    '"""Rotate ``z`` float32 ``[T, H, D]`` in place; ``back`` is the inverse up to rounding."""\n'
)
_HALVES: Final = '(i, i + n) if self.pairing == "half" else (2 * i, 2 * i + 1)'
_TURNED: Final = "a * cosine - b * sine, b * cosine + a * sine"
_STEP: Final = "c, s = np.frombuffer(cosine), np.frombuffer(sine)"
_POWERS: Final = "x.astype(np.float32), y.astype(np.float32)"


def _turn(
    name: str, breaks: str, hints: str, *, pairs: str = _HALVES, turned: str = _TURNED
) -> Row:
    """The rotation written anew with other pairs, or with another sum of products."""
    lines = (
        "        cosine, sine = (item[:, None] for item in self.table(positions))",
        "        n, i = len(self.cosine), np.arange(len(self.cosine))",
        f"        u, v = {pairs}",
        "        a, b = z[..., u], z[..., v]",
        f"        z[..., u], z[..., v] = {turned}",
        "        return",
    )
    return (name, _ROTATE, _ROTATE + "\n".join(lines) + "\n", breaks, hints)


def _steps(name: str, order: tuple[str, ...], breaks: str) -> Row:
    """The operations of z in another order."""
    return (name, _BREAK.join(_STEPS), _BREAK.join(order), breaks, "trf-0001* trf-*-float32")


MANIFEST: Final = rows(
    "manifest",
    (
        "profile-without-a-feature",
        'with_profile = TRANSFORM_KLT in value["features"]',
        'with_profile = "profile" in value',
        "`profile` and the feature need not go together",
        "trf-0017* trf-0016*",
    ),
    skipped(
        "nothing-transformed",
        "manifest.profile is not None and not found",
        "the feature may be listed where no group is transformed",
        "trf-0018*",
    ),
    skipped(
        "transformed-without-the-feature",
        "manifest.profile is None",
        "a group may be transformed without the feature",
        "trf-0020*",
    ),
    skipped(
        "transformed-heads-cut",
        "not whole",
        "segments of a transformed group may hold some of its heads",
        "trf-0021*",
    ),
)

SETS: Final = (
    *rows(
        "sets",
        skipped(
            "transformed-set-flags",
            "transformed and flags",
            "the set of a transformed group may have flags",
            "trf-0022* trf-0023* trf-0024* trf-0025*",
        ),
        *(
            (
                f"transformed-set-flag-{flag}",
                "if transformed and flags:",
                f"if transformed and flags & ~{flag}:",
                f"the set of a transformed group may have {what}",
                hints,
            )
            for flag, what, hints in (
                (1, "a scale per channel", "trf-0022*"),
                (2, "a zero per channel", "trf-0023*"),
                (4, "a bias", "trf-0024*"),
                (8, "an order", "trf-0025*"),
            )
        ),
        skipped(
            "transformed-zero",
            "transformed and (result.zero != TRANSFORMED_ZERO).any()",
            "the zero of a transformed group may be any",
            "trf-0026*",
        ),
        (
            "transformed-zero-of-the-first-layer",
            "(result.zero != TRANSFORMED_ZERO).any()",
            "result.zero.flat[0] != TRANSFORMED_ZERO",
            "only the zero of the first layer is looked at",
            "trf-0026*",
        ),
    ),
    *rows(
        "tracks",
        (
            "transformed-states-and-bytes",
            "if encoding != EXACT and not group.quantisable:",
            'if encoding == "quantised" and not group.quantisable:',
            "states and opaque bytes may be transformed",
            "qua-*-opaque-bytes",
        ),
    ),
)

PRODUCT: Final = rows(
    "transforms",
    (
        "slots-by-head",
        "q.transpose(0, 2, 1).reshape(",
        "q.reshape(",
        "slots count heads before dims, as channels do",
        "trf-0001*",
    ),
    (
        "centre-127",
        "CENTRE: Final = 128",
        "CENTRE: Final = 127",
        "127 is taken from the integers",
        "trf-0001*",
    ),
    (
        "centre-forgotten",
        "np.subtract(u, np.float32(CENTRE), out=u)",
        "pass",
        "nothing is taken from the integers",
        "trf-0001*",
    ),
    (
        "product-in-tf32",
        "z = u @ self.slots",
        "z = u @ (self.slots.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)",
        "the matrix is cut to the 10 bits of TF32",
        "trf-*-float32",
    ),
    (
        "product-in-halves",
        "z = u @ self.slots",
        "half = len(self.slots) // 2\n"
        "            z = (u[:, :half] @ self.slots[:half]).astype(np.float16).astype(np.float32)\n"
        "            z = z + u[:, half:] @ self.slots[half:]",
        "half of the sum passes through binary16",
        "trf-0001*",
    ),
    (
        "product-wraps-at-2-24",
        "z = u @ self.slots",
        "z = ((u @ self.slots + 2**23) % 2**24 - 2**23).astype(np.float32)",
        "sums are kept in 24 bits with a sign",
        "trf-0014*",
    ),
    _steps("row-scale-last", (_SCALE, _TOKEN, _ROW, _MEAN), "row_scale follows the token scale"),
    _steps("row-scale-second", (_SCALE, _ROW, _TOKEN, _MEAN), "row_scale follows the scale"),
    _steps("scale-last", (_ROW, _TOKEN, _SCALE, _MEAN), "the scale follows the token scale"),
    _steps("mean-before-the-scale", (_ROW, _MEAN, _SCALE, _TOKEN), "the mean is scaled as well"),
    _steps("mean-before-the-token-scale", (_ROW, _SCALE, _MEAN, _TOKEN), "the token scale is last"),
    _steps("row-scale-skipped", (_SCALE, _TOKEN, _MEAN), "row_scale is not applied"),
    _steps("set-scale-skipped", (_ROW, _TOKEN, _MEAN), "the scale of the set is not applied"),
    _steps("transformed-token-scale-skipped", (_ROW, _SCALE, _MEAN), "token scales are ignored"),
    _steps("mean-skipped", (_ROW, _SCALE, _TOKEN), "the mean is not added"),
    _steps(
        "scales-first",
        ("np.multiply(z, self.row_scale * scale, out=z)", _TOKEN, _MEAN),
        "row_scale and scale are multiplied first",
    ),
    _steps(
        "transformed-fused",
        (
            _ROW,
            "wide = z.astype(np.float64) * scale",
            "wide = wide if token_scale is None else wide.astype(np.float32) * "
            "token_scale[:, None].astype(np.float64)",
            "z = (wide + self.mean).astype(np.float32)",
        ),
        "the last multiplication and the addition are one operation",
    ),
    (
        "mean-after-the-rotation",
        _BREAK.join((_MEAN, _TURN.lstrip())),
        _TURN.replace("return x", "return x + self.mean.reshape(heads, head_dim)").lstrip(),
        "the mean is added behind the rotation",
        "trf-0001*",
    ),
    (
        "rotation-forgotten",
        "if self.rotation is not None:",
        "if False:",
        "values are not rotated",
        "trf-0001*",
    ),
)

ROTATION: Final = rows(
    "transforms",
    _turn(
        "pairings-swapped",
        "the pairings half and interleaved are swapped",
        "trf-0001*",
        pairs=_HALVES.replace("==", "!="),
    ),
    _turn(
        "halves-of-the-head",
        "the second dim of a pair is D / 2 behind the first, not n",
        "trf-0003*",
        pairs=_HALVES.replace("i + n", "i + z.shape[-1] // 2"),
    ),
    _turn(
        "interleaved-from-the-end",
        "the last dims are rotated and the first left alone",
        "trf-0004*",
        pairs=_HALVES.replace("(2 * i, 2 * i + 1)", "(2 * i - 2 * n, 2 * i - 2 * n + 1)"),
    ),
    _turn(
        "rotation-backwards",
        "the rotation goes the other way",
        "trf-0001*",
        turned="a * cosine + b * sine, b * cosine - a * sine",
    ),
    _turn(
        "rotation-in-place",
        "the second dim is found from the first one after its turn",
        "trf-0001*",
        turned="(a := a * cosine - b * sine), b * cosine + a * sine",
    ),
    _turn(
        "rotation-fused",
        "one product of each sum is not rounded",
        "trf-*-float32",
        turned="a.astype(np.float64) * cosine - b * sine, b.astype(np.float64) * cosine + a * sine",
    ),
    _turn(
        "rotation-in-binary64",
        "values are rotated in binary64 and rounded once",
        "trf-*-float32",
        turned=_TURNED.replace("a *", "a.astype(float) *").replace("b *", "b.astype(float) *"),
    ),
    _turn(
        "rotation-flushes-subnormals",
        "products that are subnormal become 0",
        "trf-*-numbers-at-their-limits",
        turned="*(f(x) + f(y) for f in [lambda w: np.where(np.abs(w) < 2.0**-126, w * 0, w)] "
        "for x, y in ((a * cosine, -b * sine), (b * cosine, a * sine))),",
    ),
    (
        "rotation-by-a-cosine",
        _POWERS,
        "np.cos(angle := positions[:, None] * np.arctan2(np.frombuffer(sine), "
        "np.frombuffer(cosine))).astype(np.float32), np.sin(angle).astype(np.float32)",
        "angles are multiplied, and cosines come from a library",
        "trf-0008* trf-0007*",
    ),
    (
        "rotation-powers-in-binary32",
        _STEP,
        "c, s = np.frombuffer(cosine).astype(np.float32), np.frombuffer(sine).astype(np.float32)",
        "powers are found in binary32",
        "trf-0008*",
    ),
    (
        "rotation-powers-from-the-highest",
        _STEP,
        f"{_STEP}\n"
        "    x, y = np.ones((count, len(c))), np.zeros((count, len(c)))\n"
        "    for bit in reversed(range(int(positions.max(initial=0)).bit_length())):\n"
        "        x, y = x * x - y * y, x * y + y * x\n"
        "        rows = (positions >> bit & 1).astype(bool)\n"
        "        a, b = x[rows], y[rows]\n"
        "        x[rows], y[rows] = a * c - b * s, a * s + b * c\n"
        "    return x.astype(np.float32), y.astype(np.float32)",
        "the bits of a position are taken from the highest to the lowest",
        "trf-0008*",
    ),
    (
        "rotation-powers-fused",
        "c, s = c * c - s * s, c * s + c * s",
        "c, s = (c.astype(np.longdouble) * c - s * s).astype(float), c * s + c * s",
        "one product of each square is not rounded",
        "trf-0008*",
    ),
    (
        "position-in-32-bits",
        "range(int(positions.max(initial=0)).bit_length())",
        "range(min(32, int(positions.max(initial=0)).bit_length()))",
        "bits of a position above the 32nd are ignored",
        "trf-0008*",
    ),
    (
        "position-in-binary32",
        "positions = np.arange(first, first + count)",
        "positions = np.arange(first, first + count).astype(np.float32).astype(np.int64)",
        "positions are rounded to binary32",
        "trf-0007*",
    ),
)

_FIRST: Final = "first = context.first_position + context.record.cell.token_start"

PARTS: Final = (
    *rows(
        "segments",
        (
            "position-without-the-first",
            _FIRST,
            "first = context.record.cell.token_start",
            "positions are ordinals",
            "trf-0009*",
        ),
        (
            "position-in-the-segment",
            _FIRST,
            "first = context.first_position",
            "positions are counted from the start of each segment",
            "trf-0001*",
        ),
        (
            "position-in-the-window",
            _FIRST,
            f"{_FIRST} - context.group.tokens.held_start",
            "positions of a window are counted from its start",
            "trf-0010*",
        ),
        (
            "position-in-the-part",
            "np.arange(first + part.tokens.start, first + part.tokens.stop)",
            "np.arange(first, first + part.tokens.stop - part.tokens.start)",
            "positions of a part are counted from its start",
            "trf-0011*",
        ),
        (
            "heads-before-the-product",
            "        q = segment.decoded.integers[layer, part.tokens]\n        token_scale",
            "        q = np.full_like(segment.decoded.integers[layer, part.tokens], 128)\n"
            "        q[:, part.heads] = segment.decoded.integers[layer, part.tokens, part.heads]\n"
            "        token_scale",
            "only integers of the heads wanted enter the product",
            "trf-0011*",
        ),
        (
            "transform-of-the-first-layer",
            "x = transforms[layer].values(",
            "x = transforms[0].values(",
            "all layers of a segment take the transform of the first",
            "trf-0001*",
        ),
        (
            "transformed-scale-of-the-first-layer",
            "item.scale[layer, 0, 0]",
            "item.scale[0, 0, 0]",
            "all layers of a set take the scale of the first",
            "trf-0001*",
        ),
        (
            "transformed-index-of-the-first-layer",
            "item.token_scale[index[layer, part.tokens]]",
            "item.token_scale[index[0, part.tokens]]",
            "all layers take the token scales of the first",
            "trf-0001*",
        ),
        (
            "transformed-without-patches",
            "    if segment.side is not None:\n        _patch(segment.side, target, part)",
            "    if segment.side is not None and context.transforms is None:\n"
            "        _patch(segment.side, target, part)",
            "patches of transformed groups are ignored",
            "trf-0001*",
        ),
        (
            "transformed-without-a-clamp",
            "np.clip(x[:, part.heads], -limit, limit)",
            "x[:, part.heads]",
            "values of transformed groups are not clamped",
            "trf-*-numbers-at-their-limits",
        ),
    ),
    *rows(
        "profile_shelf",
        (
            "transforms-by-index",
            "layers = group.layers[cell.layer_index : cell.layer_index + cell.layer_count]",
            "layers = group.layers[: cell.layer_count]",
            "every segment takes the transforms of the group's first layers",
            "trf-0001*",
        ),
        (
            "all-lossy-groups-transformed",
            "self._manifest.quality(track.quality).encodings[group] == TRANSFORMED",
            'self._manifest.quality(track.quality).encodings[group] != "exact"',
            "quantised groups beside transformed ones are taken as transformed",
            "trf-0013*",
        ),
    ),
    *rows(
        "artifact",
        (
            "profile-for-verification",
            "self.transforms.of(track, record) if restoring else None",
            "self.transforms.of(track, record)",
            "verification asks for the profile",
            "trf-0027*",
        ),
        (
            "transformed-sets-as-quantised",
            "parse_set(data, *shape, where, transformed=transformed)",
            "parse_set(data, *shape, where)",
            "sets of transformed groups are checked as those of quantised ones",
            "trf-0026*",
        ),
    ),
)

MUTANTS: Final = (*MANIFEST, *SETS, *PRODUCT, *ROTATION, *PARTS)
