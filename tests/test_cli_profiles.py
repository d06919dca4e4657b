"""``kvformat decode``, ``verify`` and ``inspect`` where a calibration profile is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from conformance.generate.transform_parts import parts
from kvformat.cli.verify import for_people
from tests.reference import reference_restore
from tests.requirements import covers
from tests.strategies import raw
from tests.test_cli_common import run, verdict
from tests.transformed import profile_digest

STORED = "near-lossless/stored"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("profiles")
    builder, profile = parts([STORED, "exact/zstd"])
    (place / "a.kvf").write_bytes(builder.build())
    (place / "profiles").mkdir()
    (place / "profiles/p.kvp").write_bytes(profile)
    return place


@covers("TRF-4", "ERR-1", "ERR-4")
def test_decode_asks_for_the_profile(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.safetensors"
    digest = profile_digest((folder / "profiles/p.kvp").read_bytes())
    asked = ("decode", folder / "a.kvf", "--output", output, "--track", STORED)
    for more in ((), ("--profile", folder), ("--profile", folder / "a.kvf")):
        result = run(*asked, *more)
        assert result.exit_code == 69
        assert "profile.missing" in result.stderr
        assert digest in result.stderr
        assert not output.exists()
    result = run(*asked, "--profile", folder / "none.kvp", "--json")
    assert (result.exit_code, verdict(result)["code"]) == (74, "io.not-found")


@covers("TRF-7")
@pytest.mark.parametrize(
    "places", [("profiles",), ("profiles/p.kvp",), ("a.kvf", "profiles/p.kvp")]
)
def test_decode_with_the_profile(folder: Path, tmp_path: Path, places: tuple[str, ...]) -> None:
    output = tmp_path / "a.safetensors"
    given = [item for place in places for item in ("--profile", folder / place)]
    result = run("decode", folder / "a.kvf", "--output", output, "--track", STORED, *given)
    assert result.exit_code == 0, result.output
    profile = (folder / "profiles/p.kvp").read_bytes()
    expected = reference_restore((folder / "a.kvf").read_bytes(), profile, only=STORED)[STORED]
    found = load_file(output)
    for role, group, layers in (("key", "keys", (1, 3, 4, 6)), ("value", "values", (1, 3))):
        for index, layer in enumerate(layers):
            assert raw(found[f"layers.{layer}.{role}"]) == raw(expected[group][index])


@covers("VER-3")
def test_verify_with_and_without(folder: Path) -> None:
    result = run("verify", folder / "a.kvf", "--json", "--in-process")
    assert result.exit_code == 0
    report = verdict(result)["report"]
    (line,) = (item for item in report["not_checked"] if item.startswith("profile:"))
    assert "give --profile" in for_people([line])[0]
    result = run(
        "verify", folder / "a.kvf", "--json", "--in-process", "--profile", folder / "profiles"
    )
    report = verdict(result)["report"]
    assert report["checked"]["transforms"] == 6
    assert not [item for item in report["not_checked"] if item.startswith("profile:")]


def test_inspect_shows_the_profile(folder: Path) -> None:
    result = run("inspect", folder / "a.kvf")
    text = "".join(result.stdout.split())
    assert profile_digest((folder / "profiles/p.kvp").read_bytes()) in text
    assert "neededforallgroupsofnear-lossless" in text
    manifest = json.loads(run("inspect", folder / "a.kvf", "--json").stdout)["manifest"]
    assert manifest["features"] == ["transform-klt"]
    assert set(manifest["profile"]) == {"digest"}
