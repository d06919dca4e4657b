"""What a reply to a range request may say: tables of statuses and headers, and the law behind."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvformat.errors import StorageError
from kvformat.storage.replies import (
    DENIED,
    NOT_FOUND,
    TRANSIENT,
    Range,
    Same,
    TransientError,
    check_reply,
    check_status,
    fields,
    retry_after_s,
    strong_tag,
)
from tests.requirements import covers

ASKED = Range(100, 200)
FRONT = Range(0, 100, front=True)
END = Range(499, 501, front=True)
"""What ``ends_at`` asks for to learn whether an object has 500 bytes."""


def outcome(status: int, headers: dict[str, str], asked: Range = ASKED) -> int | str:
    """The size of the body, or the code."""
    try:
        return check_reply(status, headers, asked, "here", Same())
    except StorageError as error:
        assert error.where == "here"
        return error.code


@covers("REQ-9")
@pytest.mark.parametrize("status", range(100, 600))
def test_every_status_has_one_meaning(status: int) -> None:
    expected = "io.read"
    if status in (404, 410):
        expected = "io.not-found"
    elif status in (401, 403, 407):
        expected = "io.denied"
    if status in (200, 206, 416):
        check_status(status, "here", "")
        return
    kind = TransientError if status in (408, 425, 429, 500, 502, 503, 504) else StorageError
    with pytest.raises(kind) as caught:
        check_status(status, "here", "Why Not", 3.0)
    error = caught.value
    if isinstance(error, TransientError):
        assert error.after_s == 3.0
        error = error.final
    assert isinstance(error, StorageError)
    assert (error.code, error.where) == (expected, "here")
    assert error.found == f"status {status} Why Not"


def test_the_sets_of_statuses_do_not_overlap() -> None:
    assert not TRANSIENT & NOT_FOUND
    assert not TRANSIENT & DENIED
    assert not NOT_FOUND & DENIED


RANGES = [
    ("bytes 100-199/500", 100),
    ("bytes 100-199/200", 100),
    ("bytes 100-199/*", 100),
    ("Bytes 100-199/500", 100),
    (" bytes 100-199/500 ", 100),
    ("bytes 0100-199/500", 100),
    ("bytes 100-199/9999999999999999999", 100),
    ("", "io.range"),
    ("100-199/500", "io.range"),
    ("bytes 100-199", "io.range"),
    ("bytes=100-199/500", "io.range"),
    ("bytes 100 - 199/500", "io.range"),
    ("bytes  100-199/500", "io.range"),
    ("bytes 100-199/500, bytes 100-199/500", "io.range"),
    ("bytes 100-199/500; x=1", "io.range"),
    ("bytes 100-199/+500", "io.range"),
    ("bytes 100-199/-1", "io.range"),
    ("bytes 100-199/0x1f4", "io.range"),
    ("bytes 100-199/5e2", "io.range"),
    ("bytes 1_00-199/500", "io.range"),
    ("bytes ١٠٠-١٩٩/٥٠٠", "io.range"),
    ("byteſ 100-199/500", "io.range"),
    ("bytes 100-199/" + "9" * 5000, "io.range"),
    ("items 100-199/500", "io.range"),
    ("bytes */500", "io.range"),
    ("bytes 99-199/500", "io.range"),
    ("bytes 101-199/500", "io.range"),
    ("bytes 0-499/500", "io.range"),
    ("bytes 199-100/500", "io.range"),
    ("bytes 100-99/500", "io.range"),
    ("bytes 100-199/199", "io.range"),
    ("bytes 100-199/150", "io.range"),
    ("bytes 100-198/500", "io.short"),
    ("bytes 100-198/199", "io.short"),
    ("bytes 100-200/500", "io.short"),
    ("bytes 100-499/500", "io.short"),
    ("bytes 100-198/*", "io.short"),
    ("bytes 100-200/*", "io.short"),
]


@covers("REQ-4", "REQ-6", "REQ-7")
@pytest.mark.parametrize(("value", "expected"), RANGES, ids=[row[0][:40] for row in RANGES])
def test_content_range_of_a_part(value: str, expected: int | str) -> None:
    assert outcome(206, {"content-range": value}) == expected


FRONTS = [
    ("bytes 0-99/100", 100),
    ("bytes 0-99/1000", 100),
    ("bytes 0-99/*", 100),
    ("bytes 0-49/50", 50),
    ("bytes 0-49/*", 50),
    ("bytes 0-0/1", 1),
    ("bytes 0-49/51", "io.short"),
    ("bytes 0-98/100", "io.short"),
    ("bytes 0-100/101", "io.short"),
    ("bytes 0-100/*", "io.short"),
    ("bytes 0-49/49", "io.range"),
    ("bytes 1-99/100", "io.range"),
]


@covers("REQ-3", "REQ-7")
@pytest.mark.parametrize(("value", "expected"), FRONTS, ids=[row[0] for row in FRONTS])
def test_content_range_of_the_front(value: str, expected: int | str) -> None:
    assert outcome(206, {"content-range": value}, FRONT) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("bytes 499-499/500", 1),
        ("bytes 499-499/*", 1),
        ("bytes 499-500/501", 2),
        ("bytes 499-500/900", 2),
        ("bytes 499-500/*", 2),
        ("bytes 499-499/501", "io.short"),
        ("bytes 499-501/502", "io.short"),
    ],
)
def test_content_range_of_the_end(value: str, expected: int | str) -> None:
    assert outcome(206, {"content-range": value}, END) == expected


OTHERS = [
    ("the range is ignored", 200, {"content-length": "500"}, ASKED, "io.range"),
    ("ignored, but with a range", 200, {"content-range": "bytes 100-199/500"}, ASKED, "io.range"),
    ("ignored for the front", 200, {"content-length": "100"}, FRONT, "io.range"),
    ("outside", 416, {"content-range": "bytes */500"}, ASKED, "io.range"),
    ("outside, no size", 416, {}, ASKED, "io.range"),
    ("outside, nothing there", 416, {"content-range": "bytes */0"}, ASKED, "io.range"),
    ("no first byte of an empty object", 416, {"content-range": "bytes */0"}, FRONT, 0),
    ("no first byte of one that is not", 416, {"content-range": "bytes */100"}, FRONT, "io.range"),
    ("no first byte, no size", 416, {}, FRONT, "io.range"),
]


@covers("REQ-6")
@pytest.mark.parametrize(
    ("status", "headers", "asked", "expected"),
    [row[1:] for row in OTHERS],
    ids=[row[0] for row in OTHERS],
)
def test_other_statuses(
    status: int, headers: dict[str, str], asked: Range, expected: int | str
) -> None:
    assert outcome(status, headers, asked) == expected


CODINGS = [
    ("identity", 100),
    ("Identity", 100),
    (" identity ", 100),
    ("identity, identity", 100),
    ("", 100),
    ("gzip", "io.range"),
    ("br", "io.range"),
    ("identity, gzip", "io.range"),
    ("aws-chunked", "io.range"),
    ("x" * 500, "io.range"),
]


@covers("REQ-6")
@pytest.mark.parametrize(("coding", "expected"), CODINGS, ids=[row[0][:20] for row in CODINGS])
def test_content_encoding(coding: str, expected: int | str) -> None:
    headers = {"content-range": "bytes 100-199/500", "content-encoding": coding}
    assert outcome(206, headers) == expected


@covers("REQ-7")
@pytest.mark.parametrize(
    ("length", "expected"),
    [("100", 100), (" 100 ", 100), ("99", "io.short"), ("101", "io.short"), ("x", "io.short")],
)
def test_content_length(length: str, expected: int | str) -> None:
    headers = {"content-range": "bytes 100-199/500", "content-length": length}
    assert outcome(206, headers) == expected


def said(same: Same, total: str, tag: str | None) -> int | str:
    headers = {"content-range": f"bytes 100-199/{total}"}
    if tag is not None:
        headers["etag"] = tag
    try:
        return check_reply(206, headers, ASKED, "here", same)
    except StorageError as error:
        return error.code


CHANGES = [
    (("500", '"a"'), ("500", '"a"'), 100),
    (("500", '"a"'), ("*", None), 100),
    (("*", None), ("500", '"a"'), 100),
    (("500", 'W/"a"'), ("500", 'W/"b"'), 100),
    (("500", 'W/"a"'), ("500", '"b"'), 100),
    (("500", ""), ("500", '"b"'), 100),
    (("500", '"a"'), ("500", '"b"'), "io.changed"),
    (("500", '"a"'), ("501", '"a"'), "io.changed"),
    (("500", None), ("501", None), "io.changed"),
    (("500", None), ("199", None), "io.changed"),
]


@covers("REQ-8")
@pytest.mark.parametrize(("first", "second", "expected"), CHANGES)
def test_two_replies_are_of_one_object(
    first: tuple[str, str | None], second: tuple[str, str | None], expected: int | str
) -> None:
    same = Same()
    assert said(same, *first) == 100
    assert said(same, *second) == expected


@covers("REQ-8")
def test_an_object_that_became_shorter_has_changed() -> None:
    same = Same()
    same.check(500, None, "here")
    for status, value in [(416, "bytes */90"), (416, "bytes */0"), (206, "bytes 100-149/150")]:
        with pytest.raises(StorageError) as caught:
            check_reply(status, {"content-range": value}, ASKED, "here", same)
        assert (caught.value.code, caught.value.expected) == ("io.changed", "500")


def test_what_is_not_said_is_remembered_from_before() -> None:
    same = Same()
    for total, tag in [("*", None), ("500", None), ("*", '"a"'), ("*", None)]:
        assert said(same, total, tag) == 100
    assert (same.total_bytes, same.tag) == (500, '"a"')


@pytest.mark.parametrize(
    ("tag", "strong"),
    [
        (None, None),
        ("", None),
        (" ", None),
        ('W/"a"', None),
        (' W/"a"', None),
        ('"a"', '"a"'),
        (' "a" ', '"a"'),
        ('"W/a"', '"W/a"'),
    ],
)
def test_strong_tags(tag: str | None, strong: str | None) -> None:
    assert strong_tag(tag) == strong


def test_fields_that_come_twice_are_lists() -> None:
    pairs = [("Content-Range", "bytes 0-9/10"), ("ETag", '"a"'), ("content-range", "bytes 0-9/10")]
    assert fields(pairs) == {"content-range": "bytes 0-9/10, bytes 0-9/10", "etag": '"a"'}


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        (" 7 ", 7.0),
        ("0", 0.0),
        ("-1", None),
        ("1.5", None),
        ("9999999", None),
        ("٧", None),
        ("Fri, 31 Dec 1999 23:59:59 GMT", None),
    ],
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert retry_after_s(value) == seconds


ODD = st.sampled_from(["*", "", "-1", " 5", "0x5", "٥", str(2**70)])
STEPS = st.sampled_from([0, 0, 0, 0, -1, 1, -5, 7])


def headers_of(asked: Range) -> st.SearchStrategy[dict[str, str]]:
    """Headers that are right, or wrong by a little, or nonsense."""

    def near(number: int) -> st.SearchStrategy[str]:
        return st.one_of(STEPS.map(lambda step: str(number + step)), ODD)

    ranges = st.builds(
        "{} {}-{}/{}".format,
        st.sampled_from(["bytes", "bytes", "Bytes", "b"]),
        near(asked.first),
        near(asked.stop - 1),
        st.one_of(near(asked.stop), near(10**6), st.just("*")),
    )
    return st.fixed_dictionaries(
        {},
        optional={
            "content-range": st.one_of(
                ranges, ranges, ranges, st.builds("bytes */{}".format, near(0)), st.text()
            ),
            "content-length": near(asked.size_bytes),
            "content-encoding": st.sampled_from(["identity", "", "gzip", "identity,br"]),
            "etag": st.sampled_from(['"a"', 'W/"a"', ""]),
        },
    )


@covers("REQ-6", "REQ-7")
@given(
    status=st.sampled_from([200, 206, 206, 206, 416]),
    data=st.data(),
    first=st.integers(0, 110),
    size=st.integers(1, 12),
    front=st.booleans(),
)
def test_either_the_exact_range_is_promised_or_an_error_raised(
    status: int, data: st.DataObject, first: int, size: int, front: bool
) -> None:
    asked = Range(first, first + size, front)
    headers = data.draw(headers_of(asked))
    found = outcome(status, headers, asked)
    if isinstance(found, str):
        assert found in ("io.range", "io.short")
        return
    value = headers.get("content-range", "")
    if found == 0:
        assert front
        assert (status, value.strip().lower()) == (416, "bytes */0")
        return
    assert status == 206
    match = re.fullmatch(r"\s*bytes ([0-9]+)-([0-9]+)/([0-9]+|\*)\s*", value, re.IGNORECASE)
    assert match is not None
    assert int(match[1]) == first
    assert int(match[2]) == first + found - 1
    assert 0 < found <= size
    if found < size:
        assert front
        assert match[3] in ("*", str(first + found))
    assert headers.get("content-length", str(found)).strip() == str(found)
    assert set(headers.get("content-encoding", "").split(",")) <= {"identity", ""}
