"""Level faulty: JSON. Traps as whole manifests, and inside one that is otherwise right."""

# ruff: noqa: E501 - long sentences and tables

from __future__ import annotations

import json
from collections.abc import Iterable

from conformance.generate.compose import EXACT, put, small, tiny
from conformance.generate.core import good
from conformance.generate.faults import fault
from conformance.generate.suite import Suite, inspect
from tests.builder import b3, fixed_part, seal_header

JSON, DUPLICATE, CANONICAL, LIMIT = (
    "manifest.json",
    "manifest.duplicate-key",
    "manifest.canonical",
    "limit.exceeded",
)
SCHEMA = "manifest.schema"
WHY = "Parsers of JSON differ here; a file that two of them understand differently must not exist."


def bare(text: bytes) -> bytes:
    """A header and a manifest, and nothing behind: enough for what is refused in steps 8 to 12."""
    fields = (128 + len(text), len(text), 0, b3(text), bytes(24))
    return seal_header(fixed_part(), fields) + text


def nested(depth: int) -> bytes:
    """An object of this depth."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


E_ACUTE = "é".encode()
TRAPS: list[tuple[str, str, bytes, str, str]] = [
    # slug, requirement, text, code, what
    ("byte-order-mark", "JSN-1", b'\xef\xbb\xbf{"a":1}', JSON, "A byte order mark in front"),
    ("utf-32", "JSN-1", '{"a":1}'.encode("utf-32"), JSON, "UTF-32"),
    ("overlong-slash", "JSN-1", b'{"a":"\xc0\xaf"}', JSON, "A slash in two bytes"),
    ("overlong-nul", "JSN-1", b'{"a":"\xc0\x80"}', JSON, "NUL in two bytes, as Java writes it"),
    ("overlong-three-bytes", "JSN-1", b'{"a":"\xe0\x80\xaf"}', JSON, "A slash in three bytes"),
    (
        "raw-lone-surrogate",
        "JSN-5",
        b'{"a":"\xed\xa0\x80"}',
        JSON,
        "A lone surrogate in three bytes",
    ),
    (
        "cesu-8",
        "JSN-5",
        b'{"a":"\xed\xa0\xbd\xed\xb8\x80"}',
        JSON,
        "A pair of surrogates in six bytes (CESU-8)",
    ),
    ("above-unicode", "JSN-1", b'{"a":"\xf4\x90\x80\x80"}', JSON, "A code point above U+10FFFF"),
    ("cut-character", "JSN-1", b'{"a":"\xe2\x82"}', JSON, "A character cut in the middle"),
    ("empty-text", "JSN-2", b"", JSON, "A manifest of no bytes"),
    ("a-space", "JSN-2", b" ", JSON, "A space"),
    ("array", "JSN-2", b"[]", JSON, "An array"),
    ("string", "JSN-2", b'"a"', JSON, "A string"),
    ("number", "JSN-2", b"1", JSON, "A number"),
    ("null", "JSN-2", b"null", JSON, "null"),
    ("nul", "JSN-2", b"\0", JSON, "A NUL byte"),
    ("key-twice", "JSN-3", b'{"a":1,"a":1}', DUPLICATE, "A key twice with one value"),
    ("key-twice-apart", "JSN-3", b'{"a":1,"b":2,"a":3}', DUPLICATE, "A key twice, another between"),
    (
        "key-twice-escaped",
        "JSN-3",
        b'{"a":1,"\\u0061":2}',
        DUPLICATE,
        "A key twice, once as an escape",
    ),
    (
        "key-twice-deep",
        "JSN-3",
        b'{"a":[{"b":{"c":1,"c":1}}]}',
        DUPLICATE,
        "A key twice, deep inside",
    ),
    ("nan", "JSN-4", b'{"a":NaN}', JSON, "NaN"),
    ("infinity", "JSN-4", b'{"a":Infinity}', JSON, "Infinity"),
    ("minus-infinity", "JSN-4", b'{"a":-Infinity}', JSON, "-Infinity"),
    ("exponent", "JSN-4", b'{"a":1E0}', JSON, "An exponent of 0"),
    ("fraction-of-zero", "JSN-4", b'{"a":1.0}', JSON, "A fraction of 0"),
    ("minus-zero", "JSN-4", b'{"a":-0}', JSON, "-0"),
    ("minus-one", "JSN-4", b'{"a":-1}', JSON, "-1"),
    ("plus-one", "JSN-4", b'{"a":+1}', JSON, "+1"),
    ("leading-zero", "JSN-4", b'{"a":01}', JSON, "A leading zero"),
    ("hexadecimal", "JSN-4", b'{"a":0x1}', JSON, "A hexadecimal number"),
    ("underscore", "JSN-4", b'{"a":1_000}', JSON, "An underscore in a number"),
    ("no-digit-before-the-stop", "JSN-4", b'{"a":.5}', JSON, "No digit before the stop"),
    ("no-digit-behind-the-stop", "JSN-4", b'{"a":5.}', JSON, "No digit behind the stop"),
    ("arabic-digit", "JSN-4", '{"a":١}'.encode(), JSON, "An Arabic digit"),
    ("digits-5000", "CNV-2", b'{"a":' + b"9" * 5000 + b"}", LIMIT, "A number of 5,000 digits"),
    (
        "digits-5000-minus",
        "JSN-4",
        b'{"a":-' + b"9" * 5000 + b"}",
        JSON,
        "5,000 digits and a minus",
    ),
    (
        "digits-5000-fraction",
        "JSN-4",
        b'{"a":' + b"9" * 5000 + b".5}",
        JSON,
        "5,000 digits and a fraction",
    ),
    ("two-to-53", "CNV-2", b'{"a":9007199254740992}', LIMIT, "2^53"),
    ("two-to-64", "CNV-2", b'{"a":18446744073709551616}', LIMIT, "2^64"),
    (
        "two-to-53-less-1",
        "CNV-2",
        b'{"a":9007199254740991}',
        SCHEMA,
        "2^53 - 1 is allowed, the member is not",
    ),
    (
        "surrogates-swapped",
        "JSN-5",
        b'{"a":"\\ude00\\ud83d"}',
        JSON,
        "A pair of surrogates, swapped",
    ),
    ("surrogate-in-a-key", "JSN-5", b'{"\\ud800":1}', JSON, "A lone surrogate in a key"),
    (
        "escaped-pair",
        "JSN-7",
        b'{"a":"\\ud83d\\ude00"}',
        CANONICAL,
        "A right pair of surrogates, escaped",
    ),
    ("empty-key", "JSN-6", b'{"":1}', JSON, "An empty key"),
    ("upper-case-key", "JSN-6", b'{"A":1}', JSON, "A key in upper case"),
    ("key-with-a-space", "JSN-6", b'{"a b":1}', JSON, "A key with a space"),
    ("key-with-a-line-feed", "JSN-6", b'{"a\\n":1}', JSON, "A key that ends with a line feed"),
    ("key-starts-with-a-stop", "JSN-6", b'{".a":1}', JSON, "A key that starts with a full stop"),
    ("key-of-65", "JSN-6", b'{"' + b"a" * 65 + b'":1}', JSON, "A key of 65 characters"),
    (
        "key-of-64",
        "JSN-6",
        b'{"' + b"a" * 64 + b'":1}',
        SCHEMA,
        "A key of 64 characters is allowed, the member is not",
    ),
    ("key-not-ascii", "JSN-6", '{"é":1}'.encode(), JSON, "A key that is not ASCII"),
    ("key-deep", "JSN-6", b'{"a":[[{"B":1}]]}', JSON, "A bad key deep inside"),
    ("proto", "JSN-6", b'{"__proto__":1}', JSON, "The key __proto__"),
    ("space", "JSN-7", b'{"a": 1}', CANONICAL, "A space behind a colon"),
    ("space-in-front", "JSN-7", b' {"a":1}', CANONICAL, "A space in front"),
    ("line-feed-behind-text", "JSN-7", b'{"a":1}\n', CANONICAL, "A line feed behind"),
    ("tab", "JSN-7", b'{"a":\t1}', CANONICAL, "A tab"),
    ("carriage-return", "JSN-7", b'{"a":1\r}', CANONICAL, "A carriage return"),
    ("space-in-an-array", "JSN-7", b'{"a":[ ]}', CANONICAL, "A space in an empty array"),
    ("unsorted", "JSN-7", b'{"b":1,"a":2}', CANONICAL, "Keys not in order"),
    ("unsorted-deep", "JSN-7", b'{"a":{"b":1,"a":2}}', CANONICAL, "Keys not in order, deep inside"),
    (
        "unsorted-digit",
        "JSN-7",
        b'{"a":1,"1":2}',
        CANONICAL,
        "A digit behind a letter: byte order is meant",
    ),
    ("escaped-slash", "JSN-7", b'{"a":"\\/"}', CANONICAL, "An escaped slash"),
    ("escaped-letter", "JSN-7", b'{"a":"\\u0062"}', CANONICAL, "An escaped letter"),
    ("escaped-key", "JSN-7", b'{"\\u0061":1}', CANONICAL, "An escaped key"),
    ("escaped-del", "JSN-7", b'{"a":"\\u007f"}', CANONICAL, "An escaped DEL"),
    ("escaped-e-acute", "JSN-7", b'{"a":"\\u00e9"}', CANONICAL, "An escaped e with acute"),
    ("escaped-line-separator", "JSN-7", b'{"a":"\\u2028"}', CANONICAL, "An escaped U+2028"),
    ("long-escape", "JSN-7", b'{"a":"\\u000a"}', CANONICAL, "The long escape of a line feed"),
    (
        "long-escape-of-backspace",
        "JSN-7",
        b'{"a":"\\u0008"}',
        CANONICAL,
        "The long escape of a backspace",
    ),
    (
        "upper-case-escape",
        "JSN-7",
        b'{"a":"\\u001F"}',
        CANONICAL,
        "An escape with an upper-case digit",
    ),
    ("raw-line-feed", "JSN-1", b'{"a":"\n"}', JSON, "A raw line feed in a string"),
    ("raw-nul", "JSN-1", b'{"a":"\0"}', JSON, "A raw NUL in a string"),
    ("raw-001f", "JSN-1", b'{"a":"\x1f"}', JSON, "A raw U+001F in a string"),
    ("unknown-escape", "JSN-2", b'{"a":"\\x41"}', JSON, "An unknown escape"),
    ("short-escape", "JSN-2", b'{"a":"\\u41"}', JSON, "An escape of two digits"),
    ("escape-with-a-space", "JSN-2", b'{"a":"\\u 041"}', JSON, "An escape with a space"),
    ("trailing-backslash", "JSN-2", b'{"a":"\\', JSON, "A backslash at the end"),
    ("trailing-comma", "JSN-2", b'{"a":1,}', JSON, "A trailing comma"),
    ("trailing-comma-in-an-array", "JSN-2", b'{"a":[1,]}', JSON, "A trailing comma in an array"),
    ("leading-comma", "JSN-2", b'{,"a":1}', JSON, "A leading comma"),
    ("two-values", "JSN-2", b'{"a":1}{}', JSON, "Two values"),
    ("trailing-letter", "JSN-2", b'{"a":1}x', JSON, "A letter behind"),
    ("trailing-nul", "JSN-2", b'{"a":1}\0', JSON, "A NUL behind"),
    ("comment", "JSN-2", b'{"a":1/*x*/}', JSON, "A comment"),
    ("line-comment", "JSN-2", b'{"a":1}//x', JSON, "A line comment"),
    ("single-quotes", "JSN-2", b"{'a':1}", JSON, "Single quotes"),
    ("bare-key", "JSN-2", b"{a:1}", JSON, "A key without quotes"),
    ("number-as-key", "JSN-2", b"{1:1}", JSON, "A number as key"),
    ("python-true", "JSN-2", b'{"a":True}', JSON, "True"),
    ("undefined", "JSN-2", b'{"a":undefined}', JSON, "undefined"),
    ("open", "JSN-2", b'{"a":', JSON, "An object that is not closed"),
    ("open-string", "JSN-2", b'{"a":"', JSON, "A string that is not closed"),
    ("closed-too-often", "JSN-2", b'{"a":1}}', JSON, "A bracket too many"),
    ("wrong-bracket", "JSN-2", b'{"a":[1}', JSON, "The wrong bracket"),
    ("form-feed", "JSN-2", b'{"a":\x0c1}', JSON, "A form feed as white space"),
    ("no-break-space", "JSN-2", '{"a":\u00a01}'.encode(), JSON, "A no-break space as white space"),
    ("depth-16", "JSN-8", nested(16), SCHEMA, "Depth 16 is allowed, the member is not"),
    ("depth-17", "JSN-8", nested(17), LIMIT, "Depth 17"),
    ("depth-17-objects", "JSN-8", b'{"a":' * 17 + b"1" + b"}" * 17, LIMIT, "Depth 17 in objects"),
    (
        "brackets-in-strings",
        "JSN-8",
        b'{"a":"' + b"[" * 100 + b'","b":"\\"[[[[[[[[[[[[[[[[["}',
        SCHEMA,
        "Brackets inside strings are no depth",
    ),
    (
        "string-of-4096",
        "JSN-9",
        b'{"a":"' + b"x" * 4096 + b'"}',
        SCHEMA,
        "A string of 4,096 bytes is allowed, the member is not",
    ),
    ("string-of-4097", "JSN-9", b'{"a":"' + b"x" * 4097 + b'"}', LIMIT, "A string of 4,097 bytes"),
    (
        "string-of-2048-characters",
        "JSN-9",
        b'{"a":"' + E_ACUTE * 2048 + b'"}',
        SCHEMA,
        "2,048 characters of two bytes are allowed",
    ),
    (
        "string-of-2049-characters",
        "JSN-9",
        b'{"a":"' + E_ACUTE * 2049 + b'"}',
        LIMIT,
        "2,049 characters of two bytes",
    ),
    (
        "long-string-deep",
        "JSN-9",
        b'{"a":[{"b":"' + b"x" * 4097 + b'"}]}',
        LIMIT,
        "A long string deep inside",
    ),
]

# The 35 texts whose treatment RFC 8259 leaves to the implementation, as JSONTestSuite names them
# (without `i_`), written anew: what stands where a value is allowed, and what is decided here.
DECIDED: list[tuple[str, bytes, str, str]] = [
    ("number-double-huge-neg-exp", b"[123.456e-789]", JSON, "JSN-4"),
    ("number-huge-exp", b"[0.4e" + b"00669" + b"9" * 160 + b"006]", JSON, "JSN-4"),
    ("number-neg-int-huge-exp", b"[-1e+9999]", JSON, "JSN-4"),
    ("number-pos-double-huge-exp", b"[1.5e+9999]", JSON, "JSN-4"),
    ("number-real-neg-overflow", b"[-123123e100000]", JSON, "JSN-4"),
    ("number-real-pos-overflow", b"[123123e100000]", JSON, "JSN-4"),
    ("number-real-underflow", b"[123e-10000000]", JSON, "JSN-4"),
    ("number-too-big-neg-int", b"[-123123123123123123123123123123]", JSON, "JSN-4"),
    ("number-too-big-pos-int", b"[100000000000000000000]", LIMIT, "CNV-2"),
    (
        "number-very-big-negative-int",
        b"[-237462374673276894279832749832423479823246327846]",
        JSON,
        "JSN-4",
    ),
    ("object-key-lone-2nd-surrogate", b'{"\\uDFAA":0}', JSON, "JSN-5"),
    ("string-1st-surrogate-but-2nd-missing", b'["\\uDADA"]', JSON, "JSN-5"),
    ("string-1st-valid-surrogate-2nd-invalid", b'["\\uD888\\u1234"]', JSON, "JSN-5"),
    ("string-incomplete-surrogate-and-escape-valid", b'["\\uD800\\n"]', JSON, "JSN-5"),
    ("string-incomplete-surrogate-pair", b'["\\uDd1ea"]', JSON, "JSN-5"),
    ("string-incomplete-surrogates-escape-valid", b'["\\uD800\\uD800\\n"]', JSON, "JSN-5"),
    ("string-invalid-lonely-surrogate", b'["\\ud800"]', JSON, "JSN-5"),
    ("string-invalid-surrogate", b'["\\ud800abc"]', JSON, "JSN-5"),
    ("string-invalid-utf-8", b'["\xff"]', JSON, "JSN-1"),
    ("string-inverted-surrogates", b'["\\uDd1e\\uD834"]', JSON, "JSN-5"),
    ("string-iso-latin-1", b'["\xe9"]', JSON, "JSN-1"),
    ("string-lone-second-surrogate", b'["\\uDFAA"]', JSON, "JSN-5"),
    ("string-lone-utf8-continuation-byte", b'["\x81"]', JSON, "JSN-1"),
    ("string-not-in-unicode-range", b'["\xf4\xbf\xbf\xbf"]', JSON, "JSN-1"),
    ("string-overlong-sequence-2-bytes", b'["\xc0\xaf"]', JSON, "JSN-1"),
    ("string-overlong-sequence-6-bytes", b'["\xfc\x83\xbf\xbf\xbf\xbf"]', JSON, "JSN-1"),
    ("string-overlong-sequence-6-bytes-null", b'["\xfc\x80\x80\x80\x80\x80"]', JSON, "JSN-1"),
    ("string-truncated-utf-8", b'["\xe0\xff"]', JSON, "JSN-1"),
    ("string-utf8-invalid-sequence", '["日ш'.encode() + b'\xfa"]', JSON, "JSN-1"),
    ("string-utf8-surrogate-u-d800", b'["\xed\xa0\x80"]', JSON, "JSN-5"),
    ("structure-500-nested-arrays", b"[" * 500 + b"]" * 500, LIMIT, "JSN-8"),
]
INTEGERS = (
    "/tokens/count",
    "/tokens/first_position",
    "/identity/layers_total",
    "/data_bytes",
    "/groups/0/heads",
    "/groups/0/head_start",
    "/groups/0/layers/0",
    "/segmentation/tokens",
    "/segmentation/groups/0/layers",
    "/qualities/0/sets",
    "/qualities/0/data_start",
    "/tracks/0/segments",
    "/tracks/0/data_stop",
)


def in_place(value: bytes) -> bytes:
    """A complete artifact with these bytes as the value of an extension."""
    extension = {"a": {"must_understand": False, "value": "@"}}
    return tiny([EXACT], extensions=extension).build(
        edit_json=lambda text: text.replace(b'"@"', value)
    )


def add_cases(suite: Suite) -> None:
    """All of this module."""
    for slug, requirement, text, code, what in TRAPS:
        fault(
            suite,
            slug,
            requirement + (" JSN-11" if code == SCHEMA else ""),
            bare(text),
            code,
            f"{what}.",
            WHY,
            family="jsn",
            more=[inspect(code)],
            how="The whole manifest is this text; header and digest are right.",
            limits={"json_depth": ["json_depth"], "string_bytes": ["string_bytes"]}.get(
                _limit(slug), []
            ),
        )
    for slug, value, code, requirement in DECIDED:
        fault(
            suite,
            f"i-{slug}"[:60],
            requirement,
            in_place(value),
            code,
            f"The text `i_{slug.replace('-', '_')}` of JSONTestSuite, which RFC 8259 leaves to the implementation.",
            "Here all 35 such texts are decided.",
            family="jsn",
            how="Written anew as the value of an extension in a complete artifact.",
        )
    whole = tiny([EXACT]).build(edit_json=lambda text: text)
    text = whole[128 : 128 + int.from_bytes(whole[56:64], "little")]
    for slug, changed in (
        ("string-utf-16le-with-bom", b"\xff\xfe" + text.decode().encode("utf-16-le")),
        ("string-utf16be-no-bom", text.decode().encode("utf-16-be")),
        ("string-utf16le-no-bom", text.decode().encode("utf-16-le")),
        ("structure-utf-8-bom-empty-object", b"\xef\xbb\xbf{}"),
    ):
        fault(
            suite,
            f"i-{slug}",
            "JSN-1",
            tiny([EXACT]).build(edit_json=lambda _, new=changed: new),
            JSON,
            f"The manifest in the encoding of `i_{slug.replace('-', '_')}` of JSONTestSuite.",
            "Here all 35 such texts are decided.",
            family="jsn",
            how="The text of a valid manifest, encoded anew.",
        )
    values = {
        "empty-containers": b'[[],{},"",0]',
        "depth-12-inside": b"[" * 12 + b"]" * 12,
        "largest-integer": b"9007199254740991",
        "characters": '["😀é\u2028\u007f\uffff\U0010ffff\ufeff"]'.encode(),
        "not-normalised": '["e\u0301","é"]'.encode(),
        "escapes": b'["\\"\\\\\\b\\t\\n\\f\\r\\u0000\\u001f/"]',
        "keys": b'{"0a_b.c-d":1,"a":{"a":null},"a.":true,"a_":false}',
        "longest-string": b'"' + b"x" * 4096 + b'"',
    }
    for slug, value in values.items():
        good(
            suite,
            "jsn",
            f"good-{slug}",
            ["JSN-7", "JSN-1", "JSN-6", "JSN-8", "JSN-9", "CNV-2", "EXT-3"],
            in_place(value),
            [EXACT],
            f"The value of an extension shows `{slug}`.",
            "What the rules allow must not be refused, and its bytes must be the canonical ones.",
        )
    for old, new, code, slug in _in_manifest():
        fault(
            suite,
            slug,
            "JSN-7 ORD-1",
            small(suite).build(edit_json=lambda t, o=old, n=new: t.replace(o, n)),
            code,
            f"In a complete manifest `{old.decode()}` became `{new.decode('utf-8', 'replace')[:60]}`.",
            WHY,
            family="jsn",
        )
    for pointer in INTEGERS:
        for value, name in ((True, "true"), (False, "false"), ("1", "text"), (None, "null")):
            if name in ("text", "null") and pointer != "/tokens/count":
                continue

            def edit(manifest: object, value: object = value, pointer: str = pointer) -> None:
                put(manifest, pointer, value)

            fault(
                suite,
                f"integer-{name}{pointer.replace('/', '-').replace('_', '-')}",
                "JSN-10 ERR-5 MAN-1",
                tiny([EXACT] if "sets" not in pointer else ["near-lossless/stored"]).build(
                    edit_manifest=edit
                ),
                SCHEMA,
                f"`{pointer}` is {json.dumps(value)}.",
                'true is no 1 and "1" is no 1, although many languages think so.',
                family="jsn",
            )
    for value in (0, 1, "true", None):
        extension = {"a": {"must_understand": value, "value": None}}
        fault(
            suite,
            f"boolean-{json.dumps(value).strip(chr(34))}" + ("-text" if value == "true" else ""),
            "JSN-10 EXT-1",
            tiny([EXACT], extensions=extension).build(),
            SCHEMA,
            f"`must_understand` is {json.dumps(value)}.",
            "Only true and false are booleans.",
            family="jsn",
        )


def _limit(slug: str) -> str:
    return (
        "json_depth" if slug.startswith("depth") else "string_bytes" if "string-of" in slug else ""
    )


def _in_manifest() -> Iterable[tuple[bytes, bytes, str, str]]:
    yield b'"count":10', b'"count":1e1', JSON, "manifest-exponent"
    yield b'"count":10', b'"count":10,"count":10', DUPLICATE, "manifest-key-twice"
    yield b'"count":10', b'"count": 10', CANONICAL, "manifest-space"
    yield b'"count":10', b'"count":9007199254740992', LIMIT, "manifest-two-to-53"
    yield b'"count":10', b'"Count":10', JSON, "manifest-upper-case-key"
    yield b'"format":"kvformat"', b'"format":"kvform\\u0061t"', CANONICAL, "manifest-escape"
    yield b'"format":"kvformat"', b'"format":"\xed\xa0\x80"', JSON, "manifest-surrogate"
