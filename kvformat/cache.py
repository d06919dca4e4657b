"""KV caches in memory: what a writer takes and a reader gives back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kvformat.dtypes import name_of
from kvformat.errors import UsageError
from kvformat.groups import Extent, Group
from kvformat.identity import EXACT_LINEAGE, Lineage

if TYPE_CHECKING:
    from kvformat.report import ReadReport

_TENSOR_NAME: Final = re.compile(r"layers\.(0|[1-9][0-9]{0,5})\.([a-z0-9][a-z0-9-]{0,47})")
STATE: Final = "state"


@dataclass(frozen=True, slots=True)
class GroupTensors:
    """A group and its source tensors: one array ``[T, H, D]`` per layer, any strides.

    A state group has arrays ``[1, H, D]``. Arrays may be memory-mapped.
    """

    group: Group
    layers: tuple[NDArray[Any], ...]


@dataclass(frozen=True, slots=True)
class Cache:
    """A KV cache to be written: ``token_count`` tokens in groups of equal shape and dtype."""

    token_count: int
    groups: tuple[GroupTensors, ...]

    @staticmethod
    def from_kv(kv: NDArray[Any], *, head_start: int = 0, heads_total: int | None = None) -> Cache:
        """A canonical array ``[2, L, T, H, D]``: keys, then values, all layers in one dtype."""
        if not isinstance(kv, np.ndarray) or kv.ndim != 5 or kv.shape[0] != 2:
            raise UsageError(
                "input.shape",
                "the cache is not a canonical array",
                expected="[2, layers, tokens, heads, head_dim]",
                found=list(getattr(kv, "shape", ())) or type(kv).__name__,
            )
        tensors = {
            f"layers.{layer}.{role}": kv[index, layer]
            for index, role in enumerate(("key", "value"))
            for layer in range(kv.shape[1])
        }
        return Cache.from_tensors(tensors, head_start=head_start, heads_total=heads_total)

    @staticmethod
    def from_tensors(
        tensors: Mapping[str, NDArray[Any]],
        *,
        token_count: int | None = None,
        first_position: int = 0,
        head_start: int = 0,
        heads_total: int | None = None,
    ) -> Cache:
        """Arrays ``[T, H, D]`` named ``layers.{i}.{role}``; role ``state`` has any shape [H, ...].

        Layers of one role with equal dtype and shape become a group. A layer that holds fewer
        tokens than the longest is taken as a sliding window that holds the last ones.
        ``heads_total`` defaults to the heads held.
        """
        found: dict[tuple[str, str, tuple[int, ...]], dict[int, NDArray[Any]]] = {}
        for name, tensor in tensors.items():
            match = _TENSOR_NAME.fullmatch(name) if isinstance(name, str) else None
            if not match:
                raise UsageError(
                    "input.shape",
                    "a tensor name is not understood",
                    where=ascii(name)[:80],
                    expected="layers.NUMBER.ROLE, for example layers.0.key",
                )
            array = native(np.asanyarray(tensor))
            layer, role = int(match[1]), match[2]
            _check_shape(name, array, role)
            found.setdefault((role, name_of(array.dtype), array.shape), {})[layer] = array
        if not found:
            raise UsageError("input.shape", "the cache has no tensors")
        _check_lengths(found)
        lengths = [shape[0] for role, _, shape in found if role != STATE]
        count = token_count if token_count is not None else max(lengths, default=0)
        if max(lengths, default=0) > count:
            raise UsageError(
                "input.shape",
                "a tensor has more tokens than the cache",
                expected=f"at most {count}",
                found=max(lengths),
            )
        keys = sorted(found, key=lambda key: (key[0], min(found[key])))
        roles = [key[0] for key in keys]
        groups: list[GroupTensors] = []
        for number, key in enumerate(keys):
            role = key[0]
            alone = roles.count(role) == 1
            groups.append(
                _make_group(
                    role if alone else f"{role}-{roles[: number + 1].count(role)}",
                    role,
                    dtype=key[1],
                    arrays=found[key],
                    count=count,
                    first_position=first_position,
                    head_start=head_start,
                    heads_total=heads_total,
                )
            )
        return Cache(count, tuple(groups))


def _check_lengths(found: Mapping[tuple[str, str, tuple[int, ...]], Mapping[int, Any]]) -> None:
    """All tensors of one layer hold the same number of tokens."""
    lengths: dict[int, tuple[str, int]] = {}
    for (role, _, shape), layers in found.items():
        for layer in layers if role != STATE else ():
            first, count = lengths.setdefault(layer, (role, shape[0]))
            if count != shape[0]:
                raise UsageError(
                    "input.shape",
                    "two tensors of one layer hold unlike numbers of tokens",
                    where=f"layers.{layer}",
                    expected=f"{first} {count}",
                    found=f"{role} {shape[0]}",
                )


def check_cache(cache: Cache) -> None:
    """Refuse a hand-made cache whose arrays are not what its groups say (``input.shape``)."""
    if not cache.groups or cache.token_count < 0:
        raise UsageError("input.shape", "the cache has no groups or a negative token count")
    for item in cache.groups:
        group = item.group
        if not item.layers or not all(isinstance(x, np.ndarray) for x in item.layers):
            raise UsageError(
                "input.shape", "a group has no layers, or no arrays", where=f"group {group.name}"
            )
        if group.channels < 1:
            raise UsageError("input.shape", "a group has no channels", where=f"group {group.name}")
        wanted = group.shape(cache.token_count)[1:]
        shapes = {tuple(array.shape) for array in item.layers}
        dtypes = {name_of(array.dtype) for array in item.layers}
        if len(item.layers) != len(group.layers) or shapes - {wanted} or dtypes - {group.dtype}:
            raise UsageError(
                "input.shape",
                "the arrays are not what the group says",
                where=f"group {group.name}",
                expected=f"{len(group.layers)} arrays {group.dtype} {list(wanted)}",
                found=f"{len(item.layers)} arrays {sorted(dtypes)} {sorted(shapes)}",
            )


def native(array: NDArray[Any]) -> NDArray[Any]:
    """The array with little-endian elements; a copy only where the source has others."""
    if isinstance(array, np.ma.MaskedArray):
        raise UsageError(
            "input.shape", "a masked array is not a cache", next_step="Fill the masked values"
        )
    wanted = array.dtype.newbyteorder("<")
    return array if array.dtype == wanted else array.astype(wanted)


def _check_shape(name: str, array: NDArray[Any], role: str) -> None:
    good = array.ndim >= 2 if role == STATE else array.ndim == 3
    if not good or 0 in array.shape[1 if role != STATE else 0 :]:
        raise UsageError(
            "input.shape",
            "a tensor has the wrong shape",
            where=name,
            expected="[heads, ...]" if role == STATE else "[tokens, heads, head_dim]",
            found=list(array.shape),
        )


def _make_group(
    name: str,
    role: str,
    *,
    dtype: str,
    arrays: Mapping[int, NDArray[Any]],
    count: int,
    first_position: int,
    head_start: int,
    heads_total: int | None,
) -> GroupTensors:
    layers = tuple(sorted(arrays))
    shape = arrays[layers[0]].shape
    extent = Extent()
    if role == STATE:
        heads = shape[0]
        extent = Extent("state", shape=tuple(shape[1:]))
        members = tuple(arrays[layer].reshape(1, heads, -1) for layer in layers)
    else:
        heads = shape[1]
        members = tuple(arrays[layer] for layer in layers)
        if shape[0] < count:
            extent = Extent(
                "window", held_start=count - shape[0], cumulative_tokens=first_position + count
            )
    group = Group(
        name=name,
        role=role,
        dtype=dtype,
        layers=layers,
        heads=heads,
        head_dim=members[0].shape[2],
        heads_total=heads_total if heads_total is not None else head_start + heads,
        head_start=head_start,
        tokens=extent,
    )
    return GroupTensors(group, members)


@dataclass(frozen=True, slots=True)
class RestoredGroup:
    """A restored part of one group: ``array`` is ``[L, T, H, D]`` in the group's dtype."""

    group: Group
    array: NDArray[Any]
    layers: tuple[int, ...]
    token_start: int
    head_start: int


@dataclass(frozen=True, slots=True, repr=False)
class Restored(Mapping[str, NDArray[Any]]):
    """What ``Artifact.read`` returns: group name to array ``[L, T, H, D]``.

    ``track`` is the track that was read, ``report`` the account of it. ``groups`` has the
    coordinates of each array.
    """

    track: str
    groups: dict[str, RestoredGroup]
    base: NDArray[Any] | None = None
    lineage: Lineage = EXACT_LINEAGE
    report: ReadReport | None = None

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{name} {item.group.dtype} {list(item.array.shape)}"
            for name, item in self.groups.items()
        )
        return f"<kvformat.Restored {self.track}: {parts}>"

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.groups[name].array

    def __iter__(self) -> Iterator[str]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def kv(self) -> NDArray[Any]:
        """The canonical array ``[2, L, T, H, D]``, without a copy where keys and values match.

        Raises ``usage.selection`` when the parts read are not one key and one value group of
        equal layers and shape.
        """
        if self.base is None:
            raise UsageError(
                "usage.selection",
                "these groups do not form one array [2, layers, tokens, heads, head_dim]",
                found=", ".join(
                    f"{name} {list(item.array.shape)}" for name, item in self.groups.items()
                ),
                next_step="Take the groups one by one",
            )
        return self.base

    def as_cache(self, first_position: int = 0) -> Cache:
        """A cache to write again; ``first_position`` is the position of its first token."""
        heads = {(item.head_start, item.group.heads_total) for item in self.groups.values()}
        if len(heads) != 1:
            raise UsageError(
                "usage.selection",
                "groups of unlike heads cannot be written from here",
                next_step="Make a kvformat.Cache",
            )
        head_start, heads_total = heads.pop()
        return Cache.from_tensors(
            self.tensors(),
            first_position=first_position,
            head_start=head_start,
            heads_total=heads_total,
        )

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Views named ``layers.{i}.{role}``: ``[T, H, D]``, or a state in its own shape."""
        result: dict[str, NDArray[Any]] = {}
        for item in self.groups.values():
            for index, layer in enumerate(item.layers):
                array = item.array[index]
                if item.group.tokens.kind == STATE:
                    array = array[0].reshape(-1, *item.group.tokens.shape)
                result[f"layers.{layer}.{item.group.role}"] = array
        return result


def kv_pair(groups: Sequence[Group]) -> bool:
    """Whether two groups, in this order, can be one canonical array."""
    if [item.role for item in groups] != ["key", "value"]:
        return False
    key, value = groups
    return (key.layers, key.heads, key.head_dim, key.head_start, key.dtype, key.tokens) == (
        value.layers,
        value.heads,
        value.head_dim,
        value.head_start,
        value.dtype,
        value.tokens,
    )
