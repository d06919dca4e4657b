"""Numbers, tables and examples that the specification prints are those of the code."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from kvformat import header, quant, sets, storage, strictjson, tables
from kvformat.codecs import zstd_codec
from kvformat.digests import CHAIN_CONTEXT, DIGEST_BYTES, digest
from kvformat.dtypes import DTYPES
from kvformat.fields import float64_bits
from kvformat.limits import LIMITS
from kvformat.manifest import VERSION_MAJOR, VERSION_MINOR, parse_manifest
from kvformat.sets import QuantisationSet, parse_set
from kvformat.tokens import BLOCK_TOKENS, CONTENT_TOKEN_ID
from kvformat.tracks import SEGMENT_RECORD_BYTES, SET_RECORD_BYTES
from tests.requirements import SPEC, SPEC_TEXT, code_spans, covers, section, table_rows

SCHEMA = json.loads((SPEC.parent / "schema/manifest.schema.json").read_text(encoding="utf-8"))
EXAMPLES = sorted((SPEC / "examples").glob("*.json"))
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def json_blocks() -> list[Any]:
    """Every fenced block with an info string that starts with ``json``, as (info, text)."""
    return [
        pytest.param(info, text, id=f"{page.name}-{number}")
        for page in sorted(SPEC.glob("*.md"))
        for number, (info, text) in enumerate(FENCE.findall(page.read_text(encoding="utf-8")))
        if info.split(",")[0] == "json"
    ]


def check_manifest(value: Any) -> None:
    Draft202012Validator(SCHEMA).validate(value)
    raw = strictjson.serialise(value)
    parsed = parse_manifest(raw)
    assert parsed.to_bytes() == raw


def split_tables(text: str) -> list[list[list[str]]]:
    """The tables of offset, bytes, field and meaning in ``text``, one list of rows each."""
    result: list[list[list[str]]] = []
    for row in table_rows(text):
        if row[0] == "0":
            result.append([])
        result[-1].append(row)
    return result


# --- examples --------------------------------------------------------------------------------


@pytest.mark.parametrize(("info", "text"), json_blocks())
def test_json_blocks(info: str, text: str) -> None:
    value = json.loads(text)
    if info == "json,manifest":
        check_manifest(value)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_manifests(path: Path) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    check_manifest(value)
    assert list(value) == sorted(value)


def test_manifests_show_each_kind() -> None:
    values = [json.loads(path.read_text(encoding="utf-8")) for path in EXAMPLES]
    groups = [group for value in values for group in value["groups"]]
    assert {value["identity"]["kind"] for value in values} == {"tokens", "engine_key", "unbound"}
    assert {group["tokens"]["kind"] for group in groups} == {"all", "window", "state"}
    assert {group["role"] for group in groups} >= {"key", "value", "latent", "indexer", "state"}
    assert {value["segmentation"]["alignment"] for value in values} == {1, 4096}
    assert {value["segmentation"]["order"] for value in values} == {"token-major", "layer-major"}
    assert {value["lineage"]["kind"] for value in values} == {"exact", "lossy"}
    assert any(track["layouts"] for value in values for track in value["tracks"])
    assert any(value["tokens"]["first_position"] for value in values)


def test_links_lead_to_files() -> None:
    for page in sorted(SPEC.rglob("*.md")):
        if page.name.endswith(".template.md"):
            continue
        for link in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (page.parent / link).exists(), (page.name, link)


# --- numbers in the prose --------------------------------------------------------------------


def test_float_bits_in_the_prose() -> None:
    found = re.findall(r"(\d+\.\d+) is `([0-9a-f]{16})`", SPEC_TEXT)
    assert found
    for number, digits in found:
        assert float64_bits(float(number)) == digits
        assert struct.unpack(">d", bytes.fromhex(digits)) == (float(number),)


def prose(pattern: str) -> str:
    """The first group of the only place that matches."""
    found = re.findall(pattern, SPEC_TEXT)
    assert len(found) == 1, (pattern, found)
    return str(found[0])


def plain(text: str) -> int:
    """A number as the text prints it."""
    return int(text.replace(",", ""))


@covers("TOK-1")
def test_constants_of_the_chain() -> None:
    assert prose(r"with context string\n?\s+`([^`]+)`") == CHAIN_CONTEXT
    assert prose(r'"block_tokens": (\d+)') == str(BLOCK_TOKENS)
    assert prose(r"content span MUST be taken as (2\^32 - 1)") == "2^32 - 1"
    assert CONTENT_TOKEN_ID == 2**32 - 1


def test_constants_of_files_and_records() -> None:
    assert plain(prose(r"MUST be the (\d+)-byte output of BLAKE3")) == DIGEST_BYTES
    assert plain(prose(r"A set record has (\d+) bytes")) == SET_RECORD_BYTES
    assert plain(prose(r"a\n?\s*segment record (\d+)\.")) == SEGMENT_RECORD_BYTES
    assert plain(prose(r"one range request of ([\d,]+) bytes")) == storage.PREFETCH_BYTES
    low, high = re.findall(r"header_bytes outside \[(\d+), ([\d,]+)\]", SPEC_TEXT)[0]
    assert plain(low) == header.HEADER_BYTES
    assert plain(high) == header.LARGEST_HEADER_BYTES
    assert plain(prose(r"with a window of at most (\d+) MiB")) * 2**20 == zstd_codec.MAX_WINDOW
    assert tables.NO_SET == 2**32 - 1
    assert tables.NO_LAYOUT == 2**16 - 1


def test_digest_of_an_empty_table() -> None:
    assert digest(b"").hex().startswith("af1349b9")


def test_ranges_of_parameters() -> None:
    powers = [2.0 ** int(text) for text in re.findall(r"2\^(-?\d+)", section("9.2"))]
    assert powers == [*sets.SCALE_RANGE, *sets.BIAS_RANGE]
    assert plain(prose(r"token_scale_count MUST be at most (\d+)")) == LIMITS.token_scales_per_set


@covers("ARI-4")
def test_largest_finite_magnitudes() -> None:
    text = " ".join(section("9.4").split())
    text = text[text.index("The largest finite magnitudes are") :]
    single = re.findall(r"0x([0-9A-F]{8}) as binary32 \(`float32`\)", text)[0]
    brain = re.findall(r"0x([0-9A-F]{4}) as upper half of a binary32 \(`bfloat16`\)", text)[0]
    values = {
        name: plain(re.findall(rf"([\d,]+) \(`{name}`\)", text)[0])
        for name in ("float16", "float8_e4m3fn", "float8_e5m2")
    }
    values["float32"] = struct.unpack(">f", bytes.fromhex(single))[0]
    values["bfloat16"] = struct.unpack(">f", bytes.fromhex(brain + "0000"))[0]
    assert {DTYPES[name]: value for name, value in values.items()} == quant.MAX_FINITE


# --- tables of bytes -------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["4.1", "8.2", "10.3"])
def test_tables_of_bytes_have_no_gap(number: str) -> None:
    for rows in split_tables(section(number).split("\n| radix")[0]):
        end = 0
        for offset, size_bytes, *_ in rows:
            assert int(offset) == end
            end += int(size_bytes)


@covers("HDR-1", "HDR-2", "HDR-3", "CNV-1")
def test_header_table() -> None:
    rows = {row[2]: row for row in table_rows(section("4.1"))}
    digits = code_spans(rows["magic"][3])[0]
    assert bytes.fromhex(digits) == header.MAGIC
    assert int(rows["header_bytes"][3]) == header.HEADER_BYTES
    assert int(rows["version_major"][3]) == VERSION_MAJOR
    assert int(rows["version_minor"][3]) == VERSION_MINOR
    mark = bytes(range(100, 132))
    raw = header.Header(0x1122334455, 0x66778899, 0xAABBCC, mark).to_bytes()
    held = {name: raw[int(row[0]) :][: int(row[1])] for name, row in rows.items()}
    assert sum(map(len, held.values())) == len(raw) == header.HEADER_BYTES
    assert held["magic"] == header.MAGIC
    assert held["version_major"] == VERSION_MAJOR.to_bytes(2, "little")
    assert held["version_minor"] == VERSION_MINOR.to_bytes(2, "little")
    assert held["header_bytes"] == header.HEADER_BYTES.to_bytes(4, "little")
    assert held["file_bytes"] == (0x1122334455).to_bytes(8, "little")
    assert held["manifest_bytes"] == (0x66778899).to_bytes(8, "little")
    assert held["tables_bytes"] == (0xAABBCC).to_bytes(8, "little")
    assert held["manifest_digest"] == mark
    assert held["reserved"] == bytes(24)
    assert held["check"] == digest(raw[:16] + raw[48:])


@covers("CNV-1")
@pytest.mark.parametrize(("index", "dtype"), [(0, tables.SET_DTYPE), (1, tables.SEGMENT_DTYPE)])
def test_record_tables(index: int, dtype: np.dtype[Any]) -> None:
    rows = split_tables(section("8.2"))[index]
    assert dtype.fields is not None
    found = [
        (place, kind.itemsize, name)
        for name, (kind, place, *_) in sorted(dtype.fields.items(), key=lambda item: item[1][1])
    ]
    assert [(int(row[0]), int(row[1]), row[2]) for row in rows] == found
    assert all(kind.str[0] in "<|" for kind, *_ in dtype.fields.values())
    size_bytes = (SET_RECORD_BYTES, SEGMENT_RECORD_BYTES)[index]
    assert dtype.itemsize == size_bytes == found[-1][0] + found[-1][1]


def test_zstd_frame_entry() -> None:
    rows = [row for row in table_rows(section("10.3")) if row[0].isdigit()]
    entry = struct.Struct("<IIBB")
    assert [int(row[1]) for row in rows] == [4, 4, 1, 1]
    assert [row[2] for row in rows] == ["row_count", "frame_bytes", "low", "radix_minus_1"]
    assert plain(prose(r"frame_count entries of (\d+) bytes")) == entry.size
    payload = zstd_codec.encode_rows(np.full((3, 9), 7, np.uint8))
    fields = entry.unpack_from(payload, 4)
    assert payload[:4] == bytes([1, 0, 0, 0])
    assert fields == (3, len(payload) - 14, 7, 0)


def test_values_per_byte() -> None:
    lines = [line for line in section("10.3").splitlines() if line.startswith(("| radix", "| p |"))]
    radices, counts = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    found: dict[int, int] = {}
    for text, count in zip(radices[1:], counts[1:], strict=True):
        numbers = [int(item) for item in re.findall(r"\d+", text)]
        span = range(numbers[0], numbers[-1] + 1) if "to" in text else numbers
        found |= dict.fromkeys(span, int(count))
    assert sorted(found) == [*range(1, 17), 256]
    for radix, count in found.items():
        assert count == zstd_codec.tokens_per_byte(radix)
        assert radix**count <= 256
        assert count == 8 or radix ** (count + 1) > 256


FIELD_BYTES = {"uint16": 2, "uint32": 4, "binary32": 4, "int16": 2}


@covers("SET-3")
@pytest.mark.parametrize("head_dim", [3, 256, 257])
@pytest.mark.parametrize("flags", range(16))
def test_fields_of_a_set(flags: int, head_dim: int) -> None:
    """The length that the table of section 9.2 gives is the one that the code accepts and makes."""
    layers, heads, scales = 2, 5, 4
    channels = layers * heads * head_dim
    size_bytes = 0
    for name, form, present in table_rows(section("9.2")):
        bit = re.search(r"flag (\d)", form + present)
        given = bool(flags & int(bit[1])) if bit else True
        if "token_scale_count]" in form:
            size_bytes += 4 * scales
        elif name in ("scale", "zero"):
            size_bytes += FIELD_BYTES[form.split()[0]] * (channels if given else layers)
        elif name == "bias":
            size_bytes += 4 * channels * given
        elif name == "order":
            limit = plain(re.findall(r"uint8 if D <= (\d+), else uint16", form)[0])
            size_bytes += (1 if head_dim <= limit else 2) * channels * given
        else:
            size_bytes += FIELD_BYTES[re.findall(r"uint\d+", form)[0]]
    full, each = (layers, heads, head_dim), (layers, 1, 1)
    kind = sets.order_dtype(head_dim)
    item = QuantisationSet(
        heads,
        head_dim,
        np.ones(full if flags & 1 else each, np.float32),
        np.zeros(full if flags & 2 else each, np.int16),
        np.zeros(full, np.float32) if flags & 4 else None,
        np.broadcast_to(np.arange(head_dim, dtype=kind), full) if flags & 8 else None,
        np.ones(scales, np.float32),
    )
    raw = item.to_bytes()
    assert len(raw) == size_bytes
    assert raw[2] == flags
    assert parse_set(raw, layers, heads, head_dim, "here").to_bytes() == raw
