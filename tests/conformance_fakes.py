"""Tiny cases and implementations that are wrong in one known way, for tests of kvconform."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from tests.damage import artifact
from tests.reference import cut_up

ROOT = Path(__file__).parent.parent
CONFORMANCE = ROOT / "conformance"
sys.path.append(str(CONFORMANCE))

from kvconform import cases, results  # noqa: E402
from kvconform.runner import Options, Run  # noqa: E402

REFERENCE = [sys.executable, str(CONFORMANCE / "adapters" / "reference.py")]
FILE = artifact(window=True)
CUT = cut_up(FILE)
TRACK = "exact/stored"
INTEGERS = {
    name: [row["integer_digest"].hex() for row in rows] for name, rows in CUT.segments.items()
}
DIGEST = blake3(FILE[128 : 128 + int.from_bytes(FILE[56:64], "little")]).hexdigest()
OK = "cor-0001-valid-file"
BAD = "hdr-0001-wrong-magic"
READ = "par-0001-read-a-part"

FAKE = """
import json, os, sys, time

CODES = {{"ok": 0, "usage": 64, "invalid": 65, "unsupported": 69, "io_error": 74, "mismatch": 76}}
INFO = {{"name": "fake", "version": "1", "formats": ["0.9"], "codecs": ["stored"], "features": [],
        "levels": ["core", "faulty"], "batch": {batch}}}
OK = {{"manifest_digest": "{digest}", "integers": {integers}, "digests": {{}}, "manifest": {{}}}}


def say(verdict, code=None, **more):
    print(json.dumps({{"protocol": 1, "verdict": verdict, "code": code, **more}}), flush=True)
    return CODES[verdict]


def act(args):
{body}


def batch():
    for line in sys.stdin:
        args = json.loads(line)
{batch_body}


if sys.argv[1] == "info":
    sys.exit(say("ok", **INFO))
sys.exit(batch() if sys.argv[1] == "batch" else act(sys.argv[1:]))
"""


@pytest.fixture(name="suite")
def suite_fixture(tmp_path: Path) -> Path:
    """A folder with three tiny cases."""
    root = tmp_path / "cases"
    good = {"verdict": "ok", "manifest_digest": DIGEST, "integers": INTEGERS}
    make_case(root, "core", OK, [{"call": "verify", "expect": good}])
    wrong = {"verdict": "invalid", "codes": ["header.magic"]}
    make_case(
        root, "faulty", BAD, [{"call": "verify", "expect": wrong}], b"X" + FILE[1:], req="HDR-1"
    )
    return root


def make_case(
    root: Path,
    level: str,
    name: str,
    operations: list[dict[str, Any]],
    data: bytes = FILE,
    *,
    req: str = "VER-1",
    **more: Any,
) -> Path:
    folder = root / level / name
    folder.mkdir(parents=True)
    (folder / "input.kvf").write_bytes(data)
    (folder / "README.md").write_text("Why.\n")
    value = {
        "id": name,
        "requirements": [req],
        "level": level,
        "requires": [],
        "input": "input.kvf",
        "operations": operations,
        **more,
    }
    (folder / "case.json").write_text(json.dumps(value))
    return folder


@pytest.fixture(name="fake")
def fake_fixture(tmp_path: Path) -> Callable[..., list[str]]:
    """Writes an implementation whose ``act`` or ``batch`` loop is what the test says."""

    def write(body: str = "    pass", batch_body: str = "") -> list[str]:
        text = FAKE.format(
            digest=DIGEST,
            integers=INTEGERS,
            body="\n".join("    " + line for line in body.splitlines()),
            batch=bool(batch_body),
            batch_body="\n".join("        " + line for line in (batch_body or "pass").splitlines()),
        )
        path = tmp_path / "fake.py"
        path.write_text(text)
        return [sys.executable, "-S", str(path)]

    return write


def run(command: list[str], root: Path, **options: Any) -> results.Results:
    return Run(command, cases.load(root), Options(**options)).run(root)


def statuses(found: results.Results) -> dict[str, str]:
    return {case.id: case.status for case in found.cases}


ALWAYS_OK = 'return say("ok", **OK)'
ALWAYS_INVALID = 'return say("invalid", "header.magic")'
