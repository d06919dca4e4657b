"""How the bytes of an LMCache object become groups of an artifact. Pure; needs numpy only.

An object is one tensor or several: ``[2, L, T, C]`` with keys and values of all heads side by
side, ``[1, L, T, C]`` or ``[L, T, C]`` with latents, or something else. How many heads C is, an
object does not say, and some engines keep more than whole tokens together, so that a row is not a
token. Only what the operator, or LMCache's own metadata, says is taken apart. Everything else is
stored as rows of opaque bytes, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvformat.cache import Cache, GroupTensors
from kvformat.dtypes import DTYPES
from kvformat.errors import UsageError
from kvformat.groups import Group

ROW_BYTES: Final = 4096
OPAQUE: Final = "opaque"
OWN_SETTINGS: Final[dict[str, type | tuple[type, ...]]] = {
    "model_id": str,
    "revision": str,
    "weights_digest": str,
    "hash_algorithm": str,
    "heads": int,
    "head_dim": int,
    "latent": bool,
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a row of C items is: ``kv``: C = ``heads`` x ``head_dim``, of keys or of values.

    ``latent``: one vector without heads.
    """

    kind: str
    heads: int = 1
    head_dim: int = 0

    @staticmethod
    def parse(settings: Mapping[str, Any]) -> Geometry | None:
        """From ``heads`` and ``head_dim``, or ``latent``; None where nothing is said."""
        heads, dim = settings.get("heads"), settings.get("head_dim")
        if settings.get("latent"):
            if heads is not None or dim is not None:
                raise UsageError("usage.argument", "latents have no heads", where="latent")
            return Geometry("latent")
        if heads is None and dim is None:
            return None
        if not heads or not dim or heads < 1 or dim < 1:
            raise UsageError(
                "usage.argument", "heads and head_dim belong together",
                expected="both, above 0; heads are those of one rank", found=ascii((heads, dim)),
            )  # fmt: skip
        return Geometry("kv", heads, dim)


@dataclass(frozen=True, slots=True)
class Form:
    """What all objects of one kind have in common: the groups; ``dtype`` is that of the identity.

    Opaque objects have groups that depend on their size, so ``groups`` is None.
    """

    dtype: str
    layers: int
    groups: tuple[Group, ...] | None

    @property
    def part(self) -> str:
        """The label in the store."""
        return OPAQUE if self.groups is None else "all"


def form_of(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[str | None], geometry: Geometry | None
) -> Form:
    """The form of objects with these tensors; a dtype that the format lacks is None."""
    groups: list[Group] = []
    layers = 0
    tokens = {_tokens(shape) for shape in shapes}
    if geometry is None or len(tokens) != 1 or None in dtypes or not dtypes:
        return Form("uint8", 1, None)
    for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        roles = _roles(tuple(shape), geometry)
        if roles is None or dtype is None:
            return Form("uint8", 1, None)
        count = shape[-3]
        suffix = f"-{number}" if len(shapes) > 1 else ""
        groups += [
            Group(
                name=role + suffix,
                role=role,
                dtype=dtype,
                layers=tuple(range(layers, layers + count)),
                heads=geometry.heads,
                head_dim=shape[-1] // geometry.heads,
                heads_total=geometry.heads,
            )
            for role in roles
        ]
        layers += count
    return Form(str(dtypes[0]), layers, tuple(groups))


def _tokens(shape: Sequence[int]) -> int | None:
    return shape[-2] if len(shape) in (3, 4) else None


def _roles(shape: tuple[int, ...], geometry: Geometry) -> tuple[str, ...] | None:
    """What the planes of a tensor are; None where the geometry does not explain it."""
    if geometry.kind == "latent":
        return ("latent",) if len(shape) == 3 or (len(shape) == 4 and shape[0] == 1) else None
    fits = len(shape) == 4 and shape[0] == 2 and shape[3] == geometry.heads * geometry.head_dim
    return ("key", "value") if fits else None


def buffers_of(form: Form, tensors: Sequence[NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Views ``[L, T, H, D]`` of an object's tensors by group name; writing fills the object.

    ``tensors`` are contiguous, in unsigned integers or in the format's dtypes. For opaque forms
    give one array of bytes.
    """
    if form.groups is None:
        flat = tensors[0].reshape(-1)
        width = math.gcd(flat.size, ROW_BYTES)
        return {OPAQUE: flat.reshape(1, -1, 1, width)}
    result = {}
    rest = list(form.groups)
    for tensor in tensors:
        planes = tensor if tensor.ndim == 4 else tensor[None]
        for plane in planes:
            group = rest.pop(0)
            layers, count, _ = plane.shape
            view = plane.view(DTYPES[group.dtype])
            result[group.name] = view.reshape(layers, count, group.heads, group.head_dim)
    return result


def cache_of(form: Form, buffers: Mapping[str, NDArray[Any]]) -> Cache:
    """The same views as a cache to store."""
    groups = form.groups
    if groups is None:
        width = buffers[OPAQUE].shape[3]
        groups = (Group(OPAQUE, OPAQUE, "uint8", (0,), 1, width, 1),)
    tensors = tuple(GroupTensors(item, tuple(buffers[item.name])) for item in groups)
    return Cache(token_count(buffers), tensors)


def token_count(buffers: Mapping[str, NDArray[Any]]) -> int:
    """Rows on the token axis."""
    return int(next(iter(buffers.values())).shape[1])


def as_bytes(memory: Any) -> NDArray[np.uint8]:
    """A memory view of an object as an array of bytes on the same memory."""
    return np.frombuffer(memoryview(memory).cast("B"), np.uint8)
