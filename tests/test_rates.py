"""Measuring this machine, the rates file, and what is done with a bad one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvformat
from kvformat import rates as module
from kvformat.cli import doctor
from kvformat.costs import Candidate, CodecRate, Link, Rates, Work, estimate
from kvformat.errors import StorageError, UsageError
from kvformat.rates import (
    BUILT_IN,
    TRACKS,
    VARIABLE,
    Sample,
    correlated_cache,
    fit,
    host_facts,
    load_rates,
    measure,
    parse_rates,
    rates_path,
    read_rates_file,
    save_rates,
    to_bytes,
)
from kvformat.workers import cores
from tests.test_cli_common import refused, run

NAMES = ("zstd", "hevc", "stored", "exact/zstd", "exact/stored")
MEASURED = Rates(
    tuple(CodecRate(name, 1e8 + i, 2e8, 1e-4, 2, 1.5, "measured") for i, name in enumerate(NAMES))
)
TINY = (2, 3, 128, 2, 32)
ASSUMED = tuple(replace(item, workers=cores(), speedup=cores()) for item in BUILT_IN.entries)


def one_second() -> Callable[[], float]:
    """A clock that goes on by a second whenever it is read."""
    ticks = iter(range(10**6))
    return lambda: float(next(ticks))


def test_every_codec_is_measured() -> None:
    seen: list[tuple[int, int]] = []
    found = measure(
        shape=TINY, clock=one_second(), progress=lambda done, total: seen.append((done, total))
    )
    values = math.prod(TINY)
    assert {item.name for item in found.entries} == set(NAMES)
    for item in found.entries:
        # Every job takes one second on this clock, so nothing is left for a fixed cost.
        assert item.segment_s == 0
        assert item.decode_values_per_s == pytest.approx(values / 0.1)
        assert item.restore_values_per_s == pytest.approx(values / 0.9)
        assert (item.workers, item.speedup, item.origin) == (cores(), 1.0, "measured")
    assert seen == [(done, len(TRACKS)) for done in range(len(TRACKS) + 1)]


def test_the_clock_bounds_the_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(module, "REPEATS", 5)
    jobs = (lambda: calls.append("a"), lambda: calls.append("b"))
    assert module._fastest(jobs, math.inf, one_second()) == (1.0, 1.0)
    assert calls == ["a", "b"] * 5
    calls.clear()
    module._fastest(jobs, 0, one_second())
    assert calls == ["a", "b"] * 2


def test_the_fastest_time_counts() -> None:
    times = iter([0.0, 10, 15, 20, 23, 30, 31, 50.0, 60, 64])
    found = module._fastest((lambda: None,), 35, lambda: next(times))
    assert found == (3.0,)  # 10 to 15 and 20 would be read as the budget


@given(
    st.floats(1e-10, 1e-6),
    st.floats(0, 0.5),
    st.floats(0, 1e-2),
    st.integers(1, 100),
    st.integers(2, 100),
)
def test_a_fit_finds_the_rate_that_made_the_samples(
    value_s: float, part: float, fixed_s: float, segments: int, times: int
) -> None:
    values = 10**6
    read = [count * fixed_s + values * value_s for count in (segments, segments * times)]
    fixed_s = min(fixed_s, 0.9 * read[0] / segments)
    found = fit(
        "near-lossless/zstd",
        Sample(values, segments, read[0]),
        Sample(values, segments * times, read[1]),
        restore_s=part * values * value_s + 1e-12,
        workers=4,
        speedup=3,
    )
    seconds = found.segment_s * segments + values / found.values_per_s
    assert seconds == pytest.approx(read[0])
    assert found.segment_s == pytest.approx(fixed_s, abs=1e-6 * read[1] / segments)
    assert (found.name, found.workers, found.speedup) == ("zstd", 4, 3)


@pytest.mark.parametrize(
    ("coarse_s", "fine_s", "restore_s", "segment_s"),
    [
        (1.0, 0.5, 0.1, 0.0),  # more segments, yet faster: noise
        (1.0, 100.0, 0.1, 0.9),  # more than all of the coarse read: bounded
        (1.0, 1.0, 5.0, 0.0),  # restoring alone slower than decoding and restoring: noise
    ],
)
def test_noise_gives_a_usable_rate(
    coarse_s: float, fine_s: float, restore_s: float, segment_s: float
) -> None:
    samples = Sample(1000, 1, coarse_s), Sample(1000, 10, fine_s)
    found = fit("exact/zstd", *samples, restore_s=restore_s, workers=2, speedup=0.3)
    assert found.segment_s == pytest.approx(segment_s)
    assert 0 < found.decode_values_per_s < math.inf
    assert 0 < found.restore_values_per_s < math.inf
    assert (found.name, found.speedup) == ("exact/zstd", 1.0)


def test_the_cache_of_the_measurement_is_like_a_real_one(tmp_path: Path) -> None:
    cache = correlated_cache((2, 3, 512, 2, 64))
    assert (cache.dtype, cache.shape) == (np.float16, (2, 3, 512, 2, 64))
    assert np.array_equal(cache, correlated_cache(cache.shape))
    x = cache.astype(np.float64) - cache.mean(axis=2, keepdims=True, dtype=np.float64)
    neighbours = (x[:, :, 1:] * x[:, :, :-1]).mean() / (x**2).mean()
    assert 0.4 < neighbours < 0.6
    identity = kvformat.Identity(kvformat.Model("m"), 3, "float16", kind="unbound")
    report = kvformat.write(tmp_path / "a.kvf", cache, identity=identity, tracks="zstd")
    assert 3.2 < report.bits_per_value < 4.5  # 3.9 of a real cache


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({VARIABLE: "/a/b.json", "XDG_CACHE_HOME": "/c"}, "/a/b.json"),
        ({VARIABLE: "", "XDG_CACHE_HOME": "/c"}, "/c/kvformat/rates.json"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/kvformat/rates.json"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/kvformat/rates.json"),
        ({}, "/home/me/.cache/kvformat/rates.json"),
    ],
)
def test_where_rates_are_kept(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert rates_path(environment) == Path(expected)


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", none)
    for name in (VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert rates_path() is None
    assert load_rates().entries == ASSUMED
    assert "no directory" in load_rates().source
    with pytest.raises(StorageError) as caught:
        save_rates(MEASURED)
    assert caught.value.code == "io.not-found"


def test_what_is_saved_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "folder" / "rates.json"
    monkeypatch.setenv(VARIABLE, str(path))
    assert save_rates(MEASURED) == path
    found = load_rates()
    assert {item.name: item for item in found.entries} == {
        item.name: item for item in MEASURED.entries
    }
    assert found.source == f"measured on this machine ({path})"
    save_rates(Rates(MEASURED.entries[:1]))
    origins = {item.name: item.origin for item in load_rates().entries}
    assert origins == {**dict.fromkeys(NAMES, "assumed"), "zstd": "measured"}
    assert [item.name for item in path.parent.iterdir()] == ["rates.json"]


def test_a_file_names_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "secret-host")
    content = to_bytes(MEASURED, host_facts())
    assert b"secret-host" not in content
    value = json.loads(content)
    assert set(value["host"]) == {"cores", "cpu", "machine", "packages", "system"}
    assert parse_rates(content).entries == MEASURED.entries
    assert parse_rates(content).foreign(host_facts()) is None


def test_a_write_that_fails_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_rates(MEASURED, tmp_path / "rates.json")
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        del descriptor
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError) as caught:
        save_rates(Rates(MEASURED.entries[:1]), path)
    assert caught.value.code == "io.write"
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["rates.json"]
    with pytest.raises(StorageError):
        save_rates(MEASURED, path / "below-a-file" / "rates.json")
    with pytest.raises(StorageError) as caught:
        save_rates(MEASURED, path / "rates.json")
    assert caught.value.code == "io.write"
    assert VARIABLE in caught.value.next_step


def changed(**members: Any) -> bytes:
    value = json.loads(to_bytes(MEASURED, host_facts()))
    return json.dumps(value | members).encode()


def entry(**members: Any) -> bytes:
    value = json.loads(to_bytes(MEASURED, host_facts()))
    value["rates"][0] |= members
    return json.dumps(value).encode()


BAD = {
    "empty": (b"", "no JSON"),
    "binary": (b"\xff\x00\xfe", "no JSON"),
    "half": (changed()[:200], "no JSON"),
    "deep": (b"[" * 60_000, "no JSON"),
    "list": (b"[1]", "no schema"),
    "other schema": (changed(schema="other"), "no schema"),
    "newer": (changed(version=2), "version 2, not 1"),
    "no host": (changed(host=None), "missing"),
    "no rates": (changed(rates=[]), "missing"),
    "rate is a list": (changed(rates=[[1]]), "other members"),
    "more members": (entry(more=1), "other members"),
    "twice": (entry(name="hevc"), "entries cannot be used"),
    "not a number": (changed(rates=math.nan), "no JSON"),
    "infinite": (entry(speedup=math.inf), "no JSON"),
    "text": (entry(speedup="1"), "no number"),
    "truth": (entry(speedup=True), "no number"),
    "half a worker": (entry(workers=1.5), "no number"),
    "no worker": (entry(workers=0), "workers cannot be used"),
    "no rate": (entry(decode_values_per_s=0), "decode_values_per_s cannot be used"),
    "negative": (entry(segment_s=-1), "out of range"),
    "huge": (entry(restore_values_per_s=1e300), "out of range"),
    "no name": (entry(name=None), "no text"),
    "control": (entry(name="\x1b[2J"), "no text"),
    "too large": (b" " * 70_000, "too large"),
    "other cores": (changed(host=host_facts() | {"cores": 999}), "cores: 999 there"),
    "other packages": (changed(host=host_facts() | {"packages": {}}), "packages: {} there"),
    "more facts": (changed(host=host_facts() | {"gpu": "x"}), 'gpu: "x" there, null here'),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_ignored_with_a_reason(tmp_path: Path, name: str) -> None:
    data, reason = BAD[name]
    path = tmp_path / "rates.json"
    path.write_bytes(data)
    found = load_rates(path)
    assert found.entries == ASSUMED
    assert found.source.startswith(BUILT_IN.source)
    assert reason in found.source
    assert "\x1b" not in found.source
    if "there" not in reason:
        with pytest.raises(UsageError):
            read_rates_file(path)


def test_no_file_and_no_file_at_all(tmp_path: Path) -> None:
    assert "nothing is measured here yet" in load_rates(tmp_path / "none.json").source
    assert load_rates(tmp_path).entries == ASSUMED
    assert str(tmp_path) in load_rates(tmp_path).source


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    ).map(lambda x: json.dumps(x).encode())
)
def test_any_bytes_are_rates_or_refused(data: bytes) -> None:
    with pytest.raises(UsageError):
        parse_rates(data)


README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "track"),
    [
        ("hevc", "near-lossless/hevc"),
        ("zstd", "near-lossless/zstd"),
        ("exact/zstd", "exact/zstd"),
        ("exact/stored", "exact/stored"),
    ],
)
def test_the_built_in_rates_are_the_lower_ones_of_the_readme(name: str, track: str) -> None:
    row = next(line for line in README.splitlines() if line.startswith(f"| `{track}`"))
    slowest = min(float(text) for text in row.split("|")[4].strip().split("-"))
    rate = BUILT_IN.get(name)
    assert rate is not None
    assert rate.values_per_s * rate.faster(2) / 1e6 == pytest.approx(slowest, rel=0.03)
    assert rate.origin == "assumed"
    assert rate.segment_s > 0


def test_assumed_rates_are_for_the_cores_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "cores", lambda: 6)
    for item in load_rates(tmp_path / "none.json").entries:
        assert (item.workers, item.faster(6), item.faster(12)) == (6, 6, 12)
    item = Candidate("t", "q", 0, (Work("zstd", 10**9, 600),))
    rates = load_rates(tmp_path / "none.json")
    alone, together = (estimate(item, Link(1e9), rates, workers=n) for n in (1, None))
    assert alone.decode_s == pytest.approx(6 * together.decode_s)


# kvformat doctor


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where doctor keeps rates; measuring itself is tested above."""
    path = tmp_path / "kept" / "rates.json"
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setattr(doctor, "measure", lambda **_: MEASURED)
    return path


def test_doctor_measures_when_it_is_asked(kept: Path) -> None:
    value = json.loads(run("doctor", "--json").stdout)
    assert {item["origin"] for item in value["rates"]["entries"]} == {"assumed"}
    assert not kept.exists()
    value = json.loads(run("doctor", "--measure", "--json").stdout)
    assert {item["origin"] for item in value["rates"]["entries"]} == {"measured"}
    assert value["rates"]["source"].endswith(f"written to {kept}")
    assert parse_rates(kept.read_bytes()).entries == MEASURED.entries
    value = json.loads(run("doctor", "--json").stdout)
    assert value["rates"]["source"] == f"measured on this machine ({kept})"


def test_doctor_shows_a_table(kept: Path) -> None:
    lines = run("doctor", "--measure").stdout.splitlines()
    row = next(line for line in lines if line.startswith("  zstd") and "measured" in line)
    assert row.split() == ["zstd", "100", "200", "67", "100", "by", "2", "100", "us", "measured"]
    assert kept.exists()


def test_doctor_does_not_measure_a_broken_codec(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_try_codec", lambda _: "does not work: at all")
    result = run("doctor", "--measure")
    assert (result.exit_code, "[codec.unavailable]" in result.stderr) == (69, True)
    assert not kept.exists()


def test_doctor_says_where_it_cannot_write(kept: Path) -> None:
    kept.parent.write_text("a file in the way")
    found = refused(74, "io.write", "doctor", "--measure")
    assert str(kept) in found.stderr
    assert found.stdout == ""
