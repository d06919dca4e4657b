"""Reads of URLs into torch tensors and pages, of artifacts that need a calibration profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvformat
import kvformat.gpu as on_device
from kvformat.errors import KvformatError
from kvformat.gpu import Pages
from tests.gpu_samples import bits, torch
from tests.test_store_profiles import DIM, HEADS, IDENTITY, LAYERS, profile, written

TOKENS = 37


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str]:
    """An artifact and the directory of its profile."""
    (tmp_path / "profiles").mkdir()
    file = written(tmp_path / "profiles" / "own.kvp", profile())
    kv = np.random.default_rng(0).standard_normal((2, LAYERS, TOKENS, HEADS, DIM))
    kvformat.write(
        tmp_path / "a.kvf", kv.astype(np.float16), identity=IDENTITY,
        token_ids=np.arange(TOKENS), tracks=["near-lossless/zstd"], profile=file,
    )  # fmt: skip
    return str(tmp_path / "a.kvf"), str(tmp_path / "profiles")


def pages_of(heads: int) -> tuple[Pages, list[Any], Any]:
    """Pages, their tensors, and slots for all tokens."""
    caches = [torch.zeros(2, 5, 8, heads, DIM, dtype=torch.float16) for _ in range(LAYERS)]
    pages = Pages.from_vllm(dict(enumerate(caches)), layout="NHD")
    return pages, caches, torch.arange(TOKENS)


def test_read_of_a_url(places: tuple[str, str]) -> None:
    url, folder = places
    with kvformat.open(url, profiles=folder) as artifact:
        expected = artifact.read()
    for given in (folder, [folder], (folder + "/own.kvp",)):
        found = on_device.read(url, profiles=given)
        assert bits(found.kv) == bits(expected.kv)


@pytest.mark.parametrize("heads", [(0, 2), (1, 2)])
@pytest.mark.parametrize("background", [False, True])
def test_pages_of_a_url(places: tuple[str, str], heads: tuple[int, int], background: bool) -> None:
    url, folder = places
    with kvformat.open(url, profiles=folder) as artifact:
        expected = torch.from_numpy(np.array(artifact.read(heads=heads).kv))
    pages, caches, slots = pages_of(heads[1] - heads[0])
    if background:
        on_device.load_paged(url, pages, slots, heads=heads, profiles=folder).result()
    else:
        on_device.read_paged(url, pages, slots, heads=heads, profiles=folder)
    for layer, cache in enumerate(caches):
        found = cache.reshape(2, -1, heads[1] - heads[0], DIM)[:, :TOKENS]
        assert bits(found) == bits(expected[:, layer])


def test_without_the_profile_nothing_is_restored(places: tuple[str, str]) -> None:
    url, _ = places
    pages, caches, slots = pages_of(HEADS)
    for act in (
        lambda: on_device.read(url),
        lambda: on_device.read_paged(url, pages, slots),
        lambda: on_device.load_paged(url, pages, slots).result(),
    ):
        with pytest.raises(KvformatError) as caught:
            act()
        assert caught.value.code == "profile.missing"
    assert not any(cache.any() for cache in caches)


def test_an_open_artifact_has_its_own(places: tuple[str, str]) -> None:
    url, folder = places
    with kvformat.open(url, profiles=folder) as artifact:
        with pytest.raises(KvformatError, match="has its profiles already"):
            on_device.read(artifact, profiles=folder)
        assert on_device.read(artifact).kv.shape == (2, LAYERS, TOKENS, HEADS, DIM)
