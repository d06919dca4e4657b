"""``encode``: the reference passes, and a writer with one fault fails the case that is about it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conformance_fakes import (  # noqa: F401 - fixtures are used by name
    CONFORMANCE,
    REFERENCE,
    ROOT,
    fake_fixture,
    make_case,
    run,
    statuses,
)
from tests.conformance_wrappers import wrapper

# isort: split
from kvconform import cases, check, needs, runner, writing

CASES = cases.load(CONFORMANCE / "cases")
ENCODE = [case for case in CASES if case.operations[0].call == "encode"]
LACKS = [case for case in CASES if any(item.startswith("lacks:") for item in case.requires)]

AROUND = """
import json, os, pathlib
old = it.encode
def encode(file, options, *, batch):
    target = pathlib.Path(options["--output"])
{body}
it.encode = encode
"""
CHANGED_SPEC = """
    spec = json.loads(pathlib.Path(file).read_text())
    {change}
    changed = pathlib.Path(file).with_name("changed.json")
    changed.write_text(json.dumps(spec))
    return old(str(changed), options, batch=batch)
"""
FILTERED = """
    import numpy as np
    plain = it.group_tensors
    def finite(value, count, folder):
        found = plain(value, count, folder)
        layers = tuple(np.nan_to_num(x.astype("f4")).astype(x.dtype) for x in found.layers)
        return it.kvformat.GroupTensors(found.group, layers)
    it.group_tensors = finite
    return old(file, options, batch=batch)
"""
FAULTS = {
    "recomputes-the-frequencies": (
        "identity-as-given",
        CHANGED_SPEC.format(
            change='[rope.update(inv_freq="3f8000003dcccccd") for rope in spec["identity"]["rope"]]'
        ),
        "failed",
        "/identity/rope/0/inv_freq",
    ),
    "forgets-the-lineage": (
        "lineage-after-two-lossy-tracks",
        CHANGED_SPEC.format(change='spec["restored_from"] = None'),
        "failed",
        "/lineage",
    ),
    "counts-an-exact-track": (
        "lineage-after-an-exact-track",
        CHANGED_SPEC.format(change='spec["restored_from"]["quality"] = "near-lossless"'),
        "failed",
        "/lineage",
    ),
    "forgets-content": (
        "chain-with-content",
        CHANGED_SPEC.format(change='spec["content"] = []'),
        "failed",
        "/tokens/",
    ),
    "forgets-the-salt": (
        "chain-salted",
        CHANGED_SPEC.format(change='spec["salt"] = None'),
        "failed",
        "/tokens/chain/hashes/0",
    ),
    "leaves-out-a-track": (
        "exact-stored-and-zstd",
        CHANGED_SPEC.format(change='del spec["tracks"][1]'),
        "failed",
        "tracks",
    ),
    "swaps-the-groups": (
        "exact-stored",
        CHANGED_SPEC.format(change='spec["groups"].reverse()'),
        "failed",
        "manifest /",
    ),
    "stores-the-salt": (
        "chain-salted",
        """
    salt = json.loads(pathlib.Path(file).read_text())["salt"]
    from unittest.mock import patch
    with patch("kvformat.writer.GENERATOR", f"writer {salt}"):
        return old(file, options, batch=batch)
""",
        "failed",
        "no salt in FILE",
    ),
    "makes-nan-to-zero": ("quantised-nan", FILTERED, "failed", "usage input.non-finite"),
    "replaces-what-is-there": (
        "target-exists",
        "    target.unlink(missing_ok=True)\n    return old(file, options, batch=batch)",
        "failed",
        "io_error io.exists",
    ),
    "removes-what-is-there": (
        "target-exists",
        """
    try:
        return old(file, options, batch=batch)
    except it.KvformatError:
        target.unlink()
        raise
""",
        "crashed",
        "io_error io.exists",
    ),
    "leaves-a-draft": (
        "quantised-nan",
        """
    target.with_suffix(".draft").touch()
    return old(file, options, batch=batch)
""",
        "crashed",
        "usage input.non-finite",
    ),
    "leaves-a-draft-beside-the-file": (
        "exact-stored",
        """
    target.with_suffix(".draft").touch()
    return old(file, options, batch=batch)
""",
        "failed",
        "nothing else in its folder",
    ),
    "writes-nothing": (
        "exact-stored",
        '    return {"manifest_digest": "0" * 64}',
        "failed",
        "FILE and nothing else",
    ),
    "writes-something-else": (
        "exact-stored",
        '    target.write_bytes(b"hello")\n    return {"manifest_digest": "0" * 64}',
        "failed",
        "an artifact in FILE",
    ),
    "cuts-the-file": (
        "exact-stored",
        """
    found = old(file, options, batch=batch)
    os.truncate(target, target.stat().st_size - 1)
    return found
""",
        "failed",
        "a FILE of",
    ),
    "tells-another-digest": (
        "exact-stored",
        '    return {**old(file, options, batch=batch), "manifest_digest": "0" * 64}',
        "failed",
        "a manifest in FILE with digest 0",
    ),
    "damages-a-segment": (
        "exact-stored",
        """
    found = old(file, options, batch=batch)
    data = bytearray(target.read_bytes())
    data[-1] ^= 1
    target.write_bytes(data)
    return found
""",
        "failed",
        "verify of the new file",
    ),
    "reads-otherwise-than-it-writes": (
        "quantised-two-codecs",
        """
    def decode(url, options, *, batch, plain=it.decode):
        found = plain(url, options, batch=batch)
        if options["--track"].endswith("zstd"):
            path = pathlib.Path(options["--output"])
            data = bytearray(path.read_bytes())
            data[0] ^= 1
            path.write_bytes(data)
            half = len(data) // 2
            parts = {"keys": bytes(data[:half]), "values": bytes(data[half:])}
            found["digests"] = {k: it.blake3(v).hexdigest() for k, v in parts.items()}
        return found
    it.decode = decode
    return old(file, options, batch=batch)
""",
        "failed",
        "as in near-lossless/stored",
    ),
}


def chosen(name: str) -> cases.Case:
    return next(case for case in ENCODE if case.id.endswith(f"-{name}"))


def run_cases(command: list[str], wanted: list[cases.Case], **options: Any) -> Any:
    return runner.Run(command, wanted, runner.Options(**options)).run(CONFORMANCE / "schema")


@pytest.mark.parametrize("batch", [True, False])
def test_the_reference_passes(batch: bool) -> None:
    wanted = ENCODE if batch else [chosen("exact-stored"), chosen("target-exists")]
    found = run_cases(REFERENCE, wanted, batch=batch)
    assert [case for case in found.cases if case.status != "passed"] == []
    assert found.good


def test_there_are_good_and_bad_cases() -> None:
    good = [case for case in ENCODE if writing.is_positive(case)]
    assert len(good) > 20
    assert len(ENCODE) - len(good) > 15
    assert not any(case.entry_level for case in ENCODE)


@pytest.mark.parametrize("name", FAULTS)
def test_a_writer_with_a_fault_fails(tmp_path: Path, name: str) -> None:
    case, body, kind, expected = FAULTS[name]
    command = wrapper(tmp_path, AROUND.format(body=body))
    (result,) = run_cases(command, [chosen(case)]).cases
    assert result.status == kind
    assert expected in result.problems[0].expected


def test_a_reader_skips_what_writers_do(fake: Callable[..., list[str]]) -> None:
    found = run_cases(fake("return 1"), ENCODE)
    assert {case.status for case in found.cases} == {"skipped"}
    assert "not declared: encode:exact/stored" in {case.reason for case in found.cases}


def encode_case(root: Path, **changes: Any) -> Path:
    """A copy of the smallest encode case with other members; its folder."""
    case = chosen("one-value")
    value = json.loads((case.folder / "case.json").read_text())
    folder = root / value["level"] / value["id"]
    folder.mkdir(parents=True)
    for name in ("README.md", "spec.json", *case.files):
        (folder / name).write_bytes((case.folder / name).read_bytes())
    (folder / "case.json").write_text(json.dumps({**value, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"requires": ["codec:stored"]}, "no track that a writer must declare"),
        ({"files": []}, "not listed"),
        ({"operations": [{"call": "encode", "expect": {"verdict": "ok"}}]}, "nothing of the file"),
        (
            {
                "operations": [
                    {"call": "encode", "expect": {"verdict": "usage", "codes": ["input.shape"]}},
                    {"call": "verify", "expect": {"verdict": "ok"}},
                ]
            },
            "beside another call",
        ),
    ],
)
def test_check_cases(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    encode_case(tmp_path, **changes)
    assert problem in "\n".join(check.check_cases(tmp_path))


def test_check_cases_looks_at_spec(tmp_path: Path) -> None:
    folder = encode_case(tmp_path)
    assert check.check_cases(tmp_path) == []
    spec = json.loads((folder / "spec.json").read_text())
    spec["groups"][0]["file"] = "other.bin"
    (folder / "spec.json").write_text(json.dumps(spec))
    assert "names ['other.bin']" in "\n".join(check.check_cases(tmp_path))
    del spec["salt"]
    (folder / "spec.json").write_text(json.dumps(spec))
    assert "'salt' is a required property" in "\n".join(check.check_cases(tmp_path))
    (folder / "spec.json").write_text("{")
    assert "spec.json is not JSON" in "\n".join(check.check_cases(tmp_path))


# --- what is not declared ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codecs", "wanted", "met"),
    [
        (["stored"], "lacks:zstd", True),
        (["stored", "zstd"], "lacks:zstd", False),
        (["stored", "zstd"], "codec:zstd", True),
        (["stored", "x"], "lacks:x", False),
        (["stored"], "encode:exact/stored", True),
        (["stored"], "encode:exact/zstd", False),
        (["stored"], "feature:transform-klt", True),
        (["stored"], "feature:other", False),
    ],
)
def test_needs(codecs: list[str], wanted: str, met: bool) -> None:
    info = {"codecs": codecs, "encode": ["exact/stored"], "features": ["transform-klt"]}
    assert (wanted in needs.declared(info)) == met


def test_reasons_for_skipping() -> None:
    assert needs.reason(["lacks:zstd", "codec:hevc"]) == "not declared: codec:hevc"
    assert needs.reason(["lacks:zstd"]) == "only for readers without zstd"
    assert needs.entry_level(["codec:stored", "lacks:hevc"])
    assert not needs.entry_level(["encode:exact/stored"])


def limited(monkeypatch: pytest.MonkeyPatch, codecs: str) -> list[str]:
    monkeypatch.setenv("KVCONFORM_CODECS", codecs)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return REFERENCE


def test_the_reference_with_stored_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    command = limited(monkeypatch, "stored")
    assert runner.ask_info(command)["codecs"] == ["stored"]
    found = run_cases(command, LACKS)
    assert statuses(found) == dict.fromkeys((case.id for case in LACKS), "passed")
    assert found.good
    wanted = [case for case in CASES if case.entry_level and len(case.operations[0].variants) == 1]
    found = run_cases(command, [case for case in wanted if case.level in ("core", "uncommon")])
    assert set(statuses(found).values()) == {"passed"}


def test_with_zstd_only_hevc_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    found = statuses(run_cases(limited(monkeypatch, "stored,zstd"), LACKS))
    assert {name: found[name] for name in found if "hevc" in name} == {
        name: "passed" for name in found if "hevc" in name
    }
    assert {found[name] for name in found if "zstd" in name} == {"skipped"}


def test_a_reader_with_all_codecs_skips_them() -> None:
    assert set(statuses(run_cases(REFERENCE, LACKS)).values()) == {"skipped"}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('return say("invalid", "segment.payload")', "failed"),
        ('return say("invalid", "manifest.schema")', "failed"),
        ('raise ImportError("zstd")', "crashed"),
        ('return say("unsupported", "codec.unavailable")', "failed"),  # for stored tracks too
    ],
)
def test_a_reader_that_does_not_tell(
    fake: Callable[..., list[str]], body: str, status: str
) -> None:
    command = fake(body)
    path = Path(command[-1])
    path.write_text(path.read_text().replace('["core", "faulty"]', '["uncommon"]'))
    found = run_cases(command, LACKS)
    assert {case.status for case in found.cases} == {status}
