"""``load_into`` for plain loaders, and torch datasets over URLs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvformat

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.data import DataLoader  # noqa: E402

from kvformat.integrations.torch_dataset import (  # noqa: E402
    ArtifactDataset,
    ArtifactStream,
    Source,
)
from tests.stores import stepwise_profile  # noqa: E402

IDENTITY = kvformat.Identity(kvformat.Model("acme/small", "1"), 2, "float16", kind="unbound")


def made(folder: Path, count: int) -> tuple[list[str], list[Any]]:
    urls, caches = [], []
    for number in range(count):
        kv = np.random.default_rng(number).standard_normal((2, 2, 20 + number, 1, 16))
        caches.append(kv.astype(np.float16))
        urls.append(f"file://{folder}/{number}.kvf")
        kvformat.write(urls[-1], caches[-1], identity=IDENTITY, tracks=["exact/zstd"])
    return urls, caches


def unloaded(item: Any) -> Any:
    return item


def same(item: Any, kv: Any) -> bool:
    return all(
        torch.equal(item.groups[role], torch.from_numpy(kv[plane]))
        for plane, role in enumerate(("key", "value"))
    )


def test_a_dataset_reads_by_index(tmp_path: Path) -> None:
    urls, caches = made(tmp_path, 3)
    dataset = ArtifactDataset(urls)
    assert len(dataset) == 3
    assert [dataset[n].tokens for n in range(3)] == [20, 21, 22]
    assert all(same(dataset[n], caches[n]) for n in range(3))
    part = ArtifactDataset(urls, Source(selection={"tokens": (4, 9), "layers": [1]}))[0]
    assert torch.equal(part.groups["key"], torch.from_numpy(caches[0][0, 1:, 4:9]))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_gives_each_once_also_to_several_workers(tmp_path: Path, workers: int) -> None:
    urls, caches = made(tmp_path, 5)
    loader = DataLoader(
        ArtifactStream(urls), batch_size=None, num_workers=workers, collate_fn=unloaded,
        multiprocessing_context="forkserver" if workers else None,
    )  # fmt: skip
    found = {item.url: item for item in loader}
    assert sorted(found) == sorted(urls)
    assert all(same(found[url], kv) for url, kv in zip(urls, caches, strict=True))


def test_a_stream_fetches_ahead_and_keeps_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls, _ = made(tmp_path, 4)
    started = [threading.Event() for _ in urls]
    item = Source.item

    def noted(self: Source, url: str) -> Any:
        started[urls.index(url)].set()
        return item(self, url)

    monkeypatch.setattr(Source, "item", noted)
    stream = iter(ArtifactStream(urls, ahead=2))
    assert next(stream).url == urls[0]
    assert started[1].wait(60)
    assert not started[3].is_set()
    assert [item.url for item in stream] == urls[1:]


def test_what_cannot_be_served_raises_or_is_left_out(tmp_path: Path) -> None:
    urls, _ = made(tmp_path, 3)
    (tmp_path / "1.kvf").write_bytes(b"not an artifact at all" * 10)
    with pytest.raises(kvformat.InvalidError):
        list(ArtifactStream(urls))
    stream = ArtifactStream(urls, on_error="skip")
    assert [item.url for item in stream] == [urls[0], urls[2]]
    assert stream.skipped == [(urls[1], "header.magic")]
    with pytest.raises(kvformat.UsageError):
        ArtifactStream(urls, ahead=0)


def test_an_expectation_is_kept(tmp_path: Path) -> None:
    urls, _ = made(tmp_path, 1)
    other = Source(expect=lambda _: kvformat.Expectation(model="acme/other"))
    with pytest.raises(kvformat.MismatchError):
        ArtifactDataset(urls, other)[0]


def test_load_into_fills_the_callers_memory(tmp_path: Path) -> None:
    urls, caches = made(tmp_path, 1)
    buffer = np.zeros((2, 2, 5, 1, 16), np.float16)
    report = kvformat.load_into(urls[0], buffer, tokens=(3, 8))
    assert (buffer == caches[0][:, :, 3:8]).all()
    assert report.tracks == ("exact/zstd",)


def test_artifacts_that_need_a_profile(tmp_path: Path) -> None:
    file, url = tmp_path / "own.kvp", str(tmp_path / "a.kvf")
    file.write_bytes(stepwise_profile((2, 1, 16), 1 / 16, model="acme/small"))
    kv = np.random.default_rng(0).integers(-9, 9, (2, 2, 20, 1, 16)).astype(np.float16)
    kvformat.write(url, kv, identity=IDENTITY, tracks=["near-lossless/zstd"], profile=file)
    assert same(ArtifactDataset([url], Source(profiles=str(tmp_path)))[0], kv)
    with pytest.raises(kvformat.UnsupportedError, match=r"profile\.missing"):
        ArtifactDataset([url])[0]
