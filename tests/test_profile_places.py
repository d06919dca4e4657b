"""Where calibration profiles are looked for (TRF-4), and whether they fit an artifact (TRF-5)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvformat
from conformance.generate.transform_parts import parts, transform, transforms
from kvformat import KvformatError
from kvformat.profile_shelf import ProfileShelf, load_profile
from kvformat.profiles import Profile, parse_profile
from tests.requirements import covers
from tests.test_profiles import GOOD, code_of
from tests.transformed import (
    MODEL,
    Transform,
    assembled,
    cut_profile,
    profile_digest,
    profile_file,
)

STORED = "near-lossless/stored"


# --- where profiles are looked for -----------------------------------------------------------


@pytest.fixture(scope="module")
def artifact() -> tuple[bytes, bytes]:
    builder, profile = parts([STORED, "exact/stored"])
    return builder.build(), profile


def read(file: bytes, places: Any, track: str = STORED) -> str:
    def act() -> None:
        with kvformat.open(file, profiles=places) as found:
            found.read(track=track)

    return code_of(act)


@covers("TRF-4")
def test_forms_of_places(artifact: tuple[bytes, bytes], tmp_path: Path) -> None:
    file, profile = artifact
    path = tmp_path / "p.kvp"
    path.write_bytes(profile)
    other = tmp_path / "other.kvp"
    other.write_bytes(GOOD)
    good = parse_profile(profile)
    for places in (
        path, str(path), f"file://{path}", [path], (str(other), path), tmp_path, [tmp_path],
        good, [good], [load_profile(other), good], iter([path]),
    ):  # fmt: skip
        assert read(file, places) == "ok", places
    for places in ((), [], other, [load_profile(other)], tmp_path / "none.kvp"):
        expected = "io.not-found" if places == tmp_path / "none.kvp" else "profile.missing"
        assert read(file, places) == expected, places
    for places in (5, [5], b"abc", [None], "", ["a\0b"]):
        assert read(file, places) == "usage.argument", places


@covers("TRF-4")
def test_the_digest_that_is_missing_is_named(artifact: tuple[bytes, bytes]) -> None:
    file, profile = artifact
    with kvformat.open(file) as found, pytest.raises(KvformatError) as caught:
        found.read(track=STORED)
    error = caught.value
    assert (error.code, error.verdict, error.exit_code) == ("profile.missing", "unsupported", 69)
    assert error.expected == profile_digest(profile)
    assert profile_digest(profile) in error.next_step
    assert error.where == "/profile/digest"


@covers("TRF-4")
def test_what_needs_no_profile_is_read_without(artifact: tuple[bytes, bytes]) -> None:
    assert read(artifact[0], (), "exact/stored") == "ok"


@covers("TRF-4", "ORD-3")
def test_a_directory_of_other_files(artifact: tuple[bytes, bytes], tmp_path: Path) -> None:
    """Only ``*.kvp``, not deeper; what is no profile, or damaged in its header, is passed over."""
    file, profile = artifact
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper/p.kvp").write_bytes(profile)
    (tmp_path / "p.bin").write_bytes(profile)
    (tmp_path / "a.kvp").mkdir()
    (tmp_path / "b.kvp").write_bytes(b"")
    (tmp_path / "c.kvp").write_bytes(file)
    (tmp_path / "d.kvp").write_bytes(GOOD)
    (tmp_path / "e.kvp").write_bytes(profile[:16] + bytes(32) + profile[48:])
    assert read(file, tmp_path) == "profile.missing"
    (tmp_path / "z.kvp").write_bytes(profile)
    assert read(file, tmp_path) == "ok"


@covers("TRF-4", "PRF-3", "HDR-5", "HDR-10")
def test_the_right_name_on_damaged_bytes(artifact: tuple[bytes, bytes], tmp_path: Path) -> None:
    file, profile = artifact
    path = tmp_path / "p.kvp"
    front = len(profile) - len(cut_profile(profile)[1])
    for code, changed in {
        "file.size": profile[:-1],
        "manifest.digest": profile[: front - 9] + b"~" + profile[front - 8 :],
        "profile.content": profile[: front + 9] + b"~~~~" + profile[front + 13 :],
    }.items():
        path.write_bytes(changed)
        assert read(file, path) == code
        assert read(file, tmp_path) == code
    path.write_bytes(profile + b"\0")
    assert read(file, path) == "file.size"


def bad_copies(profile: bytes) -> dict[str, bytes]:
    """Files with the name of a profile in their header that are not whole, by what is told."""
    front = len(profile) - len(cut_profile(profile)[1])
    return {
        "file.size": profile[:-1],
        "manifest.digest": profile[: front - 9] + b"~" + profile[front - 8 :],
    }


@covers("TRF-4")
def test_a_place_that_cannot_be_read_hides_no_other(
    artifact: tuple[bytes, bytes], tmp_path: Path
) -> None:
    file, profile = artifact
    good = tmp_path / "z.kvp"
    good.write_bytes(profile)
    assert read(file, [tmp_path / "none.kvp", good]) == "ok"
    for code, changed in bad_copies(profile).items():
        bad = tmp_path / "a.kvp"
        bad.write_bytes(changed)
        assert read(file, [bad, good]) == read(file, tmp_path) == "ok"
        assert read(file, [bad, tmp_path / "none.kvp"]) == code


@covers("TRF-4")
def test_auto_reads_another_quality_where_the_profile_cannot_be_read(
    artifact: tuple[bytes, bytes], tmp_path: Path
) -> None:
    file, profile = artifact
    place = tmp_path / "a.kvp"
    slow = kvformat.Link(1e3)  # where the fewest bytes win
    for code, changed in {**bad_copies(profile), "io.not-found": None, "ok": profile}.items():
        place.unlink(missing_ok=True)
        if changed is not None:
            place.write_bytes(changed)
        with kvformat.open(file, profiles=place) as found:
            both = kvformat.Auto(("near-lossless", "exact"), link=slow)
            track = found.read(track=both).track
            assert track == (STORED if code == "ok" else "exact/stored")
            one = kvformat.Auto("near-lossless", link=slow)
            assert code_of(lambda: found.read(track=one)) == code  # noqa: B023


@covers("TRF-4", "ORD-4", "SEC-3")
def test_sizes_are_compared_before_bytes_are_asked_for(tmp_path: Path) -> None:
    manifest, data = cut_profile(GOOD)
    path = tmp_path / "p.kvp"
    path.write_bytes(assembled(manifest, data, file_bytes=2**52))
    assert code_of(lambda: load_profile(path)) == "file.size"


@covers("TRF-4", "SEC-1")
def test_nothing_is_opened_that_the_caller_did_not_name(
    artifact: tuple[bytes, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The artifact names the path of a good profile wherever text fits; it is not looked at."""
    profile = artifact[1]
    place = tmp_path / "p.kvp"
    place.write_bytes(profile)
    builder, _ = parts([STORED])
    text = str(place)

    def name_it(manifest: dict[str, Any]) -> None:
        manifest["generator"] = text
        manifest["extensions"] = {"profile": {"must_understand": False, "value": {"url": text}}}
        for track in manifest["tracks"]:
            track["encoder"] = text

    named = builder.build(edit_manifest=name_it)
    path = tmp_path / "folder/a.kvf"
    path.parent.mkdir()
    path.write_bytes(named)
    (path.parent / f"{profile_digest(profile)}.kvp").write_bytes(profile)
    monkeypatch.chdir(path.parent)
    opened: list[str] = []
    real = Path.open

    def watch(self: Path, *args: Any, **options: Any) -> Any:
        opened.append(str(self))
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "open", watch)
    with kvformat.open(path) as found:
        assert code_of(lambda: found.read(track=STORED)) == "profile.missing"
    assert opened == [str(path)]


def test_a_profile_is_read_once(
    artifact: tuple[bytes, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, profile = artifact
    path = tmp_path / "p.kvp"
    path.write_bytes(profile)
    loads: list[str] = []
    real = load_profile

    def count(url: Any) -> Profile:
        loads.append(str(url))
        return real(url)

    monkeypatch.setattr("kvformat.profile_shelf.load_profile", count)
    with kvformat.open(file, profiles=path) as found:
        for _ in range(3):
            found.read(track=STORED, workers=4)
    assert loads == [str(path)]


def test_an_empty_shelf_says_so() -> None:
    with pytest.raises(KvformatError, match="calibration profile") as caught:
        ProfileShelf(()).find("0" * 64)
    assert caught.value.found == "nowhere to look"


# --- a profile and an artifact that do not fit (TRF-5) ---------------------------------------


def first_key(**changes: Any) -> list[Transform]:
    made = transforms()
    made[0] = transform("key", 1, pairing="half", pairs=2, dtype="int32", **changes)
    return made


def identity_with(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def edit(identity: dict[str, Any]) -> None:
        for name, value in changes.items():
            if name == "rope":
                identity["rope"] = value
            elif name in ("keys_rotated", "pairing", "inv_freq", "layers"):
                identity["rope"][0][name] = value
            else:
                identity["model"][name] = value

    return edit


DIGESTS = ("blake3:" + "1" * 64, "blake3:" + "2" * 64)
FITS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "as it is": ("ok", {}, {}),
    "no transform for a layer": ("profile.content", {"made": transforms()[1:]}, {}),
    "other quality": ("profile.content", {"made": first_key(quality="balanced")}, {}),
    "other heads_total": ("profile.content", {"made": first_key(heads_total=4)}, {}),
    "other head_start": (
        "profile.content",
        {"made": first_key(head_start=2, heads_total=4)},
        {},
    ),
    "other heads": ("profile.content", {"made": first_key(heads=4, dims=4)}, {}),
    "other head_dim": ("profile.content", {"made": first_key(heads=2, dims=8)}, {}),
    "other model": ("profile.content", {}, {"id": "b model"}),
    "another revision": ("ok", {}, {"revision": "main"}),
    "no digest in the profile": ("ok", {}, {"weights_digest": DIGESTS[0]}),
    "no digest in the artifact": ("ok", {"model": {**MODEL, "weights_digest": DIGESTS[0]}}, {}),
    "equal digests": (
        "ok",
        {"model": {**MODEL, "weights_digest": DIGESTS[0]}},
        {"weights_digest": DIGESTS[0]},
    ),
    "other weights": (
        "profile.content",
        {"model": {**MODEL, "weights_digest": DIGESTS[0]}},
        {"weights_digest": DIGESTS[1]},
    ),
    "no rope": ("profile.content", {}, {"rope": []}),
    "keys not rotated": ("profile.content", {}, {"keys_rotated": False}),
    "other pairing": ("profile.content", {}, {"pairing": "interleaved"}),
    "other number of pairs": ("profile.content", {}, {"inv_freq": "3f800000"}),
    "another layer": ("profile.content", {}, {"layers": [1, 3, 4, 5]}),
    "other frequencies": ("ok", {}, {"inv_freq": "3f00000040000000"}),
}


@covers("TRF-5")
@pytest.mark.parametrize("name", FITS)
def test_fit(name: str) -> None:
    code, options, identity = FITS[name]
    model = options.get("model")
    builder, profile = parts(
        [STORED],
        made=options.get("made"),
        profile=lambda made: profile_file(sorted_transforms(made), model=model),
    )
    identity_with(**identity)(builder.manifest["identity"])
    file = builder.build()
    place = parse_profile(profile)
    assert read(file, place) == code
    verified = code_of(lambda: kvformat.verify(file, profiles=place, in_child=False))
    assert verified == code
    assert code_of(lambda: kvformat.verify(file, in_child=False)) == "ok"


def sorted_transforms(made: list[Transform]) -> list[Transform]:
    return sorted(made, key=lambda item: (item.quality, item.role, item.layer))
