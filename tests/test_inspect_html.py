"""``kvformat inspect --html``: structure, escaping, the drawings' numbers, the pictures."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

import kvformat
from kvformat.cli import page, page_map, page_pictures
from kvformat.cli.layer_sizes import layer_sizes
from kvformat.layout import gather
from kvformat.measured import QUALITY, Measurement, extensions_of
from kvformat.segments import decode_segment
from tests.requirements import covers
from tests.test_cli_common import MODEL, Files, build, make_kv, refused, run

VOID = ("meta", "img", "br")
EVIL = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\"'&amp;\x07"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return build(tmp_path_factory.mktemp("html"))


class Page(HTMLParser):
    """Tags with their attributes, texts, and whether every element is closed in turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(path: Path, tmp_path: Path) -> Page:
    target = tmp_path / "page.html"
    result = run("inspect", path, "--html", target, "--overwrite")
    assert result.exit_code == 0, result.output
    return Page(target.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["bound", "unbound", "window"])
def test_a_page_is_whole_and_loads_nothing(files: Files, tmp_path: Path, name: str) -> None:
    path = getattr(files, name)
    found = page_of(path, tmp_path)
    assert {tag for tag, _ in found.tags}.isdisjoint({"script", "link", "iframe", "a", "form"})
    for _, attributes in found.tags:
        assert not any(key.startswith("on") or key in ("href", "style") for key in attributes)
    sources = [item["src"] or "" for item in found.all("img")]
    assert all(item.startswith("data:image/png;base64,") for item in sources)
    assert "url(" not in page.STYLE
    assert "default-src 'none'" in str(found.all("meta"))
    with kvformat.open(path) as artifact:
        for word in (artifact.manifest_digest, artifact.manifest.content_id, *artifact.tracks):
            assert word in found.text
    for title in ("Tracks", "Map of the file", "Bytes by layer and role", "Pictures", "Groups"):
        assert title in found.texts


def test_it_reads_well_on_paper_and_in_the_dark(files: Files, tmp_path: Path) -> None:
    found = page_of(files.bound, tmp_path)
    assert "@media print" in page.STYLE
    assert "prefers-color-scheme: dark" in page.STYLE
    parents = [
        before
        for (tag, _), (_, before) in zip(found.tags[1:], found.tags, strict=False)
        if tag in ("table", "svg")
    ]
    assert len(parents) > 10
    assert all(item.get("class") == "scroll" for item in parents)


@covers("SEC-1", "SEC-2")
def test_names_from_an_artifact_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "<b>a.kvf"
    measured = Measurement("exact/zstd", EVIL, "0" * 64, 4, 5, 0.1, 0.2, 0.3, 0.9, 0.01)
    key = kvformat.EngineKey(EVIL, EVIL, EVIL, 0, 1)
    reference = kvformat.Reference(EVIL)
    kvformat.write(
        path,
        make_kv(5),
        identity=kvformat.Identity(
            kvformat.Model(EVIL, EVIL), 4, "float16", "engine_key", engine_key=key,
            tokenizer=reference, adapters=(reference,),
        ),
        tracks="exact",
        extensions=extensions_of([measured]),
    )  # fmt: skip
    found = page_of(path, tmp_path)
    raw = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script" not in raw
    assert "\u202e" not in raw
    assert "\x07" not in raw
    assert not [item for item in found.all("img") if "onerror" in item]
    shown = EVIL.replace("\u202e", "\\u202e").replace("\x07", "\\x07")
    assert found.text.count(shown) >= 5
    assert "<b>a.kvf" in found.text
    assert "tokens are not verified" in found.text


def test_the_map_covers_the_file_without_a_gap(files: Files) -> None:
    for path in (files.bound, files.window):
        with kvformat.open(path) as artifact:
            parts = page_map.pieces(artifact)
            front = page_map.front_pieces(artifact)
        assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
        assert (parts[0].start, parts[-1].stop) == (0, path.stat().st_size)
        assert [part.start for part in front[1:]] == [part.stop for part in front[:-1]]
        assert front[-1].stop == parts[0].stop


def test_an_aligned_file_has_padding_on_the_map(tmp_path: Path) -> None:
    path = tmp_path / "a.kvf"
    identity = kvformat.Identity(kvformat.Model(MODEL), 4, "float16", "unbound")
    kvformat.write(path, make_kv(9), identity=identity, tracks="zstd", alignment=4096)
    with kvformat.open(path) as artifact:
        parts = page_map.pieces(artifact)
    assert [part.kind for part in parts] == ["front", "none", "sets", "track"]
    assert parts[2].start % 4096 == 0


def test_drawn_segments_have_the_width_of_their_bytes(files: Files) -> None:
    with kvformat.open(files.bound) as artifact:
        track = artifact.track("exact/zstd")
        drawn = page_map.segment_bar(artifact, track)
        stored = artifact.segment_table(track).records["stored_bytes"]
    widths = [float(item.attrib["width"]) for item in drawn.iter("rect")]
    assert len(widths) == len(stored)
    assert np.allclose(widths, 1000 * stored / stored.sum(), atol=0.02)


def test_many_segments_share_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.kvf"
    identity = kvformat.Identity(kvformat.Model(MODEL), 4, "float16", "unbound")
    kvformat.write(path, make_kv(300), identity=identity, tracks="zstd", segment_tokens=2)
    with kvformat.open(path) as artifact:
        track = artifact.tracks[0]
        drawn = page_map.segment_bar(artifact, artifact.track(track))
        assert artifact.track(track).segments > page_map.COLUMNS
    boxes = [item.attrib for item in drawn.iter("rect")]
    assert len({box["x"] for box in boxes}) == page_map.COLUMNS
    area = sum(float(box["width"]) * float(box["height"]) for box in boxes)
    assert area == pytest.approx(page_map.WIDTH * page_map.BAR, rel=0.01)


def test_bytes_by_layer_add_up(files: Files, tmp_path: Path) -> None:
    for path in (files.bound, files.window):
        with kvformat.open(path) as artifact:
            for track in artifact.manifest.tracks:
                runs = layer_sizes(artifact, track)
                assert sum(run.size_bytes for run in runs) == track.data_stop - track.data_start
                values = sum(int(np.prod(g.shape(artifact.manifest.tokens.count)))
                             for g in artifact.groups)  # fmt: skip
                assert sum(run.values for run in runs) == values
    found = page_of(files.bound, tmp_path)
    assert f"{runs[0].size_bytes:,}" in page_of(files.window, tmp_path).text
    assert "0-2" in found.texts


def decoded(png: bytes) -> np.ndarray[Any, Any]:
    with av.open(io.BytesIO(png)) as container:
        return next(container.decode(video=0)).to_ndarray(format="gray")


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (512, 511)])
def test_png_files_decode_to_the_same_grey(shape: tuple[int, int]) -> None:
    grey = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    assert np.array_equal(decoded(page_pictures.png(grey)), grey)


def test_contrast_is_stretched() -> None:
    grey = np.array([[100, 110], [120, 150]], np.uint8)
    assert page_pictures.stretched(grey).tolist() == [[0, 51], [102, 255]]
    flat = np.full((2, 2), 128, np.uint8)
    assert np.array_equal(page_pictures.stretched(flat), flat)


@covers("LAY-5")
def test_pictures_are_the_stored_integers(files: Files, tmp_path: Path) -> None:
    found = page_of(files.bound, tmp_path)
    sources = [(item["src"] or "").partition(",")[2] for item in found.all("img")]
    shown = [decoded(base64.b64decode(item)) for item in sources]
    with kvformat.open(files.bound) as artifact:
        albums = page_pictures.albums(artifact)
        pictures = [picture for album in albums for picture in album.pictures]
        assert [album.track for album in albums] == ["near-lossless/hevc", "near-lossless/zstd"]
        assert not any(album.problems for album in albums)
        track = artifact.track("hevc")
        record = artifact.segment_table(track)[0]
        context = artifact.context(track, record)
        segment = decode_segment(context, artifact.segment_bytes(record))
    assert len(shown) == len(pictures) == 3 + 3 + 1 + 1
    for image, picture in zip(shown, pictures, strict=True):
        assert np.array_equal(image, page_pictures.stretched(picture.grey))
    layout, q = context.layout, segment.decoded.integers
    assert layout is not None
    assert layout.frames == 1
    out = np.empty((q.shape[1], 64), np.uint8)
    for layer, picture in enumerate(pictures[:3]):
        gather(layout, picture.grey[None], *out.shape, out)
        assert np.array_equal(out, q[layer].reshape(out.shape))
    rows = pictures[6].grey  # of the same integers in zstd, channel by channel
    assert np.array_equal(rows, q[0].transpose(2, 1, 0).reshape(-1, q.shape[1])[:, :512])


@covers("PAR-2")
def test_a_damaged_segment_is_named_and_not_shown(files: Files, tmp_path: Path) -> None:
    data = bytearray(files.bound.read_bytes())
    with kvformat.open(files.bound) as artifact:
        place = artifact.front.data_start + artifact.track("hevc").data_start
    data[place + 5] ^= 1
    path = tmp_path / "damaged.kvf"
    path.write_bytes(data)
    found = page_of(path, tmp_path)
    assert "segment.digest" in found.text
    assert len(found.all("img")) == 3 + 1 + 1


@covers("ERR-4", "PUB-3")
def test_pages_are_written_like_other_outputs(files: Files, tmp_path: Path) -> None:
    refused(64, "usage.argument", "inspect", files.bound, "--html", tmp_path / "a.txt")
    refused(65, "header.magic", "inspect", files.npy, "--html", tmp_path / "a.html")
    assert not list(tmp_path.iterdir())
    assert run("inspect", files.bound, "--html", tmp_path / "a.html").exit_code == 0
    first = (tmp_path / "a.html").read_bytes()
    refused(74, "io.exists", "inspect", files.bound, "--html", tmp_path / "a.html")
    again = ("inspect", files.bound, "--html", tmp_path / "a.html", "--overwrite")
    assert run(*again).exit_code == 0
    assert (tmp_path / "a.html").read_bytes() == first  # nothing in it changes with the time


def test_a_measured_quality_is_shown(tmp_path: Path) -> None:
    identity = kvformat.Identity(kvformat.Model(MODEL), 4, "float16", "unbound")
    one = Measurement("zstd", MODEL, "0" * 64, 1024, 1000, 0.00123, 0.0456, 0.5, 0.9876, -0.25)
    path = tmp_path / "a.kvf"
    kvformat.write(
        path, make_kv(5), identity=identity, tracks="zstd", extensions=extensions_of([one])
    )
    numbers = ("0.00123", "0.0456", "0.5", "0.988", "-0.2500", "1,000", "another cache")
    text = re.sub(r"\s+", " ", run("inspect", path).stdout)
    found = page_of(path, tmp_path).texts
    for number in numbers:
        assert number in text
        assert number in found
    assert QUALITY in text
    kvformat.verify(path)
