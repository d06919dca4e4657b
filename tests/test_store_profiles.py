"""Stores with calibration profiles: written with, looked for, missing, of something else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

import kvformat
from kvformat.cache import Cache
from kvformat.cli.program import cli
from kvformat.errors import KvformatError, UsageError
from kvformat.integrations.settings import parse
from kvformat.profiles import parse_profile
from kvformat.store import Miss, Refusal, Store, StoreOptions, View
from kvformat.store import results as answers
from kvformat.store.publishing import convert_object
from kvformat.tracks import TRANSFORMED
from tests.requirements import covers
from tests.stores import inline_store, objects, stepwise_profile, tokens
from tests.transformed import profile_digest

LAYERS, HEADS, DIM, STEP = 2, 2, 4, 1 / 16
MODEL = kvformat.Model("acme/small", "1")
IDENTITY = kvformat.Identity(MODEL, LAYERS, "float16")
IDS = tokens(1, 2, 3, 4, 5, extra=9)
NEAR = StoreOptions(quality="near-lossless", idle_s=0.05)


def profile(
    *, model: str = MODEL.id, quality: str = "near-lossless", turned: bool = False
) -> bytes:
    turns = np.array([[1.0], [0.0]]) if turned else None
    shape = (LAYERS, HEADS, DIM)
    return stepwise_profile(shape, STEP, model=model, quality=quality, turns=turns)


def kv_of(ids: Sequence[int], heads: tuple[int, int] = (0, HEADS)) -> NDArray[np.float16]:
    """Multiples of the step: bit for bit with the profile, and not so without it."""
    values = np.random.default_rng(len(ids)).integers(-100, 100, (2, LAYERS, len(ids), HEADS, DIM))
    return (values * STEP).astype(np.float16)[..., heads[0] : heads[1], :]


def written(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return written(tmp_path / "own.kvp", profile())


def stored(store: Store) -> View:
    view = store.view(IDENTITY)
    view.put(kv_of(IDS), IDS)
    return view


def read(view: View, **selection: Any) -> tuple[answers.LoadReport, NDArray[np.float16]]:
    with view.lookup(IDS) as hit:
        heads = selection.get("heads", (0, HEADS))
        out = np.full((2, LAYERS, hit.tokens, heads[1] - heads[0], DIM), np.nan, np.float16)
        return view.load_into(hit, out, **selection), out


def test_what_is_written_with_a_profile_comes_back(tmp_path: Path, file: str) -> None:
    """Bit for bit here, which without the profile it does not."""
    for name, options, same in (
        ("with", replace(NEAR, profile=file), True),
        ("without", NEAR, False),
    ):
        with inline_store(tmp_path / name, options) as store:
            report, found = read(stored(store))
            assert report.complete and report.tokens == 1280
            assert bool((found == kv_of(IDS)[:, :, :1280]).all()) is same
            assert report.lineage.profile == (profile_digest(profile()) if same else None)


def test_only_the_objects_say_what_profile_they_need(tmp_path: Path, file: str) -> None:
    """So a store that writes without one reads what was written with one, from any place."""
    root = tmp_path / "store"
    with inline_store(root, replace(NEAR, profile=file)) as store:
        stored(store)
    for path in objects(root):
        kvformat.verify(path, profiles=file)
    for places in ((file,), (str(tmp_path),), ("nowhere", str(tmp_path))):
        with inline_store(root, replace(NEAR, profiles=places)) as store:
            report, found = read(store.view(IDENTITY))
            assert report.complete
            assert (found == kv_of(IDS)[:, :, :1280]).all()
            assert store.metrics.value("misses") == 0


@covers("TRF-4")
@pytest.mark.parametrize("way", ["load_into", "blocks", "load"])
@pytest.mark.parametrize("place", [None, "gone.kvp", "other.kvp", "torn.kvp"])
def test_a_missing_profile_is_a_miss_of_its_own(
    tmp_path: Path, file: str, way: str, place: str | None
) -> None:
    """It says nothing against object or storage: neither is given up."""
    root = tmp_path / "store"
    written(tmp_path / "other.kvp", profile(quality="balanced"))
    written(tmp_path / "torn.kvp", profile()[:-9])
    with inline_store(root, replace(NEAR, profile=file)) as store:
        stored(store)
    before = {path: path.read_bytes() for path in objects(root)}
    places = () if place is None else (str(tmp_path / place),)
    with inline_store(root, replace(NEAR, profiles=places, breaker_failures=1)) as store:
        view = store.view(IDENTITY)
        with view.lookup(IDS) as hit:
            assert hit.tokens == 1280
            if way == "load_into":
                report = view.load_into(hit, np.zeros((2, LAYERS, 1280, HEADS, DIM), np.float16))
            elif way == "load":
                report = view.load(hit).report
            else:
                with view.blocks(hit) as stream:
                    assert list(stream) == []
                report = stream.report
        assert report.tokens == 0
        assert {fault.miss for fault in report.faults} == {Miss.PROFILE}
        assert profile_digest(profile()) in report.faults[0].detail
        assert store.metrics.value("misses", "profile") > 0
        assert store.refuses() is None
        assert not store.knows_damage()
        again = view.put(kv_of(IDS), IDS)
        assert [why for _, why in again.refused] == [Refusal.PRESENT]
    assert {path: path.read_bytes() for path in objects(root)} == before


def test_a_profile_that_comes_later_is_found(tmp_path: Path, file: str) -> None:
    root, late = tmp_path / "store", tmp_path / "late.kvp"
    with inline_store(root, replace(NEAR, profile=file)) as store:
        stored(store)
    with inline_store(root, replace(NEAR, profiles=(str(late),))) as store:
        view = store.view(IDENTITY)
        assert read(view)[0].tokens == 0
        written(late, profile())
        assert read(view)[0].complete
        late.unlink()  # read once, and kept
        assert read(view)[0].complete


@covers("TRF-5")
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (None, "cannot be read"),
        (profile()[:-1], "truncated"),
        (profile(model="another/model"), "another model"),
        (profile(quality="balanced"), "no transform"),
        (profile(turned=True), "how this layer is rotated"),
    ],
)
def test_a_profile_that_cannot_be_used_is_a_refusal_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes | None, text: str
) -> None:
    file = str(tmp_path / "bad.kvp")
    if data is not None:
        written(Path(file), data)
    with inline_store(tmp_path / "store", replace(NEAR, profile=file)) as store:
        stored(store)
        assert store.metrics.value("refusals", "profile") == 1
        assert store.metrics.value("refusals", "no-parent") == 1
        assert text in caplog.text
        assert objects(tmp_path / "store") == []
        groups = [item.group for item in Cache.from_kv(kv_of(IDS)).groups]
        with pytest.raises(KvformatError, match=text):
            store.require_profile(IDENTITY, groups)


def test_rotated_keys_need_an_identity_that_says_how(tmp_path: Path) -> None:
    turned = profile(turned=True)
    file = written(tmp_path / "turned.kvp", turned)
    rope = kvformat.Rope.from_array(np.ones(1, np.float32), tuple(range(LAYERS)))
    with inline_store(tmp_path / "store", replace(NEAR, profile=file)) as store:
        view = store.view(replace(IDENTITY, rope=(rope,)))
        view.put(kv_of(IDS), IDS)
        report, found = read(view)
        assert report.complete
        assert (found == kv_of(IDS)[:, :, :1280]).all()
        assert report.lineage.profile == profile_digest(turned)


def part_of(heads: tuple[int, int]) -> Cache:
    """The tensors of a rank that holds some heads."""
    kv = kv_of(IDS, heads)
    tensors = {
        f"layers.{layer}.{role}": kv[number, layer]
        for number, role in enumerate(("key", "value"))
        for layer in range(LAYERS)
    }
    return Cache.from_tensors(tensors, head_start=heads[0], heads_total=HEADS)


@covers("TRF-2")
def test_ranks_of_some_heads_read_what_all_heads_wrote(tmp_path: Path, file: str) -> None:
    """All heads of a layer are decoded together (spec 9.5)."""
    with inline_store(tmp_path / "store", replace(NEAR, profile=file)) as store:
        view = stored(store)
        for heads in ((0, 1), (1, 2)):
            report, found = read(view, heads=heads)
            assert report.complete
            assert (found == kv_of(IDS, heads)[:, :, :1280]).all()
            with view.lookup(IDS) as hit, view.blocks(hit, heads=heads) as stream:
                for placed in stream:
                    block = placed.block
                    assert (block.head_start, block.array.shape[2]) == (heads[0], 1)
                    place = slice(placed.position, placed.position + block.array.shape[1])
                    plane = ["key", "value"].index(block.group.role)
                    expected = kv_of(IDS, heads)[plane, list(block.layers), place]
                    assert (block.array == expected).all()
            assert stream.report.complete


def test_ranks_of_some_heads_cannot_write_with_a_profile_of_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    with inline_store(tmp_path / "store", replace(NEAR, profile=file)) as store:
        part = part_of((1, 2))
        store.view(IDENTITY, part="l0-2-h1-2").put(part, IDS)
        assert store.metrics.value("refusals", "profile") == 1
        assert "key heads 1 to 1 of 2" in caplog.text and "key heads 0 to 1 of 2" in caplog.text
        with pytest.raises(UsageError, match="one for all heads fits no part"):
            store.require_profile(IDENTITY, [item.group for item in part.groups])
    with inline_store(tmp_path / "other", NEAR) as store:
        store.view(IDENTITY, part="l0-2-h1-2").put(part_of((1, 2)), IDS)
        assert store.metrics.value("refusals") == 0
        store.require_profile(IDENTITY, [item.group for item in part.groups])


def test_video_of_transformed_extents_restores_the_same_bits(tmp_path: Path, file: str) -> None:
    """Conversion needs no profile: it works on integers."""
    root = tmp_path / "store"
    with inline_store(root, replace(NEAR, profile=file)) as store:
        view = stored(store)
        hit = view.probe(IDS)
    with inline_store(root, replace(NEAR)) as store:
        assert convert_object(store.backend, NEAR, hit.extents[0].name, "hevc") > 0
    with kvformat.open(store.backend.locate(hit.extents[0].name)) as artifact:
        assert artifact.tracks == ("near-lossless/hevc",)
        assert set(artifact.manifest.qualities[0].encodings) == {TRANSFORMED}
    with inline_store(root, replace(NEAR, profile=file)) as store:
        report, found = read(store.view(IDENTITY))
        assert report.complete
        assert (found == kv_of(IDS)[:, :, :1280]).all()


def test_bulk_verification_takes_the_profile(tmp_path: Path, file: str) -> None:
    """Without it the bytes can be checked, with a damaged one the objects cannot be restored."""
    root = str(tmp_path / "store")
    with inline_store(root, replace(NEAR, profile=file)) as store:
        stored(store)
    torn = written(tmp_path / "torn.kvp", profile(quality="balanced"))
    for more, code in (([], 0), (["--profile", file], 0), (["--profile", torn], 69)):
        result = CliRunner().invoke(cli, ["store", "verify", root, *more])
        assert result.exit_code == code, result.output
        assert ("profile" in result.output) is bool(code)


def test_the_encoder_process_writes_with_it_too(tmp_path: Path, file: str) -> None:
    with kvformat.store.open(str(tmp_path / "store"), replace(NEAR, profile=file)) as store:
        view = stored(store)
        assert store.drain(60)
        report, found = read(view)
        assert report.complete
        assert (found == kv_of(IDS)[:, :, :1280]).all()


def test_matrices_are_made_once_for_all_extents(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inline_store(tmp_path / "store", replace(NEAR, profile=file)) as store:
        view = stored(store)
    made: list[Any] = []
    plain = type(parse_profile(profile())).matrices

    def noted(self: Any, item: Any, where: str) -> Any:
        made.append(item.key)
        return plain(self, item, where)

    monkeypatch.setattr("kvformat.profiles.Profile.matrices", noted)
    with inline_store(tmp_path / "store", replace(NEAR, profiles=(file,))) as store:
        view = store.view(IDENTITY)
        for _ in range(2):
            assert read(view)[0].complete
        assert len(view.probe(IDS).extents) == 2
    assert sorted(made) == sorted(set(made)) and len(made) == 2 * LAYERS


@pytest.mark.parametrize(
    "settings",
    [{"profile": "a.kvp", "quality": "exact"}, {"profiles": 3}, {"profile": 3}],
)
def test_settings_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        StoreOptions(**settings)


def test_settings_of_an_engine() -> None:
    found = parse({"url": "x", "profile": "a.kvp", "profiles": ["b.kvp", "c"]}, {}).options
    assert (found.profile, found.profiles) == ("a.kvp", ("b.kvp", "c"))
    assert parse({"url": "x", "profile": None}, {}).options.profile is None
    with pytest.raises(UsageError, match="profiles"):
        parse({"url": "x", "profiles": "b.kvp"}, {})
