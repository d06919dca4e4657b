"""Needle retrieval: where the needles lie, and what readers of good and bad memory find."""

from __future__ import annotations

import math
from typing import Any

import pytest

import kvformat

torch = pytest.importorskip("torch", reason="torch is not installed")

from kvformat.integrations import needle as needles  # noqa: E402


def characters(text: str) -> list[int]:
    return list(text.encode("ascii"))


class Stub:
    """A reader that remembers: its cache is the list of ids, and it completes what it has seen.

    It looks back at most ``span`` ids, as a model that has lost the rest of its cache.
    """

    def __init__(self, span: int = 10**6) -> None:
        self.span = span

    def log_probs(self, ids: Any, cache: list[int]) -> Any:
        out = torch.full((len(ids), 128), math.log(0.5 / 127))
        for row, token in enumerate(ids):
            cache.append(int(token))
            out[row, self.successor(cache)] = math.log(0.5)
        return out

    def successor(self, seen: list[int]) -> int:
        text = bytes(seen).decode("ascii")
        start = text.rfind("The code of the ")
        place = text.find(text[start:], max(0, start - self.span), len(text) - 1)
        return ord("#") if start < 0 or place < 0 else seen[place + len(text) - start]


def test_needles_lie_where_they_should() -> None:
    hay = needles.make_haystack(characters, characters("hay. "), 3000, 4, characters("^"))
    text = bytes(hay.ids).decode("ascii")
    assert [needle.depth for needle in hay.needles] == [0, 1 / 3, 2 / 3, 1]
    assert text[0] == "^"
    codes = []
    for needle in hay.needles:
        question, answer = bytes(needle.question).decode(), bytes(needle.answer).decode()
        sentence = question[question.index("The code") :] + answer + "."
        assert text.count(sentence) == 1
        assert text.index(sentence) / len(text) == pytest.approx(needle.depth, abs=0.06)
        assert len(text) + len(question) + len(answer) <= 3000
        codes.append(answer)
    assert len(set(codes)) == 4
    assert len(text) > 2900
    assert needles.make_haystack(characters, [1], 3000, 1).needles[0].depth == 0.5


def test_a_reader_that_remembers_finds_them_all() -> None:
    hay = needles.make_haystack(characters, characters("hay. "), 2000, 5)
    cache = list(hay.ids)
    found = needles.ask_all(Stub(), cache, hay)
    assert [item.retrieved for item in found] == [True] * 5
    assert all(item.answer_nats == pytest.approx(math.log(2)) for item in found)
    assert cache == list(hay.ids)  # each question starts from the same cache


def test_a_reader_that_forgets_finds_the_last_ones() -> None:
    hay = needles.make_haystack(characters, characters("hay. "), 2000, 5)
    found = needles.ask_all(Stub(span=700), list(hay.ids), hay)
    assert [item.retrieved for item in found] == [False, False, False, True, True]
    assert found[0].answer_nats > 4


@pytest.mark.parametrize(("context", "depths"), [(100, 5), (2000, 0), (2000, 33)])
def test_impossible_haystacks_are_refused(context: int, depths: int) -> None:
    with pytest.raises(kvformat.UsageError):
        needles.make_haystack(characters, characters("hay. "), context, depths)
