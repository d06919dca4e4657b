"""``kvconform fuzz``: the reference keeps the laws, wrong readers are caught with a valid case."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conformance_fakes import CONFORMANCE, REFERENCE, run, statuses
from tests.conformance_wrappers import wrapper
from tests.reference import reference_restore

# isort: split
from kvconform.check import check_cases
from kvconform.fuzz import naive
from kvconform.fuzz.compose import Plan, compose
from kvconform.fuzz.hunt import hunt, write_case
from kvconform.fuzz.laws import BREAKERS, STAGES, apply
from kvconform.fuzz.strategies import plans, supported_codecs

FOUND = 120.0

FLIPPED = """
old = it.raw_bytes
def raw_bytes(array):
    data = bytearray(old(array))
    if data:
        data[-1] ^= 1
    return bytes(data)
it.raw_bytes = raw_bytes
"""
LENIENT = """
old = it.answer
def answer(arguments, *, batch=False):
    found, code = old(arguments, batch=batch)
    if arguments[0] == "verify" and found["code"] in ("segment.digest", "set.digest"):
        members = {"manifest_digest": "0" * 64, "integers": {}}
        return {"protocol": 1, "verdict": "ok", "code": None, **members}, 0
    return found, code
it.answer = answer
"""
CRASHING = """
old = it.answer
def answer(arguments, *, batch=False):
    found, code = old(arguments, batch=batch)
    if found["code"] == "table.record":
        raise IndexError("list index out of range")
    return found, code
it.answer = answer
"""
HASTY = """
old = it.answer
def answer(arguments, *, batch=False):
    found, code = old(arguments, batch=batch)
    if found["code"] == "version.unknown":
        return {**found, "verdict": "invalid", "code": "header.field"}, 65
    return found, code
it.answer = answer
"""
SHIFTED = """
old = it.interval
def interval(options, name):
    found = old(options, name)
    if name == "--layers" and found is not None and found[1] - found[0] > 1:
        return found[0], found[1] - 1
    return found
it.interval = interval
"""


@pytest.mark.parametrize(
    ("body", "laws", "kind"),
    [
        (FLIPPED, ("valid-artifact",), "failed"),
        (LENIENT, ("damaged-file", "broken-segment-digest"), "failed"),
        (CRASHING, ("broken-record",), "crashed"),
        (HASTY, ("order-version",), "failed"),
        (SHIFTED, ("valid-artifact",), "failed"),
    ],
    ids=["flips-a-byte", "accepts-damage", "crashes", "wrong-order", "wrong-slice"],
)
def test_a_broken_reader_is_caught(
    tmp_path: Path, body: str, laws: tuple[str, ...], kind: str
) -> None:
    command = wrapper(tmp_path, body)
    found = hunt(command, seconds=FOUND, start=3, shrink_seconds=4.0)
    assert found.failure is not None
    assert found.failure.probe.law.startswith(laws)
    assert found.failure.problem.kind == kind
    out = tmp_path / "out"
    folder = write_case(found.failure, out, found.seed)
    assert {path.name for path in folder.iterdir()} >= {"case.json", "README.md", "input.kvf"}
    assert check_cases(out) == []
    bad, good = run(command, out), run(REFERENCE, out)
    assert statuses(bad) == {folder.name: kind}
    assert statuses(good) == {folder.name: "passed"}


def test_the_reference_keeps_the_laws(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "kvconform", "fuzz", "--seconds", "10", "--out", str(out)]
    done = subprocess.run(
        [*command, "--", *REFERENCE], cwd=CONFORMANCE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "calls in" in done.stdout
    assert not out.exists()


def test_the_command_writes_a_case_and_ends_with_1(tmp_path: Path) -> None:
    entry = wrapper(tmp_path, FLIPPED)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "kvconform", "fuzz", "--seed", "5", "--examples", "400"]
    done = subprocess.run(
        [*command, "--out", str(out), "--", *entry],
        cwd=CONFORMANCE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (case,) = out.glob("*/*/case.json")
    assert str(case.parent.name) in done.stdout
    value = json.loads(case.read_text())
    assert value["operations"][0]["call"] == "decode"
    assert len((case.parent / "input.kvf").read_bytes()) < 3_000  # shrunk
    assert "--seed 5" in (case.parent / "README.md").read_text()


def test_one_seed_asks_the_same() -> None:
    first, second = (hunt(REFERENCE, examples=30, start=9) for _ in range(2))
    assert first.failure is None
    assert (first.probes, first.calls, first.laws) == (second.probes, second.calls, second.laws)


@settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(plans(supported_codecs()).map(lambda plan: compose(plan).build()))
def test_two_naive_readers_agree(file: bytes) -> None:
    """The one of kvconform and the one of these tests share no code."""
    ours, theirs = naive.restore(file).tensors, reference_restore(file)
    assert ours.keys() == theirs.keys()
    for track, groups in ours.items():
        for name, values in groups.items():
            assert values.tobytes() == theirs[track][name].tobytes()


@settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(plans(frozenset({"stored", "zstd"})))
def test_tracks_of_one_quality_restore_the_same(plan: Plan) -> None:
    found = naive.restore(compose(plan).build())
    for quality in found.manifest["qualities"]:
        mine = [t["name"] for t in found.manifest["tracks"] if t["quality"] == quality["name"]]
        for name in mine:
            assert found.digests(name) == found.digests(mine[0])


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_rounding_is_that_of_a_cast(name: str) -> None:
    import ml_dtypes

    kind = np.dtype(np.float16 if name == "float16" else getattr(ml_dtypes, name))
    bits = np.random.default_rng(1).integers(0, 2**32, 20_000, np.uint32)
    x = bits.view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.float32(ml_dtypes.finfo(kind).max)
        x = np.clip(np.where(np.isfinite(x), x, np.float32(0)), -largest, largest)
        wanted = x.astype(kind)
    assert (naive.round_to(x, name).tobytes()) == wanted.tobytes()


def test_the_naive_reader_needs_no_kvformat() -> None:
    code = (
        "import sys; import kvconform.fuzz.hunt, kvconform.fuzz.laws; "
        "sys.exit(any(name.split('.')[0] in ('kvformat', 'tests', 'ml_dtypes')"
        " for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CONFORMANCE, check=False)
    assert done.returncode == 0


@settings(max_examples=1, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_breakers_and_stages_have_names_of_the_registry(data: st.DataObject) -> None:
    from kvconform.protocol import CODES

    known = {code for codes in CODES.values() for code in codes}
    assert {code for _, codes, _ in BREAKERS.values() for code in codes} <= known
    assert {stage.code for stage in STAGES} <= known
    plan = data.draw(plans(frozenset({"stored"})))
    assert all(apply([stage], compose(plan)) != compose(plan).build() for stage in STAGES)
