"""Appendix A says what its file holds, and a reader made from the specification alone agrees."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvformat
from tests.requirements import covers

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

import make_appendix
from appendix_reader import Parsed, Walk

TEXT = make_appendix.TEXT.read_text(encoding="utf-8")
WORKED = make_appendix.WORKED.read_bytes()
ROW = re.compile(r"^\| 0x([0-9a-f]{4}) \| ([\d,]+) \| `([0-9a-f]+)(…[0-9a-f]+)?` \|", re.MULTILINE)


@pytest.fixture(scope="module")
def anew(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The same artifact, written now by the code that the appendix shows."""
    code = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert len(code) == 1
    names: dict[str, Any] = {}
    exec(compile(code[0], "appendix-a.md", "exec"), names)
    path = tmp_path_factory.mktemp("worked") / "anew.kvf"
    names["example"](str(path))
    return path.read_bytes()


@pytest.fixture(scope="module")
def committed() -> Parsed:
    return make_appendix.explain(WORKED)[1]


def test_text_is_up_to_date() -> None:
    assert make_appendix.render(WORKED) == TEXT
    assert len(TEXT.splitlines()) < 1100


def test_hexdump_is_the_file() -> None:
    lines = re.findall(r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} ?)+)  ", TEXT, flags=re.MULTILINE)
    assert [int(offset, 16) for offset, _ in lines] == list(range(0, len(WORKED), 16))
    assert bytes.fromhex("".join(digits for _, digits in lines)) == WORKED


def test_every_byte_has_one_row() -> None:
    end = 0
    for offset, size, first, last in ROW.findall(TEXT):
        size_bytes = int(size.replace(",", ""))
        assert int(offset, 16) == end
        raw = WORKED[end : end + size_bytes]
        assert raw.startswith(bytes.fromhex(first))
        assert raw.endswith(bytes.fromhex(last[1:]))
        assert last or len(first) == 2 * size_bytes
        end += size_bytes
    assert end == len(WORKED)


@pytest.mark.parametrize("size_bytes", [len(WORKED) - 1, len(WORKED) + 1])
def test_a_byte_without_a_row_is_noticed(size_bytes: int) -> None:
    walk = Walk(WORKED.ljust(size_bytes, b"\0")[:size_bytes])
    walk.take(size_bytes - 1, "most", "")
    with pytest.raises(ValueError, match="have no row"):
        walk.check()
    walk.cursor -= 1
    walk.take(2, "overlap", "")
    with pytest.raises(ValueError, match="gap or overlap"):
        walk.check()


@covers("HDR-3", "HDR-5", "TOK-1", "TOK-2", "TOK-4", "CID-1", "CID-2", "CNV-1", "CNV-4", "JSN-7")
@covers("TAB-3", "TAB-4", "DAT-2", "GRP-7", "SET-3", "SID-1", "INT-1", "STO-1", "ZST-1", "ZST-2")
@covers("ZST-4", "ARI-1", "ARI-2", "ARI-5")
def test_a_reader_of_its_own_understands_what_is_written_now(
    anew: bytes, committed: Parsed
) -> None:
    _, parsed = make_appendix.explain(anew)
    make_appendix.worked_values(anew, parsed)
    for name, arrays in committed.values.items():
        for wanted, found in zip(arrays, parsed.values[name], strict=True):
            assert found.tobytes() == wanted.tobytes()
    for name, records in committed.records.items():
        for old, new in zip(records, parsed.records[name], strict=True):
            assert new["integer_digest"] == old["integer_digest"]


def without_sizes(manifest: dict[str, Any]) -> dict[str, Any]:
    """A copy without what depends on the length and the bytes of zstd frames."""
    result = json.loads(json.dumps(manifest))
    del result["data_bytes"], result["generator"]
    for track in result["tracks"]:
        for member in ("data_start", "data_stop", "encoder", "table_digest"):
            del track[member]
    return result


def test_written_anew_only_zstd_frames_may_differ(anew: bytes, committed: Parsed) -> None:
    _, parsed = make_appendix.explain(anew)
    assert without_sizes(parsed.manifest) == without_sizes(committed.manifest)
    for old, new in zip(committed.sets, parsed.sets, strict=True):
        assert new["digest"] == old["digest"]
        assert new["offset"] == old["offset"]
    may_differ = {"zstd": {"offset", "stored_bytes", "digest"}, "stored": {"offset"}}
    for name, records in committed.records.items():
        for old, new in zip(records, parsed.records[name], strict=True):
            assert set(old) == set(new)
            for member in set(old) - may_differ[name.split("/")[1]]:
                assert repr(new[member]) == repr(old[member]), (name, member)


@covers("ARI-6")
def test_the_reference_reader_restores_the_same(committed: Parsed) -> None:
    with kvformat.open(make_appendix.WORKED) as artifact:
        assert list(artifact.tracks) == list(committed.values)
        for name, arrays in committed.values.items():
            restored = artifact.read(track=name, check=True)
            for group, wanted in zip(artifact.groups, arrays, strict=True):
                assert restored[group.name].tobytes() == wanted.tobytes()


def test_exact_tracks_hold_the_input_of_the_text(committed: Parsed) -> None:
    layer, token, dim = (axis[:, :, None] for axis in np.indices((2, 7, 4)))
    key = ((3 * layer + 5 * token + 2 * dim * dim) % 7 - 3) * (1 + 3 * dim % 4) / 4 + dim - 1
    value = ((5 * layer + 3 * token + 4 * dim) % 11 - 5) * 2.0 ** (2 - dim) / 8
    for name in ("exact/zstd", "exact/stored"):
        for wanted, found in zip((key, value), committed.values[name], strict=True):
            assert (found == wanted).all()
            assert (found.astype(np.float64) == wanted).all()


def test_manifest_of_the_text_is_that_of_the_file(committed: Parsed) -> None:
    blocks = re.findall(r"^```json,manifest\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert [json.loads(block) for block in blocks] == [committed.manifest]
