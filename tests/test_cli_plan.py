"""``kvformat plan``: units, values against the formula, break-even, marks, refusals, the plot."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvformat
from kvformat.cli import plan_plot
from kvformat.cli.plan import LINK_UNITS, TIME_UNITS, amount
from kvformat.cli.plan_show import bandwidth, size, within
from kvformat.costs import Candidate, CodecRate, Link, Rates, Work
from kvformat.plans import (
    MEASURED_BITS,
    PRESETS,
    Option,
    faster_where,
    needed,
    planned_cache,
    stored_cache,
    winners,
)
from kvformat.rates import BUILT_IN, VARIABLE, save_rates
from kvformat.workers import cores
from tests.test_cli_common import MODEL, Files, build, refused, run

BASE = ("plan", "--preset", "llama-3.1-8b", "--tokens", "32768", "--link", "10Gbit")
README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return build(tmp_path_factory.mktemp("plan"))


@pytest.fixture(autouse=True)
def no_rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Rates that are measured are in this file, or nowhere."""
    path = tmp_path / "measured.json"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def planned(*arguments: object) -> dict[str, Any]:
    result = run(*BASE, *arguments, "--json")
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def option(value: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(item for item in value["options"] if item["name"] == name)
    return found


# What is planned for


@pytest.mark.parametrize(
    ("name", "values_per_token"),
    [
        ("llama-3.1-8b", 2 * 32 * 8 * 128),
        ("llama-3.1-70b", 2 * 80 * 8 * 128),
        ("qwen3-8b", 2 * 36 * 8 * 128),
        ("smollm2-135m", 2 * 30 * 3 * 64),
        ("deepseek-v3-mla", 61 * (512 + 64)),
    ],
)
def test_presets_hold_the_published_shapes(name: str, values_per_token: int) -> None:
    cache = planned_cache(PRESETS[name], 1000)
    assert cache.values == 1000 * values_per_token
    assert cache.blocks == 4  # of up to 256 tokens, as the writer cuts them


def test_every_preset_is_tried() -> None:
    assert set(PRESETS) == {
        "llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "smollm2-135m", "deepseek-v3-mla",
    }  # fmt: skip


def test_segments_are_those_of_the_writer(tmp_path: Path) -> None:
    cache = np.random.default_rng(0).normal(size=(2, 30, 300, 3, 64)).astype(np.float16)
    identity = kvformat.Identity(kvformat.Model("m"), 30, "float16", kind="unbound")
    report = kvformat.write(tmp_path / "a.kvf", cache, identity=identity, tracks="stored")
    mine = planned_cache(PRESETS["smollm2-135m"], 300)
    assert sum(mine.segments(index) for index in range(2)) == report.manifest.tracks[0].segments
    assert mine.values == report.values


@pytest.mark.parametrize("name", MEASURED_BITS)
def test_bits_per_value_are_those_of_the_readme(name: str) -> None:
    quality, codec = name.split("/")
    if quality == "small":
        assert f"`small` {MEASURED_BITS[name]} bits" in README
        return
    row = next(line for line in README.splitlines() if line.startswith(f"| `{quality}/{codec}`"))
    assert float(row.split("|")[2]) == MEASURED_BITS[name]


# The numbers


def test_times_follow_the_formula() -> None:
    value = planned("--workers", "4", "--prefill", "8000", "--rtt", "2ms")
    values = 32768 * 65536
    assert (value["tokens"], value["values"], value["workers"]) == (32768, values, 4)
    assert value["link"] == {"bytes_per_s": 1.25e9, "round_trip_s": 0.002, "connections": 1}
    raw = option(value, "raw fp16")
    assert raw["stored_bytes"] == 2 * values
    assert raw["total_s"] == pytest.approx(0.002 + 2 * values / 1.25e9)
    assert option(value, "raw fp8")["stored_bytes"] == values
    assert option(value, "recompute")["total_s"] == pytest.approx(32768 / 8000)
    found = option(value, "near-lossless/zstd")
    rate = BUILT_IN.get("zstd")
    assert rate is not None
    segments = 32 * 2 * 11  # of 1,024 tokens and up to three layers, for keys and for values
    assert found["stored_bytes"] == math.ceil(4.13 * values / 8)
    assert found["transfer_s"] == pytest.approx(found["stored_bytes"] / 1.25e9 + 3 * 0.002)
    decode_s = (segments * rate.segment_s + values / rate.decode_values_per_s) / 4
    assert found["decode_s"] == pytest.approx(decode_s)
    assert found["restore_s"] == pytest.approx(values / rate.restore_values_per_s / 4)
    work_s = found["decode_s"] + found["restore_s"]
    arrival_s = 3 * 0.002 + found["stored_bytes"] / 1.25e9 / 32
    assert found["total_s"] == pytest.approx(arrival_s + work_s)
    assert found["first_block_s"] == pytest.approx(arrival_s + work_s / 32)


def test_what_is_needed_keeps_up_and_one_less_does_not() -> None:
    for item in planned("--video-engines", "3", "--engine-rate", "5e8")["options"]:
        count = item["needed"]
        if not item["decode_s"]:
            assert count == 0
            continue
        flag = "--video-engines" if item["engines"] else "--workers"
        times = {}
        for number in (count - 1, count):
            rate = ("--engine-rate", "5e8")
            engines = () if flag == "--video-engines" else ("--video-engines", "3")
            again = planned(flag, number, *engines, *rate)["options"]
            twin = next(
                x
                for x in again
                if x["quality"] == item["quality"]
                and x["name"].split(" on ")[0] == item["name"].split(" on ")[0]
                and bool(x["engines"]) == bool(item["engines"])
            )
            times[number] = twin["decode_s"] + twin["restore_s"] <= twin["transfer_s"]
        assert times == {count - 1: False, count: True}


def test_no_number_of_cores_may_do() -> None:
    rates = Rates((CodecRate("zstd", 1e6, math.inf, 0, 2, 1.0),))  # the second worker adds nothing
    slow = Option("t", "q", Candidate("t", "q", 1, (Work("zstd", 10**9, 10**6),)), 4.0)
    assert needed(slow, Link(1e9), rates) is None
    assert needed(slow, Link(1e-12), rates) == 1


def test_engines_are_an_option_of_their_own() -> None:
    value = planned("--video-engines", "7", "--engine-rate", "1e9")
    names = [item["name"] for item in value["options"]]
    at = names.index("near-lossless/hevc")
    assert names[at + 1] == "near-lossless/hevc on 7 video engines"
    assert not any(name.startswith("near-lossless/zstd on") for name in names)
    found = value["options"][at + 1]
    assert found["decode_s"] == pytest.approx(value["values"] / 7e9)
    assert (found["restore_s"], found["origin"]) == (0, "entered")


def test_an_entered_rate_is_used() -> None:
    value = planned("--rate", "zstd=1e12", "--rate", "hevc=50e6", "--workers", "1")
    found = option(value, "near-lossless/hevc")
    assert found["decode_s"] == pytest.approx(value["values"] / 50e6)
    assert found["origin"] == "entered"
    assert option(value, "exact/zstd")["origin"] == "assumed"
    text = run(*BASE, "--rate", "hevc=50e6").stdout
    assert "hevc: 50,000,000 values/s by one worker, entered" in text


# What is marked


def measured(workers: int = 4) -> Rates:
    return Rates(
        tuple(
            CodecRate(item.name, 1e9, 1e9, 1e-4, workers, 2.0, "measured")
            for item in BUILT_IN.entries
        )
    )


def test_only_what_was_measured_here_is_not_marked(no_rates: Path) -> None:
    def marked(name: str, *arguments: object) -> set[str]:
        return set(option(planned("--workers", "4", *arguments), name)["modelled"])

    times, work = {"total_s", "first_block_s", "transfer_s"}, {"decode_s", "restore_s"}
    table = {"stored_bytes", "bits_per_value", "needed"}
    assert marked("near-lossless/zstd") == times | work | table
    save_rates(measured(), no_rates)
    assert marked("near-lossless/zstd") == times | table
    assert marked("exact/zstd") == times | table
    assert marked("balanced/zstd") == times | work | table  # measured in another quality
    assert marked("near-lossless/zstd", "--workers", "5") == times | work | table
    assert marked("near-lossless/zstd", "--rate", "zstd=1e9") == times | work | table
    assert marked("raw fp16") == times
    assert marked("recompute", "--prefill", "1") == times - {"transfer_s"}


def test_marks_are_shown(no_rates: Path) -> None:
    save_rates(measured(), no_rates)
    text = run(*BASE, "--workers", "4", "--prefill", "8000").stdout
    row = next(line.split("  ") for line in text.splitlines() if "near-lossless/zstd " in line)
    cells = [cell.strip() for cell in row if cell.strip()]
    assert [cell.startswith("~") for cell in cells] == [
        False, True, True, False, False, True, True, True,
    ]  # fmt: skip
    assert "~           modelled, not measured here" in text
    assert "SmolLM2-135M" in text
    assert f"measuredonthismachine({no_rates})" in "".join(text.split())


def test_rates_of_another_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_rates(measured(), tmp_path / "here.json")
    here = planned("--device", path, "--workers", "4")
    assert here["rates"]["source"] == f"measured on this machine ({path})"
    assert option(here, "near-lossless/zstd")["origin"] == "measured"
    monkeypatch.setattr("kvformat.rates.cores", lambda: 999)
    there = planned("--device", path, "--workers", "4")
    assert there["rates"]["source"] == f"measured on another machine ({path})"
    assert option(there, "near-lossless/zstd")["origin"] == "entered"
    path.write_text("{}")
    refused(64, "usage.argument", *BASE, "--device", path)
    refused(74, "io.not-found", *BASE, "--device", tmp_path / "none")


# From an artifact


def test_an_artifact_gives_its_own_bits(files: Files) -> None:
    result = run("plan", "--from", files.bound, "--link", "1GB", "--json")
    value = json.loads(result.stdout)
    with kvformat.open(files.bound) as artifact:
        manifest = artifact.manifest
    assert value["values"] == files.kv.size
    assert value["artifact"] == str(files.bound)
    tracks = [item for item in value["options"] if "/" in item["name"]]
    assert [item["name"] for item in tracks] == [track.name for track in manifest.tracks]
    for item, track in zip(tracks, manifest.tracks, strict=True):
        quality = manifest.quality(track.quality)
        held = sum(x.data_stop - x.data_start + x.table_bytes for x in (track, quality))
        assert item["stored_bytes"] == pytest.approx(held, abs=1)
        assert "stored_bytes" not in item["modelled"]
    text = run("plan", "--from", files.bound, "--link", "1GB").stdout
    assert f"{MODEL}, as in {files.bound}" in text.replace("\n", "")
    assert "those of the artifact\n" in text


def test_an_artifact_for_another_length(files: Files) -> None:
    arguments = ("plan", "--from", files.bound, "--link", "1GB", "--tokens", "3000")
    value = json.loads(run(*arguments, "--json").stdout)
    assert value["values"] == 10 * files.kv.size
    assert all("stored_bytes" in x["modelled"] for x in value["options"] if "/" in x["name"])
    assert "which has another length" in run(*arguments).stdout


def test_windows_say_nothing_about_other_lengths(files: Files) -> None:
    arguments = ("plan", "--from", files.window, "--link", "1GB", "--quality")
    assert run(*arguments, "near-lossless").exit_code == 0
    refused(64, "usage.argument", *arguments, "near-lossless", "--tokens", "7")
    with kvformat.open(files.window) as artifact:
        manifest = artifact.manifest
    assert stored_cache(manifest, manifest.tokens.count).tokens == 40


# Break-even


@given(st.floats(1e4, 1e13), st.floats(1e-6, 1e3), st.floats(1.01, 10))
def test_break_even_of_two_straight_lines(edge: float, fixed_s: float, ratio: float) -> None:
    # mine = fixed + bytes/x, other = ratio * bytes/x: equal at x = (ratio - 1) * bytes / fixed
    moved = edge * fixed_s / (ratio - 1)

    def mine(x: float) -> float:
        return fixed_s + moved / x

    def other(x: float) -> float:
        return ratio * moved / x

    assert faster_where(mine, other) == [(None, pytest.approx(edge))]
    assert faster_where(other, mine) == [(pytest.approx(edge), None)]
    assert faster_where(mine, mine) == []
    assert faster_where(mine, lambda x: mine(x) + 1) == [(None, None)]
    assert faster_where(lambda x: abs(math.log(x / 1e9)), lambda _: 1.0) == [
        (pytest.approx(1e9 / math.e), pytest.approx(1e9 * math.e))
    ]


def test_the_areas_are_adjacent_and_right() -> None:
    value = planned("--prefill", "8000", "--workers", "8")
    areas = value["fastest"]
    assert areas[0]["bytes_per_s"][0] is None
    assert areas[-1]["bytes_per_s"][1] is None
    for one, two in pairwise(areas):
        assert one["bytes_per_s"][1] == two["bytes_per_s"][0]
        assert one["option"] != two["option"]
        edge = one["bytes_per_s"][1]
        for factor, name in ((0.99, one["option"]), (1.01, two["option"])):
            link = f"{edge * factor * 8 / 1e6:.12g}Mbit"
            again = planned("--prefill", "8000", "--workers", "8", "--link", link)
            alike = [x for x in again["options"] if x["quality"] in (x["name"], "near-lossless")]
            assert min(alike, key=lambda x: x["total_s"])["name"] == name
    assert {item["option"] for item in areas} == {"recompute", "near-lossless/zstd", "raw fp8"}


def test_a_narrow_area_is_found() -> None:
    # c wins between the lines of a and b only in a sliver, inside one step of the grid
    rates = Rates((CodecRate("b", 1.0, math.inf), CodecRate("c", 2.0001, math.inf)))

    def one(name: str, size_bytes: int, work: tuple[Work, ...], fixed: float | None) -> Option:
        return Option(name, name, Candidate(name, name, size_bytes, work), None, fixed_s=fixed)

    options = [
        one("a", 0, (), 1.5),
        one("b", 10**9, (), None),
        one("c", 10**9 - 10**3, (), None),
    ]
    found = [item.name for item, _ in winners(options, Link(1), rates, 1)]
    assert found == ["a", "c"]


def test_break_even_is_told_per_pair() -> None:
    value = planned("--prefill", "8000", "--workers", "2")
    pairs = {(x["track"], x["against"]): x["faster_bytes_per_s"] for x in value["break_even"]}
    assert len(pairs) == len(MEASURED_BITS) * 3
    assert pairs["near-lossless/hevc", "recompute"] == []
    ((low, high),) = pairs["near-lossless/zstd", "raw fp8"]
    assert low is None
    text = run(*BASE, "--prefill", "8000", "--workers", "2").stdout
    assert f"~below {bandwidth(high)}" in text
    assert "~never" in text


# Units and words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10Gbit", 1.25e9),
        ("10 Gbit/s", 1.25e9),
        ("10Gbitps", 1.25e9),
        ("800Mbit", 1e8),
        ("1.5GB", 1.5e9),
        ("64kbit", 8e3),
        ("1GiB/s", 2**30),
        ("2TB", 2e12),
        ("1e3MB", 1e9),
    ],
)
def test_bandwidths_are_understood(text: str, expected: float) -> None:
    parse = amount(LINK_UNITS, "10Gbit")
    assert parse(click.Context(click.Command("x")), click.Option(["--x"]), text) == expected


@pytest.mark.parametrize(
    "text",
    ["10", "10Gb", "10gbit", "-1Gbit", "0Gbit", "Gbit", "1e99Gbit1", "nan", "", "9e99TB" * 9],
)
def test_other_bandwidths_are_refused(text: str) -> None:
    found = refused(64, "usage.argument", *BASE[:-1], text)
    assert "--link" in found.stderr


@pytest.mark.parametrize(
    ("text", "expected"), [("1ms", 1e-3), ("200us", 2e-4), ("0.5s", 0.5), ("0", 0), ("0ms", 0)]
)
def test_times_are_understood(text: str, expected: float) -> None:
    parse = amount(TIME_UNITS, "1ms", zero=True)
    assert parse(click.Context(click.Command("x")), click.Option(["--x"]), text) == pytest.approx(
        expected
    )


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        ((None, None), "always"),
        ((None, 1.25e9), "below 10 Gbit/s"),
        ((1.25e8, None), "above 1 Gbit/s"),
        ((1e3, 2e12), "8 kbit/s to 16 Tbit/s"),
        ((124.9e6, None), "above 999 Mbit/s"),
        ((124.99e6, None), "above 1 Gbit/s"),
    ],
)
def test_bandwidths_are_told(interval: tuple[float | None, float | None], text: str) -> None:
    assert within(interval) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 kB"), (1e6, "1 MB"), (2.345e9, "2.35 GB"), (5e15, "5e+03 TB")]
)
def test_sizes_are_told(size_bytes: float, text: str) -> None:
    assert size(size_bytes) == text


@pytest.mark.parametrize(
    "arguments",
    [
        ("--link", "1GB", "--tokens", "9"),
        ("--link", "1GB", "--tokens", "9", "--layers", "3", "--kv-heads", "2"),
        ("--link", "1GB", "--preset", "qwen3-8b"),
        ("--preset", "qwen3-8b", "--tokens", "9"),
        ("--link", "1GB", "--tokens", "9", "--preset", "qwen3-8b", "--layers", "3"),
        ("--link", "1GB", "--tokens", "9", "--preset", "unknown"),
        ("--link", "1GB", "--tokens", "0", "--preset", "qwen3-8b"),
        ("--link", "1GB", "--tokens", "9", "--preset", "qwen3-8b", "--video-engines", "2"),
        ("--link", "1GB", "--tokens", "9", "--preset", "qwen3-8b", "--engine-rate", "2"),
        ("--link", "1GB", "--tokens", "9", "--preset", "qwen3-8b", "--prefill", "0"),
        ("--link", "1GB", "--tokens", "9", "--preset", "qwen3-8b", "--prefill", "nan"),
        ("--link", "1GB", "--tokens", "9", "--preset", "qwen3-8b", "--engine-rate", "inf",
         "--video-engines", "1"),
        ("--link", "1GB", "--tokens", "9", "--preset", "qwen3-8b", "--rate", "hevc"),
        ("--link", "1GB", "--tokens", "9", "--preset", "qwen3-8b", "--rate", "hevc=0"),
        ("--link", "1GB", "--tokens", "9", "--preset", "qwen3-8b", "--rate", "hevc=inf"),
        ("--link", "1GB", "--tokens", "9", "--preset", "qwen3-8b", "--rate", "av1=1e6"),
        ("--link", "1GB", "--tokens", "9", "--preset", "qwen3-8b", "--quality", "best"),
        ("--link", "1GB", "--tokens", "9", "--preset", "qwen3-8b", "--quality", "raw fp8"),
        ("--link", "1GB", "--tokens", "9", "--preset", "qwen3-8b", "--workers", "0"),
        ("--link", "1GB", "--preset", "qwen3-8b", "--from", "a.kvf"),
        ("--link", "1GB", "--tokens", "9", "--preset", "qwen3-8b", "--plot", "a.pdf"),
        ("--link", "1GB", "--tokens", "9", "--preset", "qwen3-8b", "--plot", "-"),
    ],
)  # fmt: skip
def test_unusable_questions_are_refused(arguments: tuple[str, ...]) -> None:
    assert refused(64, "usage.argument", "plan", *arguments).stdout == ""


def test_a_file_that_is_no_artifact(files: Files) -> None:
    refused(65, "header.magic", "plan", "--from", files.npy, "--link", "1GB")
    refused(74, "io.not-found", "plan", "--from", files.folder / "none.kvf", "--link", "1GB")


def test_geometry_by_hand_is_that_of_the_preset() -> None:
    sizes = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128")
    arguments = ("plan", *sizes, "--tokens", "32768", "--link", "10Gbit", "--json")
    mine, preset = json.loads(run(*arguments).stdout), planned()
    assert (mine.pop("name"), preset.pop("name")) == (
        "32 layers, 8 KV heads of 128",
        "llama-3.1-8b",
    )
    assert mine == preset
    assert mine["workers"] == cores()


@pytest.mark.parametrize("columns", [60, 100, 160])
def test_the_view_fits(columns: int) -> None:
    text = run(
        *BASE, "--prefill", "8000", "--video-engines", "7", "--engine-rate", "5e8", columns=columns
    ).stdout
    assert all(len(line) <= columns for line in text.splitlines())
    assert "\u2026" not in text
    for name in (*MEASURED_BITS, "raw fp16", "raw fp8", "recompute"):
        assert name in text


# The plot


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    result = run(*BASE, "--prefill", "8000", "--plot", path)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, f"The plot is in {path}")
    before = path.read_bytes()
    assert before.startswith(b"\x89PNG\r\n\x1a\n")
    refused(74, "io.exists", *BASE, "--plot", path)
    assert path.read_bytes() == before
    assert run(*BASE, "--plot", path, "--overwrite", "--json").exit_code == 0
    assert path.read_bytes() != before  # another question: without recompute
    assert [item.name for item in tmp_path.iterdir()] == ["plan.png"]


def test_the_plot_shows_the_areas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    real = plan_plot.areas

    def spy(plan: Any) -> Any:
        seen.append((plan, real(plan)))
        return seen[-1][1]

    monkeypatch.setattr(plan_plot, "areas", spy)
    run(*BASE, "--prefill", "8000", "--workers", "8", "--plot", tmp_path / "a.png")
    plan, (columns, rows, index) = seen[0]
    assert 8 in rows
    told = [
        next(
            item.name for item, (low, high) in plan.areas() if (low or 0) <= x < (high or math.inf)
        )
        for x in columns
    ]
    drawn = [plan.compared[number].name for number in index[list(rows).index(8)]]
    assert drawn == told
    assert len(set(drawn)) == 3


def test_colours_differ() -> None:
    names = [*plan_plot.TRACK_COLOURS, *plan_plot.OTHER_COLOURS.values()]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"#[0-9A-F]{6}", name) for name in names)
    for name in names:
        red, green, blue = (int(name[at : at + 2], 16) / 255 for at in (1, 3, 5))
        luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
        assert (luminance + 0.05) / 0.05 > 7  # the contrast of black text that WCAG calls AAA


def test_without_matplotlib_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plan_plot, "find_spec", lambda _: None)
    found = refused(64, "usage.argument", *BASE, "--plot", tmp_path / "a.png")
    assert "pip install 'kvformat[plot]'" in found.stderr
    assert not list(tmp_path.iterdir())
