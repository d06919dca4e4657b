"""Ranges, conditions and hosts, as RFC 9110 and ``kvformat.http_rules`` have them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvformat.http_rules import (
    RangeRefusedError,
    Span,
    failed_condition,
    is_local,
    range_applies,
    requested_span,
)

SIZE = 1000
HUGE = "9" * 5000
ETAG = '"abc-1000"'

RANGES: list[tuple[str, tuple[int, int] | str]] = [
    ("bytes=0-0", (0, 1)),
    ("bytes=0-999", (0, 1000)),
    ("bytes=999-999", (999, 1000)),
    ("bytes=5-9", (5, 10)),
    ("BYTES=5-9", (5, 10)),
    ("bytes = 5-9", (5, 10)),
    ("bytes= 5-9 ", (5, 10)),
    ("bytes=,5-9,", (5, 10)),
    ("bytes=0005-0009", (5, 10)),
    ("bytes=" + "0" * 5000 + "5-9", (5, 10)),
    # open-ended, and beyond the end
    ("bytes=0-", (0, 1000)),
    ("bytes=998-", (998, 1000)),
    ("bytes=998-1000", (998, 1000)),
    ("bytes=998-18446744073709551616", (998, 1000)),
    (f"bytes=998-{HUGE}", (998, 1000)),
    ("bytes=1000-", "refused"),
    ("bytes=1000-1000", "refused"),
    (f"bytes={HUGE}-", "refused"),
    (f"bytes={HUGE}-{HUGE}", "refused"),
    # from the end
    ("bytes=-1", (999, 1000)),
    ("bytes=-1000", (0, 1000)),
    ("bytes=-1001", (0, 1000)),
    (f"bytes=-{HUGE}", (0, 1000)),
    ("bytes=-0", "refused"),
    # more than one: the whole file, unless none holds a byte
    ("bytes=0-1,5-9", "whole"),
    ("bytes=0-9,5-14", "whole"),
    ("bytes=0-1,2000-", "whole"),
    ("bytes=0-0,-1", "whole"),
    ("bytes=1000-,2000-", "refused"),
    # malformed
    ("bytes=9-5", "refused"),
    ("bytes=", "refused"),
    ("bytes=-", "refused"),
    ("bytes=,", "refused"),
    ("bytes=--1", "refused"),
    ("bytes=-1-", "refused"),
    ("bytes=-5-9", "refused"),
    ("bytes=+5-9", "refused"),
    ("bytes=5", "refused"),
    ("bytes=5 - 9", "refused"),
    ("bytes=a-b", "refused"),
    ("bytes=0x1-0x2", "refused"),
    ("bytes=1.5-2", "refused"),
    ("bytes=1_0-20", "refused"),
    ("bytes=0-1,x", "refused"),
    ("bytes=0-1;2-3", "refused"),
    ("bytes=5-9, bytes=5-9", "refused"),
    # not a range of bytes
    ("items=5-9", "whole"),
    ("bytes", "whole"),
    ("bytes 5-9", "whole"),
    ("", "whole"),
    ("5-9", "whole"),
]


@pytest.mark.parametrize(("value", "expected"), RANGES, ids=[item[0][:40] for item in RANGES])
def test_ranges(value: str, expected: tuple[int, int] | str) -> None:
    if expected == "refused":
        with pytest.raises(RangeRefusedError):
            requested_span(value, SIZE)
        return
    span = requested_span(value, SIZE)
    if expected == "whole":
        assert span is None
    else:
        assert span is not None
        assert (span.offset_bytes, span.offset_bytes + span.length_bytes) == expected


def test_digits_of_other_scripts_are_none() -> None:
    with pytest.raises(RangeRefusedError):
        requested_span("bytes=\u0665-\u0669", SIZE)


def test_no_range_is_the_whole_file() -> None:
    assert requested_span(None, SIZE) is None


@given(st.integers(0, 2**70), st.integers(0, 2**70), st.integers(1, 2**53))
def test_a_span_lies_inside_and_starts_where_it_was_asked_for(
    first: int, more: int, size: int
) -> None:
    value = f"bytes={first}-{first + more}"
    if first >= size:
        with pytest.raises(RangeRefusedError):
            requested_span(value, size)
    else:
        assert requested_span(value, size) == Span(first, min(more + 1, size - first))


@given(st.text(), st.integers(1, 2**53))
def test_any_text_is_answered(text: str, size: int) -> None:
    for value in (text, f"bytes={text}"):
        try:
            span = requested_span(value, size)
        except RangeRefusedError:
            continue
        if span is not None:
            assert 0 <= span.offset_bytes < span.offset_bytes + span.length_bytes <= size


@pytest.mark.parametrize(
    ("if_match", "if_none_match", "status"),
    [
        (None, None, None),
        (ETAG, None, None),
        ("*", None, None),
        (f'"x", {ETAG}', None, None),
        ('"x"', None, 412),
        (f"W/{ETAG}", None, 412),
        ("abc-1000", None, 412),
        ("", None, 412),
        (None, ETAG, 304),
        (None, f"W/{ETAG}", 304),
        (None, f'"x",{ETAG}', 304),
        (None, " * ", 304),
        (None, '"x"', None),
        (None, "abc-1000", None),
        (ETAG, ETAG, 304),
        ('"x"', ETAG, 412),
    ],
)
def test_conditions(if_match: str | None, if_none_match: str | None, status: int | None) -> None:
    assert failed_condition(if_match, if_none_match, ETAG) == status


@pytest.mark.parametrize(
    ("value", "applies"),
    [
        (None, True),
        (ETAG, True),
        (f" {ETAG} ", True),
        ('"x"', False),
        (f"W/{ETAG}", False),
        (f'"x", {ETAG}', False),
        ("Sat, 29 Oct 1994 19:43:31 GMT", False),
        ("", False),
    ],
)
def test_if_range(value: str | None, applies: bool) -> None:
    assert range_applies(value, ETAG) is applies


@pytest.mark.parametrize(
    ("host", "local"),
    [
        (None, True),
        ("localhost", True),
        ("LOCALHOST:8470", True),
        ("kv.localhost:1", True),
        ("127.0.0.1:8470", True),
        ("127.9.9.9", True),
        ("[::1]:8470", True),
        ("evil.example", False),
        ("evil.example:8470", False),
        ("localhost.evil.example", False),
        ("notlocalhost", False),
        ("127.0.0.1.evil.example", False),
        ("127.0.0.1@evil.example", False),
        ("192.168.0.1", False),
        ("[::1", False),
        ("", False),
    ],
)
def test_hosts(host: str | None, local: bool) -> None:
    assert is_local(host) is local
