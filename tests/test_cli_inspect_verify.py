"""``kvformat inspect``, ``verify`` and ``extract``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

import kvformat
from kvformat import storage
from kvformat.cli.inspect import compact, number_runs
from kvformat.cli.verify import for_people
from kvformat.layout import gather
from tests.requirements import covers
from tests.test_cli_common import MODEL, TOKENS, Files, build, make_kv, run, verdict


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return build(tmp_path_factory.mktemp("cli"))


def write(path: Path, model: str, **identity: Any) -> Path:
    given = {"kind": "unbound"} | identity
    kvformat.write(
        path,
        make_kv(5),
        identity=kvformat.Identity(kvformat.Model(model), 4, "float16", **given),
        tracks="exact",
    )
    return path


def flat(text: str) -> str:
    """Without line breaks and repeated spaces."""
    return " ".join(text.split())


@covers("HDR-5")
def test_inspect_shows_what_a_person_asks_for(files: Files) -> None:
    result = run("inspect", files.bound)
    assert result.exit_code == 0
    text = flat(result.stdout)
    with kvformat.open(files.bound) as artifact:
        assert artifact.manifest_digest in text
        assert artifact.manifest.content_id in text
        assert f"{files.bound.stat().st_size:,} bytes" in text
        for name in artifact.tracks:
            assert name in text
    for word in (MODEL, "r1", "300, the first at position 0", "0-3", "float16", "token-major"):
        assert word in text
    assert "tokens are not verified" not in text
    assert all(len(line) <= 100 for line in result.stdout.splitlines())


@covers("ENG-2")
@pytest.mark.parametrize("kind", ["unbound", "engine_key"])
def test_inspect_says_that_tokens_are_not_verified(tmp_path: Path, kind: str) -> None:
    key = kvformat.EngineKey("vllm", "sha256", "abc", 1, 2) if kind == "engine_key" else None
    path = write(tmp_path / "a.kvf", MODEL, kind=kind, engine_key=key)
    assert "tokens are not verified" in flat(run("inspect", path).stdout)
    assert "tokens are not verified" in flat(run("verify", path).stdout)
    assert "not verified" in flat(run("decode", path, "--output", tmp_path / "a.npy").stderr)


def test_inspect_says_whether_the_chain_is_salted(files: Files) -> None:
    assert "salted" in run("inspect", files.salted).stdout
    assert "not salted" not in run("inspect", files.salted).stdout
    assert "not salted" in run("inspect", files.bound).stdout


def test_inspect_shows_windows_and_valid_lengths(files: Files) -> None:
    text = flat(run("inspect", files.window).stdout)
    assert "24-40 (window)" in text
    assert "valid lengths 40" in text


@covers("REQ-1")
def test_inspect_reads_only_the_front(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[tuple[int, int]] = []
    original = storage.LocalSource._read

    def counted(self: storage.LocalSource, offset: int, length: int) -> bytes:
        spans.append((offset, length))
        return original(self, offset, length)

    monkeypatch.setattr(storage.LocalSource, "_read", counted)
    for options in ((), ("--json",)):
        spans.clear()
        assert run("inspect", files.bound, *options).exit_code == 0
        assert spans == [(0, storage.PREFETCH_BYTES)]


def test_inspect_as_json_is_the_manifest(files: Files) -> None:
    value = json.loads(run("inspect", "--json", files.bound).stdout)
    with kvformat.open(files.bound) as artifact:
        assert value["manifest"] == artifact.manifest.to_json()
        assert value["header"]["manifest_digest"] == artifact.manifest_digest
    assert value["header"]["file_bytes"] == files.bound.stat().st_size


EVIL = "evil\x1b[31m\x07\u202emodel\u200b[red]x[/red]\n:smile:"


@covers("SEC-1", "SEC-2")
def test_names_from_an_artifact_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = write(tmp_path / "[bold]a[red].kvf", EVIL)
    outputs = [
        run("inspect", path),
        run("inspect", "--json", path),
        run("verify", path, "--expect-model", EVIL.upper()),
        run("verify", "--json", path, "--expect-model", EVIL.upper()),
    ]
    for result in outputs:
        text = (result.stdout + result.stderr).replace("\n", "")
        assert all(char.isprintable() for char in text)
        assert "[red]x[/red]" in text or "[RED]X[/RED]" in text
    assert "[bold]a[red].kvf" in flat(outputs[0].stdout).replace(" ", "")
    assert ":smile:" in outputs[0].stdout
    assert json.loads(outputs[1].stdout)["manifest"]["identity"]["model"]["id"] == EVIL


def test_long_lists_are_short() -> None:
    assert number_runs([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert number_runs([]) == ""
    assert number_runs(range(0, 60, 2)) == "0, 2, 4, 6, 8, 10, 12, 14 and 22 more"
    assert compact("abc", most=2) == "a, b and 1 more"


@covers("VER-1", "VER-2", "VER-3", "VER-4")
@pytest.mark.parametrize("options", [(), ("--in-process", "--workers", "1")])
def test_verify_says_what_it_did_not_check(files: Files, options: tuple[str, ...]) -> None:
    result = run("verify", files.bound, *options)
    assert result.exit_code == 0
    text = flat(result.stdout)
    assert text.startswith("ok ")
    assert f"{files.bound.stat().st_size:,} bytes" in text
    for word in ("not checked", "cache of your prompt", "quality:", "hevc:", "identity:"):
        assert word in text
    assert not re.search(r"[A-Z]{3}-[0-9]|prefix chain|source_digest", text)
    assert not result.stderr


@covers("VER-3", "TOK-10")
def test_verify_with_expectations(files: Files) -> None:
    options = ("--expect-model", MODEL, "--expect-revision", "r1")
    ids = ("--expect-token-ids", files.ids)
    result = run("verify", files.bound, "--json", *options, *ids)
    value = verdict(result)
    assert value["report"]["artifact"]["verified_tokens"] == TOKENS
    assert not any(item.startswith("tokens") for item in value["report"]["not_checked"])
    assert value["report"]["checked"]["segments"] > 0
    result = run("verify", files.salted, *ids, "--salt-file", files.salt)
    assert result.exit_code == 0
    assert "the first 8 agree" in flat(result.stdout)


@covers("TOK-10")
def test_verify_warns_of_a_prefix_only(files: Files, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text(" ".join(str(1000 + number) for number in range(260)))
    result = run("verify", files.bound, "--expect-token-ids", tmp_path / "ids")
    assert result.exit_code == 0
    assert "only the first 256 of 300 tokens" in result.stderr
    value = verdict(run("verify", "--json", files.bound, "--expect-token-ids", tmp_path / "ids"))
    assert "only the first 256 of 300" in value["message"]


@covers("HEV-1", "HEV-2", "LAY-5")
def test_extract_gives_a_stream_that_plays(files: Files, tmp_path: Path) -> None:
    output = tmp_path / "it's.hevc"
    result = run("extract", files.bound, "--output", output)
    assert result.exit_code == 0
    assert "ffplay" in result.stdout
    assert "'\"'\"'" in result.stdout  # the name is quoted for a shell
    with av.open(str(output), format="hevc") as container:
        frames = [frame.to_ndarray() for frame in container.decode(video=0)]
    with kvformat.open(files.bound) as artifact:
        track = artifact.track("hevc")
        record = artifact.segment_table(track)[0]
        layout = track.layouts[record.layout]
        cell = record.cell
        assert f"{layout.frames} of {layout.width} x {layout.height}" in flat(result.stdout)
        planes = np.stack(frames)
        assert planes.shape == (layout.frames, 3, layout.height, layout.width)
        out = np.empty((cell.token_count, cell.head_count * 32), np.uint8)
        gather(layout, planes[:, 0], *out.shape, out)
        assert len(np.unique(out)) > 10


@covers("ERR-1", "ERR-4", "PAR-2")
def test_extract_refuses(files: Files, tmp_path: Path) -> None:
    output = tmp_path / "x.hevc"
    cases: list[tuple[int, str, tuple[object, ...]]] = [
        (64, "usage.selection", (files.unbound, "--output", output)),
        (64, "usage.selection", (files.bound, "--output", output, "--track", "exact/zstd")),
        (64, "usage.selection", (files.bound, "--output", output, "--track", "nothing")),
        (64, "usage.selection", (files.bound, "--output", output, "--segment", "9999")),
        (64, "usage.argument", (files.bound, "--output", output, "--segment", "-1")),
        (64, "usage.argument", (files.bound, "--output", tmp_path / "x.mp4")),
    ]
    for exit_code, code, arguments in cases:
        result = run("extract", *arguments)
        assert (result.exit_code, code in result.stderr) == (exit_code, True), result.output
    with kvformat.open(files.bound) as artifact:
        record = artifact.segment_table(artifact.track("hevc"))[1]
        place = artifact.front.data_start + record.offset
    data = bytearray(files.bound.read_bytes())
    data[place] ^= 1
    path = tmp_path / "damaged.kvf"
    path.write_bytes(data)
    result = run("extract", path, "--output", output, "--segment", "1")
    assert (result.exit_code, "segment.digest" in result.stderr) == (65, True)
    assert list(tmp_path.iterdir()) == [path]
    assert run("extract", path, "--output", output, "--segment", "0").exit_code == 0
    assert run("extract", path, "--output", output).exit_code == 74
    assert run("extract", path, "--output", output, "--overwrite").exit_code == 0


def test_every_sentence_of_verify_has_words_for_people(files: Files) -> None:
    for path in (files.bound, files.unbound, files.salted, files.window):
        raw = kvformat.verify(path).not_checked
        shown = for_people(raw)
        assert len(shown) == len(raw)
        assert not set(shown) & set(raw)
    assert for_people(["new: something else (VER-9)"]) == ["new: something else"]


def test_inspect_counts_blocks(files: Files) -> None:
    assert "2 blocks of up to 256 tokens" in flat(run("inspect", files.bound).stdout)
    assert "1 block of up to 256 tokens" in flat(run("inspect", files.salted).stdout)
