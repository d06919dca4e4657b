"""The JSON of the manifest: one form for one value, and a KvformatError for everything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvformat import InvalidError
from kvformat.strictjson import parse, serialise
from tests.builder import canonical
from tests.damage import open_code, parts
from tests.requirements import covers

many = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


def code_of(data: bytes) -> str:
    """``ok`` or the code that parsing gives; any other exception is a failure."""
    try:
        value = parse(data)
    except InvalidError as error:
        assert error.verdict == "invalid"
        assert error.where
        return error.code
    assert serialise(value) == data
    return "ok"


def nested(depth: int, brackets: tuple[bytes, bytes] = (b"[", b"]")) -> bytes:
    """An object of the given depth."""
    return b'{"a":' + brackets[0] * (depth - 1) + brackets[1] * (depth - 1) + b"}"


TRAPS: dict[str, tuple[bytes, str]] = {
    # JSN-1: UTF-8 without a byte order mark
    "byte order mark": (b'\xef\xbb\xbf{"a":1}', "manifest.json"),
    "UTF-16": ('{"a":1}'.encode("utf-16"), "manifest.json"),
    "UTF-16 without a mark": ('{"a":1}'.encode("utf-16-le"), "manifest.json"),
    "UTF-32": ('{"a":1}'.encode("utf-32"), "manifest.json"),
    "overlong slash": (b'{"a":"\xc0\xaf"}', "manifest.json"),
    "overlong NUL": (b'{"a":"\xc0\x80"}', "manifest.json"),
    "overlong three bytes": (b'{"a":"\xe0\x80\xaf"}', "manifest.json"),
    "raw lone surrogate": (b'{"a":"\xed\xa0\x80"}', "manifest.json"),
    "raw surrogate pair (CESU-8)": (b'{"a":"\xed\xa0\xbd\xed\xb8\x80"}', "manifest.json"),
    "above U+10FFFF": (b'{"a":"\xf4\x90\x80\x80"}', "manifest.json"),
    "cut character": (b'{"a":"\xe2\x82"}', "manifest.json"),
    "Latin-1": (b'{"a":"\xe9"}', "manifest.json"),
    # JSN-2: an object
    "empty": (b"", "manifest.json"),
    "a space": (b" ", "manifest.json"),
    "array": (b"[]", "manifest.json"),
    "string": (b'"a"', "manifest.json"),
    "number": (b"1", "manifest.json"),
    "null": (b"null", "manifest.json"),
    "NUL": (b"\0", "manifest.json"),
    # JSN-3: no key twice
    "duplicate key": (b'{"a":1,"a":1}', "manifest.duplicate-key"),
    "duplicate key, other value": (b'{"a":1,"b":2,"a":3}', "manifest.duplicate-key"),
    "duplicate key, escaped": (b'{"a":1,"\\u0061":2}', "manifest.duplicate-key"),
    "duplicate key, deep": (b'{"a":[{"b":{"c":1,"c":1}}]}', "manifest.duplicate-key"),
    # JSN-4: numbers
    "NaN": (b'{"a":NaN}', "manifest.json"),
    "Infinity": (b'{"a":Infinity}', "manifest.json"),
    "-Infinity": (b'{"a":-Infinity}', "manifest.json"),
    "1e999": (b'{"a":1e999}', "manifest.json"),
    "1E0": (b'{"a":1E0}', "manifest.json"),
    "1.0": (b'{"a":1.0}', "manifest.json"),
    "0.5": (b'{"a":0.5}', "manifest.json"),
    "-0": (b'{"a":-0}', "manifest.json"),
    "-1": (b'{"a":-1}', "manifest.json"),
    "+1": (b'{"a":+1}', "manifest.json"),
    "01": (b'{"a":01}', "manifest.json"),
    "00": (b'{"a":00}', "manifest.json"),
    "0x1": (b'{"a":0x1}', "manifest.json"),
    "1_000": (b'{"a":1_000}', "manifest.json"),
    ".5": (b'{"a":.5}', "manifest.json"),
    "5.": (b'{"a":5.}', "manifest.json"),
    "Arabic digits": ('{"a":١}'.encode(), "manifest.json"),
    "5,000 digits": (b'{"a":' + b"9" * 5000 + b"}", "limit.exceeded"),
    "5,000 digits and a minus": (b'{"a":-' + b"9" * 5000 + b"}", "manifest.json"),
    "5,000 digits and a fraction": (b'{"a":' + b"9" * 5000 + b".5}", "manifest.json"),
    "10 million digits": (b'{"a":' + b"9" * 10_000_000 + b"}", "limit.exceeded"),
    "2^53": (b'{"a":9007199254740992}', "limit.exceeded"),
    "2^64": (b'{"a":18446744073709551616}', "limit.exceeded"),
    "2^53 - 1": (b'{"a":9007199254740991}', "ok"),
    "0": (b'{"a":0}', "ok"),
    # JSN-5: surrogates
    "escaped lone high surrogate": (b'{"a":"\\ud800"}', "manifest.json"),
    "escaped lone low surrogate": (b'{"a":"\\udc00x"}', "manifest.json"),
    "escaped surrogates, swapped": (b'{"a":"\\ude00\\ud83d"}', "manifest.json"),
    "escaped surrogate in a key": (b'{"\\ud800":1}', "manifest.json"),
    "escaped surrogate pair": (b'{"a":"\\ud83d\\ude00"}', "manifest.canonical"),
    # JSN-6: keys
    "empty key": (b'{"":1}', "manifest.json"),
    "upper-case key": (b'{"A":1}', "manifest.json"),
    "key with a space": (b'{"a b":1}', "manifest.json"),
    "key with a line feed": (b'{"a\\n":1}', "manifest.json"),
    "key starts with a stop": (b'{".a":1}', "manifest.json"),
    "key of 65": (b'{"' + b"a" * 65 + b'":1}', "manifest.json"),
    "key of 64": (b'{"' + b"a" * 64 + b'":1}', "ok"),
    "key in another script": ('{"é":1}'.encode(), "manifest.json"),
    "key, deep": (b'{"a":[[{"B":1}]]}', "manifest.json"),
    "__proto__": (b'{"__proto__":1}', "manifest.json"),
    "all sorts of key": (b'{"0a_b.c-d":1}', "ok"),
    # JSN-7: canonical form
    "space": (b'{"a": 1}', "manifest.canonical"),
    "space in front": (b' {"a":1}', "manifest.canonical"),
    "line feed behind": (b'{"a":1}\n', "manifest.canonical"),
    "tab": (b'{"a":\t1}', "manifest.canonical"),
    "carriage return": (b'{"a":1\r}', "manifest.canonical"),
    "space in an empty array": (b'{"a":[ ]}', "manifest.canonical"),
    "unsorted keys": (b'{"b":1,"a":2}', "manifest.canonical"),
    "unsorted keys, deep": (b'{"a":{"b":1,"a":2}}', "manifest.canonical"),
    "escaped slash": (b'{"a":"\\/"}', "manifest.canonical"),
    "escaped letter": (b'{"a":"\\u0062"}', "manifest.canonical"),
    "escaped key": (b'{"\\u0061":1}', "manifest.canonical"),
    "escaped DEL": (b'{"a":"\\u007f"}', "manifest.canonical"),
    "escaped e acute": (b'{"a":"\\u00e9"}', "manifest.canonical"),
    "long escape of a line feed": (b'{"a":"\\u000a"}', "manifest.canonical"),
    "long escape of a backspace": (b'{"a":"\\u0008"}', "manifest.canonical"),
    "upper-case escape": (b'{"a":"\\u001F"}', "manifest.canonical"),
    "all escapes": (b'{"a":"\\"\\\\\\b\\t\\n\\f\\r\\u0000\\u001f\x7f/"}', "ok"),
    "U+2028": ('{"a":"\u2028"}'.encode(), "ok"),
    "not normalised": ('{"a":"e\u0301é"}'.encode(), "ok"),
    "astral": ('{"a":"😀"}'.encode(), "ok"),
    "noncharacter": ('{"a":"\uffff\U0010ffff"}'.encode(), "ok"),
    "a mark inside": ('{"a":"\ufeff"}'.encode(), "ok"),
    # syntax
    "raw line feed": (b'{"a":"\n"}', "manifest.json"),
    "raw NUL": (b'{"a":"\0"}', "manifest.json"),
    "raw U+001F": (b'{"a":"\x1f"}', "manifest.json"),
    "unknown escape": (b'{"a":"\\x41"}', "manifest.json"),
    "short escape": (b'{"a":"\\u41"}', "manifest.json"),
    "escape with a space": (b'{"a":"\\u 041"}', "manifest.json"),
    "escape with underscore": (b'{"a":"\\u0_41"}', "manifest.json"),
    "trailing backslash": (b'{"a":"\\', "manifest.json"),
    "trailing comma": (b'{"a":1,}', "manifest.json"),
    "trailing comma in an array": (b'{"a":[1,]}', "manifest.json"),
    "leading comma": (b'{,"a":1}', "manifest.json"),
    "two values": (b'{"a":1}{}', "manifest.json"),
    "trailing garbage": (b'{"a":1}x', "manifest.json"),
    "trailing NUL": (b'{"a":1}\0', "manifest.json"),
    "comment": (b'{"a":1/*x*/}', "manifest.json"),
    "line comment": (b'{"a":1}//x', "manifest.json"),
    "single quotes": (b"{'a':1}", "manifest.json"),
    "bare key": (b"{a:1}", "manifest.json"),
    "number as key": (b"{1:1}", "manifest.json"),
    "True": (b'{"a":True}', "manifest.json"),
    "undefined": (b'{"a":undefined}', "manifest.json"),
    "open": (b'{"a":', "manifest.json"),
    "open string": (b'{"a":"', "manifest.json"),
    "closed too often": (b'{"a":1}}', "manifest.json"),
    "wrong bracket": (b'{"a":[1}', "manifest.json"),
    "form feed as space": (b'{"a":\x0c1}', "manifest.json"),
    "no-break space": ('{"a":\u00a01}'.encode(), "manifest.json"),
    # JSN-8: depth
    "depth 16": (nested(16), "ok"),
    "depth 16, objects": (b'{"a":' * 16 + b"1" + b"}" * 16, "ok"),
    "depth 17": (nested(17), "limit.exceeded"),
    "depth 17, objects": (b'{"a":' * 17 + b"1" + b"}" * 17, "limit.exceeded"),
    "depth 100,000": (nested(100_000), "limit.exceeded"),
    "depth 100,000, never closed": (b'{"a":' * 100_000, "limit.exceeded"),
    "brackets inside strings": (b'{"a":"' + b"[" * 100 + b'","b":"\\"[[[[[[[[[[[[[[[[["}', "ok"),
    "escaped backslash before a quote": (b'{"a":"\\\\","b":[[1]]}', "ok"),
    "many arrays side by side": (b'{"a":[' + b"[]," * 99 + b"[]]}", "ok"),
    # JSN-9: strings
    "string of 4,096": (b'{"a":"' + b"x" * 4096 + b'"}', "ok"),
    "string of 4,097": (b'{"a":"' + b"x" * 4097 + b'"}', "limit.exceeded"),
    "4,096 bytes of two": (b'{"a":"' + "é".encode() * 2048 + b'"}', "ok"),
    "4,098 bytes of two": (b'{"a":"' + "é".encode() * 2049 + b'"}', "limit.exceeded"),
    # JSN-12: values
    "1,048,576 values": (b'{"a":[' + b"1," * (2**20 - 3) + b"1]}", "ok"),
    "1,048,577 values": (b'{"a":[' + b"1," * (2**20 - 2) + b"1]}", "limit.exceeded"),
    "open string of escaped quotes": (b'{"a":"' + b'\\"' * 2_000_000, "manifest.json"),
    "open string, then a backslash": (b'{"a":"' + b'\\"' * 2_000_000 + b"\\", "manifest.json"),
    "long string, deep": (b'{"a":[{"b":"' + b"x" * 4097 + b'"}]}', "limit.exceeded"),
}


@covers(
    "JSN-1", "JSN-2", "JSN-3", "JSN-4", "JSN-5", "JSN-6", "JSN-7", "JSN-8", "JSN-9",
    "JSN-12", "CNV-2"
)  # fmt: skip
@pytest.mark.parametrize("name", TRAPS)
def test_trap(name: str) -> None:
    data, code = TRAPS[name]
    assert code_of(data) == code


@covers("JSN-3", "JSN-4", "JSN-7", "JSN-8", "ORD-1")
@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (b'"count":10', b'"count":1e1', "manifest.json"),
        (b'"count":10', b'"count":10,"count":10', "manifest.duplicate-key"),
        (b'"count":10', b'"count": 10', "manifest.canonical"),
        (b'"count":10', b'"count":9007199254740992', "limit.exceeded"),
        (b'"count":10', b'"Count":10', "manifest.json"),
        (b'"count":10', b'"count":' + b"[" * 20 + b"]" * 20, "limit.exceeded"),
        (b'"format":"kvformat"', b'"format":"kvform\\u0061t"', "manifest.canonical"),
        (b'"format":"kvformat"', b'"format":"\xed\xa0\x80"', "manifest.json"),
    ],
)
def test_traps_in_a_manifest(old: bytes, new: bytes, code: str) -> None:
    assert open_code(parts().build(edit_json=lambda text: text.replace(old, new))) == code


INTEGERS = (
    "/tokens/count", "/tokens/first_position", "/identity/layers_total", "/data_bytes",
    "/groups/0/heads", "/groups/0/head_start", "/groups/0/layers/0", "/segmentation/tokens",
    "/segmentation/groups/0/layers", "/qualities/0/sets", "/tracks/0/segments",
    "/tracks/0/layouts/0/width", "/tracks/0/layouts/0/fold/0", "/tracks/0/data_start",
)  # fmt: skip


def put(manifest: Any, pointer: str, value: Any) -> None:
    """Set the value behind a JSON pointer."""
    *steps, last = pointer.strip("/").split("/")
    for step in steps:
        manifest = manifest[int(step) if isinstance(manifest, list) else step]
    manifest[int(last) if isinstance(manifest, list) else last] = value


@covers("JSN-10", "ERR-5")
@pytest.mark.parametrize("pointer", INTEGERS)
@pytest.mark.parametrize("value", [True, False, None, "1", [1], {}])
def test_only_integers_are_integers(pointer: str, value: Any) -> None:
    assert (
        open_code(parts().build(edit_manifest=lambda m: put(m, pointer, value)))
        == "manifest.schema"
    )


@covers("JSN-10")
@pytest.mark.parametrize("value", [0, 1, "true", None, []])
def test_only_booleans_are_booleans(value: Any) -> None:
    extension = {"a": {"must_understand": value, "value": None}}
    file = parts().build(edit_manifest=lambda m: m.update(extensions=extension))
    assert open_code(file) == "manifest.schema"


# --- any value, any bytes --------------------------------------------------------------------


keys = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,12}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = st.none() | st.booleans() | st.integers(0, 2**53 - 1) | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
objects = st.dictionaries(keys, values, max_size=5)


@covers("JSN-7", "JSN-1", "JSN-5")
@settings(many, max_examples=150)
@given(objects)
def test_parse_inverts_serialise(value: dict[str, Any]) -> None:
    data = serialise(value)
    assert data == canonical(value)
    assert parse(data) == value
    assert json.loads(data) == value


@covers("JSN-7", "ERR-1")
@many
@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_canonical(data: bytes) -> None:
    code_of(data)
    code_of(b'{"a":' + data + b"}")
    code_of(b'{"a":"' + data + b'"}')


@covers("JSN-7", "ERR-1")
@many
@given(st.text(st.sampled_from('{}[]",:\\u0019aAeE+-.dD8ntf \n'), max_size=40))
def test_any_text_of_json_characters_is_refused_or_canonical(text: str) -> None:
    code_of(text.encode())
    code_of(f'{{"a":{text}}}'.encode())


@covers("JSN-7")
@settings(many, max_examples=150)
@given(objects, st.data())
def test_any_small_change_is_noticed_or_is_another_value(value: Any, data: st.DataObject) -> None:
    good = serialise(value)
    place = data.draw(st.integers(0, len(good) - 1))
    change = data.draw(st.integers(1, 255))
    bad = good[:place] + bytes([good[place] ^ change]) + good[place + 1 :]
    if code_of(bad) == "ok":
        assert parse(bad) != value
