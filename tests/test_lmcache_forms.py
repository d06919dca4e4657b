"""How objects of LMCache become groups: plain logic. The real LMCache is in ``test_lmcache``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvformat.errors import UsageError
from kvformat.integrations.lmcache.geometry import (
    Form,
    Geometry,
    buffers_of,
    cache_of,
    form_of,
    token_count,
)

KV = Geometry("kv", 2, 16)
LATENT = Geometry("latent")


def described(form: Form) -> list[tuple[str, tuple[int, ...], int, int]]:
    return [(item.name, item.layers, item.heads, item.head_dim) for item in form.groups or ()]


@pytest.mark.parametrize(
    ("shapes", "geometry", "expected"),
    [
        ([(2, 3, 8, 32)], KV, [("key", (0, 1, 2), 2, 16), ("value", (0, 1, 2), 2, 16)]),
        ([(1, 3, 8, 48)], LATENT, [("latent", (0, 1, 2), 1, 48)]),
        ([(3, 8, 48)], LATENT, [("latent", (0, 1, 2), 1, 48)]),
        ([(3, 8, 48), (3, 8, 20)], LATENT,
         [("latent-0", (0, 1, 2), 1, 48), ("latent-1", (3, 4, 5), 1, 20)]),
    ],
)  # fmt: skip
def test_what_the_geometry_explains(
    shapes: list[tuple[int, ...]], geometry: Geometry, expected: list[Any]
) -> None:
    form = form_of(shapes, ["float16"] * len(shapes), geometry)
    assert described(form) == expected
    assert (form.dtype, form.part) == ("float16", "all")
    tensors = [np.arange(np.prod(shape), dtype="<u2").reshape(shape) for shape in shapes]
    buffers = buffers_of(form, tensors)
    cache = cache_of(form, buffers)
    assert cache.token_count == token_count(buffers) == 8
    for view in buffers.values():
        view[...] = 0
    assert not any(tensor.any() for tensor in tensors)  # they are views


@pytest.mark.parametrize(
    ("shapes", "dtypes", "geometry"),
    [
        ([(2, 3, 8, 32)], ["float16"], None),
        ([(2, 3, 8, 33)], ["float16"], KV),
        ([(1, 3, 8, 32)], ["float16"], KV),
        ([(3, 8, 64)], ["float16"], KV),
        ([(2, 3, 8, 48)], ["float16"], LATENT),
        ([(2, 3, 8, 32)], [None], KV),
        ([(3, 8, 48), (3, 4, 48)], ["float16"] * 2, LATENT),
        ([(100,)], ["uint8"], KV),
        ([], [], KV),
    ],
)
def test_everything_else_is_opaque(
    shapes: list[tuple[int, ...]], dtypes: list[str | None], geometry: Geometry | None
) -> None:
    assert form_of(shapes, dtypes, geometry) == Form("uint8", 1, None)


@pytest.mark.parametrize(("size", "rows", "width"), [(8192, 2, 4096), (6144, 3, 2048), (7, 7, 1)])
def test_opaque_bytes_are_rows(size: int, rows: int, width: int) -> None:
    form = form_of([(size,)], ["uint8"], None)
    buffers = buffers_of(form, [np.arange(size, dtype=np.uint8)])
    assert buffers["opaque"].shape == (1, rows, 1, width)
    cache = cache_of(form, buffers)
    assert cache.groups[0].layers[0].tobytes() == np.arange(size, dtype=np.uint8).tobytes()


@pytest.mark.parametrize(
    "settings",
    [{"heads": 2}, {"head_dim": 16}, {"heads": 0, "head_dim": 16}, {"heads": -1, "head_dim": 4},
     {"latent": True, "heads": 2, "head_dim": 16}],
)  # fmt: skip
def test_half_a_geometry_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Geometry.parse(settings)


def test_geometry_from_settings() -> None:
    assert Geometry.parse({}) is None
    assert Geometry.parse({"latent": True}) == LATENT
    assert Geometry.parse({"heads": 2, "head_dim": 16}) == KV
