"""One artifact into the caller's memory in one call, for loaders without an engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvformat.artifact import open_artifact
from kvformat.expectations import Expectation
from kvformat.profile_shelf import ProfilePlaces
from kvformat.storage import Transport

if TYPE_CHECKING:
    from kvformat.report import ReadReport


def load_into(
    url: str | os.PathLike[str],
    buffers: NDArray[Any] | Mapping[str, NDArray[Any]],
    *,
    expect: Expectation | None = None,
    storage_options: Mapping[str, Any] | None = None,
    transport: Transport | None = None,
    profiles: ProfilePlaces = (),
    **selection: Any,
) -> ReadReport:
    """Open ``url``, restore what ``selection`` says into ``buffers``, and close it again.

    ``buffers`` is ``[2, L, T, H, D]`` or a mapping of group names to ``[L, T, H, D]``;
    ``selection`` is what ``Artifact.read_into`` takes (``tokens``, ``layers``, ``heads``,
    ``track``, ``on_error`` and so on), ``profiles`` those of ``kvformat.open``. Errors are those
    of ``kvformat.open`` and ``read_into``.
    """
    with open_artifact(
        url,
        expect=expect,
        storage_options=storage_options,
        transport=transport,
        profiles=profiles,
    ) as artifact:
        return artifact.read_into(buffers, **selection)


def load(
    url: str | os.PathLike[str],
    *,
    expect: Expectation | None = None,
    storage_options: Mapping[str, Any] | None = None,
    transport: Transport | None = None,
    profiles: ProfilePlaces = (),
    **selection: Any,
) -> tuple[int, dict[str, NDArray[Any]]]:
    """The token count of ``url`` and its groups as new arrays ``[L, T, H, D]`` by name."""
    with open_artifact(
        url,
        expect=expect,
        storage_options=storage_options,
        transport=transport,
        profiles=profiles,
    ) as artifact:
        restored = artifact.read(**selection)
        found = {name: np.asarray(restored[name]) for name in restored}
        return artifact.manifest.tokens.count, found
