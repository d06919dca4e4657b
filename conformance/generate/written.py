"""What the reference writes for ``encode``, judged by kvconform and read by two readers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from conformance.adapters import reference as adapter
from conformance.generate import packages  # noqa: F401 - makes kvconform importable
from tests.reference import reference_restore

# isort: split
from kvconform import cases, judge, writing
from kvconform.process import Ended


def problem_of(operation: dict[str, Any], spec: bytes, files: Mapping[str, bytes]) -> str:
    """What is wrong with the answer of the reference; empty if it is what the case wants."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, data in {"spec.json": spec, **files}.items():
            (folder / file).write_bytes(data)
        value = {
            "id": "enc-0000-now",
            "level": "core",
            "requirements": [],
            "requires": [],
            "input": "spec.json",
            "files": sorted(files),
            "operations": [operation],
        }
        case = cases.parse(value, folder)
        work = folder / "work"
        work.mkdir()
        (asked,) = case.operations
        _, problem, written = writing.write(_ask, case, asked, work, batch=True)
        if written is not None:
            reading = writing.read_back(_ask, written, work, batch=True)
            problem = next(iter(reading.problems.values()), None)
        if problem is not None:
            return f"expected {problem.expected}, found {problem.found} ({problem.detail})"
        return "" if written is None else _second_reader(written.data, operation["expect"])


def _ask(arguments: list[str]) -> Ended:
    found, code = adapter.answer(arguments, batch=True)
    if found["verdict"] == "invalid" and not found["where"]:
        raise AssertionError(f"no place: {found}")
    line = json.dumps({**found, "exit": code}).encode()
    return Ended(0, line, "", 0.0, 0.0)


def _second_reader(data: bytes, expect: dict[str, Any]) -> str:
    """Exact groups restore the source, tracks of one quality equal bytes."""
    text = data[128 : 128 + int.from_bytes(data[56:64], "little")]
    manifest = json.loads(text)
    restored = reference_restore(data)
    first: dict[tuple[str, str], bytes] = {}
    for track in manifest["tracks"]:
        quality = next(q for q in manifest["qualities"] if q["name"] == track["quality"])
        for group, encoding in zip(manifest["groups"], quality["encodings"], strict=True):
            name = group["name"]
            found = restored[track["name"]][name].tobytes()
            wanted = expect["encoded"]["digests"][name]
            if encoding == "exact" and blake3(found).hexdigest() != wanted:
                return f"the second reader finds another {name} in {track['name']}"
            if first.setdefault((quality["name"], name), found) != found:
                return f"for the second reader {name} differs in {track['name']}"
    if blake3(judge.canonical(manifest)).digest() != blake3(text).digest():
        return "the manifest is not canonical"
    return ""
