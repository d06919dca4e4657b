"""What an implementation may answer: the form of section 2 and 3 of the protocol.

Pure functions on bytes and JSON values. ``read_answer`` raises ``AnswerError`` for whatever is a
crash; a wrong but well-formed answer is for ``kvconform.judge``.
"""

from __future__ import annotations

import json
import re
import signal
from typing import Any, Final

PROTOCOL: Final = 1
FORMAT: Final = "0.9"
LEVELS: Final = ("core", "uncommon", "faulty", "hostile", "future", "gold")
EXIT_CODES: Final = {
    "ok": 0,
    "usage": 64,
    "invalid": 65,
    "unsupported": 69,
    "io_error": 74,
    "mismatch": 76,
}
CODES: Final = {
    "invalid": (
        "header.magic",
        "header.check",
        "header.field",
        "file.size",
        "manifest.digest",
        "manifest.json",
        "manifest.duplicate-key",
        "manifest.canonical",
        "manifest.schema",
        "manifest.semantics",
        "table.digest",
        "table.record",
        "set.digest",
        "set.content",
        "segment.digest",
        "segment.side",
        "segment.payload",
        "segment.bitstream",
        "segment.integers",
        "segment.filler",
        "data.padding",
        "data.source",
        "profile.content",
        "limit.exceeded",
    ),
    "unsupported": (
        "version.unknown",
        "feature.unknown",
        "extension.unknown",
        "codec.unavailable",
        "track.none",
        "profile.missing",
    ),
    "mismatch": (
        "identity.field",
        "identity.missing",
        "identity.tokens",
        "tokens.length",
    ),
    "io_error": (
        "io.not-found",
        "io.exists",
        "io.denied",
        "io.read",
        "io.timeout",
        "io.range",
        "io.changed",
        "io.write",
        "io.short",
    ),
    "usage": (
        "usage.argument",
        "usage.selection",
        "input.shape",
        "input.dtype",
        "input.non-finite",
        "input.range",
        "input.identity",
    ),
}
"""The error codes of spec/registry.md by verdict; a test holds the two together."""

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_WHY: Final = {
    1: "what an uncaught exception gives in many languages",
    2: "what many argument parsers give",
    70: "an internal error",
}


class AnswerError(Exception):
    """Standard output or the exit code is no answer of the protocol: a crash."""


def verdict_of_exit(code: int) -> str:
    """The verdict that an exit code stands for; raises ``AnswerError`` for all other codes."""
    for verdict, number in EXIT_CODES.items():
        if code == number:
            return verdict
    if code < 0:
        raise AnswerError(f"ended by {_signal_name(-code)}")
    why = f", {_WHY[code]}" if code in _WHY else ""
    raise AnswerError(f"exit code {code}{why}")


def _signal_name(number: int) -> str:
    try:
        return f"signal {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise AnswerError("the answer has a key twice")
    return result


def _no_constant(text: str) -> Any:
    raise AnswerError(f"the answer holds {text}, which is not JSON")


def read_answer(data: bytes) -> dict[str, Any]:
    """The one JSON object in ``data``, with ``protocol``, ``verdict`` and ``code`` in form."""
    if not data.strip():
        raise AnswerError("nothing on standard output, expected one JSON object")
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise AnswerError(f"standard output is not one JSON object: {_short(error)}") from None
    if not isinstance(value, dict):
        raise AnswerError(f"standard output is a JSON {type(value).__name__}, expected an object")
    _check_head(value)
    return value


def _check_head(value: dict[str, Any]) -> None:
    protocol, verdict, code = (value.get(key) for key in ("protocol", "verdict", "code"))
    if type(protocol) is not int or protocol != PROTOCOL:
        raise AnswerError(f"protocol is {shown(protocol)}, expected {PROTOCOL}")
    if not isinstance(verdict, str) or verdict not in EXIT_CODES:
        raise AnswerError(f"verdict is {shown(verdict)}, expected one of {', '.join(EXIT_CODES)}")
    if "code" not in value or not (code is None or isinstance(code, str)):
        raise AnswerError("the member code is missing, or neither a string nor null")
    if (code is None) != (verdict == "ok"):
        raise AnswerError(f"code is {shown(code)} with verdict {verdict}")


def check_exit(answer: dict[str, Any], code: int) -> None:
    """The exit code belongs to the verdict."""
    wanted = EXIT_CODES[answer["verdict"]]
    if code != wanted:
        raise AnswerError(f"exit code {code} with verdict {answer['verdict']}, expected {wanted}")


def is_digest(value: object) -> bool:
    """Whether ``value`` is 64 lower-case hexadecimal digits."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _is_list_of_text(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_digest_lists(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(item, list) and all(map(is_digest, item)) for item in value.values()
    )


def _is_digests(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_digest, value.values()))


_MEMBERS: Final = {
    "info": (
        ("name", lambda value: isinstance(value, str) and bool(value), "a string"),
        ("version", lambda value: isinstance(value, str) and bool(value), "a string"),
        ("formats", _is_list_of_text, "a list of strings"),
        ("codecs", _is_list_of_text, "a list of strings"),
        ("features", _is_list_of_text, "a list of strings"),
        ("levels", _is_list_of_text, "a list of strings"),
        ("batch", lambda value: isinstance(value, bool), "a boolean"),
    ),
    "inspect": (
        ("manifest", lambda value: isinstance(value, dict), "an object"),
        ("manifest_digest", is_digest, "64 lower-case hexadecimal digits"),
    ),
    "verify": (
        ("manifest_digest", is_digest, "64 lower-case hexadecimal digits"),
        ("integers", _is_digest_lists, "an object of lists of digests"),
    ),
    "decode": (("digests", _is_digests, "an object of digests"),),
    "encode": (("manifest_digest", is_digest, "64 lower-case hexadecimal digits"),),
}


def missing_members(call: str, answer: dict[str, Any]) -> list[str]:
    """What an answer ``ok`` to ``call`` lacks, one sentence each."""
    return [
        f"the member {name} is {'of another form' if name in answer else 'missing'}, "
        f"expected {form}"
        for name, good, form in _MEMBERS[call]
        if name not in answer or not good(answer[name])
    ]


def check_info(answer: dict[str, Any]) -> list[str]:
    """What is wrong with an answer to ``info``; empty if the suite can go on."""
    if answer["verdict"] != "ok":
        return [f"info answers {answer['verdict']}, expected ok"]
    wrong = missing_members("info", answer)
    if wrong:
        return wrong
    if FORMAT not in answer["formats"]:
        wrong.append(f"formats does not list {FORMAT}, the version of this suite")
    if "stored" not in answer["codecs"]:
        wrong.append("codecs does not list stored, which every reader has")
    if not answer["levels"] or not set(answer["levels"]) <= set(LEVELS):
        wrong.append(f"levels must name some of {', '.join(LEVELS)}")
    if not _is_list_of_text(answer.get("encode", [])):
        wrong.append("encode is no list of track names")
    if not isinstance(answer.get("http", False), bool):
        wrong.append("http is neither true nor false")
    return wrong


def shown(value: object, limit: int = 200) -> str:
    """A JSON value in one short line."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]
