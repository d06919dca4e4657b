"""The source digest in one pass over the file, wherever its order allows that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import kvformat
import kvformat.writer
from kvformat.segments import decode_segment
from kvformat.source_digest import SourceDigest
from kvformat.verification import verify
from tests.strategies import canonical_kv, write_bytes

LAYERS, TOKENS, HEADS, DIMS = 5, 70, 4, 8


@pytest.mark.parametrize("order", ["token-major", "layer-major"])
@pytest.mark.parametrize("segment_heads", [4, 3, 1])
@pytest.mark.parametrize("track", ["exact/stored", "exact/zstd"])
def test_digest_and_number_of_passes(
    order: str, segment_heads: int, track: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = kvformat.writer.plan_segmentation

    def cut(*arguments: Any, **options: Any) -> Any:
        made = plan(*arguments, **options)
        return replace(made, groups=tuple(replace(g, heads=segment_heads) for g in made.groups))

    monkeypatch.setattr(kvformat.writer, "plan_segmentation", cut)
    cache = canonical_kv(LAYERS, TOKENS, HEADS, DIMS)
    data = write_bytes(cache, tracks=["zstd", track], segment_tokens=32, order=order)
    in_file_order = order == "token-major" or segment_heads == HEADS
    with kvformat.open(data) as artifact:
        exact = artifact.track(track)
        table = artifact.segment_table(exact)
        assert max(table[index].cell.head_count for index in range(len(table))) == segment_heads

        def read(index: int) -> tuple[Any, Any]:
            context = artifact.context(exact, table[index])
            stored = artifact.segment_bytes(table[index])
            return table[index], decode_segment(context, stored).decoded.integers

        found = SourceDigest(artifact)
        assert found.in_file_order == in_file_order
        if in_file_order:
            for index in range(len(table)):
                found.add(*read(index))
        else:
            found.add_all(read)
        assert found.hex() == artifact.manifest.source_digest

    again: list[int] = []
    plain = kvformat.Artifact.segment_bytes

    def counted(self: Any, record: Any) -> Any:
        again.append(record.index)
        return plain(self, record)

    monkeypatch.setattr(kvformat.Artifact, "segment_bytes", counted)
    verify(data, in_child=False)
    assert sorted(again) == ([] if in_file_order else list(range(len(table))))
