"""From how a call ended to what is wrong with it (sections 2 and 3 of the protocol)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from kvconform import protocol
from kvconform.cases import Operation
from kvconform.process import Ended
from kvconform.protocol import AnswerError, shown

ITEM_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}
HASH_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that an answer got wrong; ``kind`` is ``failed`` or ``crashed``."""

    kind: str
    expected: str
    found: str
    detail: str = ""
    requests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """Where the call was told to write, the input, and what was in FILE before and must stay."""

    file: Path
    source: bytes
    kept: bytes | None = None


def judge(operation: Operation, ended: Ended, output: Output, *, batch: bool) -> Problem | None:
    """The first problem of a call, None if the answer is what the case wants."""
    wanted = _wanted(operation)
    try:
        answer = answer_of(ended, batch=batch)
        if answer["verdict"] != "ok":
            _check_nothing_left(output)
    except AnswerError as error:
        return Problem("crashed", wanted, str(error), ended.errors)
    found = _verdict(answer)
    detail = str(answer.get("detail") or "")[:500]
    if not _fits(operation, answer):
        return Problem("failed", wanted, found, detail)
    if answer["verdict"] != "ok":
        return None
    lacking = protocol.missing_members(operation.call, answer)
    if lacking:
        return Problem("failed", wanted, f"ok, but {lacking[0]}", detail)
    return _check_members(operation.expect, answer) or _CHECKS[operation.call](
        operation, answer, output
    )


def answer_of(ended: Ended, *, batch: bool) -> dict[str, Any]:
    """The answer of a call; raises ``AnswerError`` for a crash."""
    if ended.stopped:
        raise AnswerError(ended.stopped)
    if not batch:
        protocol.verdict_of_exit(ended.exit_code)
        answer = protocol.read_answer(ended.output)
        protocol.check_exit(answer, ended.exit_code)
        return answer
    answer = protocol.read_answer(ended.output)
    code = answer.get("exit")
    if type(code) is not int:
        raise AnswerError("the member exit is missing from an answer of batch, or is no number")
    protocol.verdict_of_exit(code)
    protocol.check_exit(answer, code)
    return answer


def _check_nothing_left(output: Output) -> None:
    """ERR-4: the folder of FILE was empty before the call."""
    left = sorted(path.name for path in output.file.parent.iterdir())
    if output.kept is not None:
        if output.file.name not in left or output.file.read_bytes() != output.kept:
            raise AnswerError("a failed call changed or removed the file that was there")
        left.remove(output.file.name)
    if left:
        what = "FILE" if output.file.name in left else f"the file {left[0]}"
        raise AnswerError(f"a failed call left {what} behind")


def _wanted(operation: Operation) -> str:
    codes = operation.expect.get("codes")
    verdict = str(operation.expect["verdict"])
    wanted = f"{verdict} {' or '.join(codes)}" if codes else verdict
    return " or ".join((wanted, *operation.expect.get("accept", ())))


def _verdict(answer: dict[str, Any]) -> str:
    place = f" at {answer['where']}" if answer.get("where") else ""
    return f"{answer['verdict']} {answer['code'] or ''}{place}".strip()


def _fits(operation: Operation, answer: dict[str, Any]) -> bool:
    verdict, code = answer["verdict"], answer["code"]
    if code is not None and code in operation.expect.get("accept", ()):
        return True
    if verdict != operation.expect["verdict"]:
        return False
    if verdict == "ok":
        return True
    return code in operation.expect.get("codes", protocol.CODES[verdict])


def _check_members(expect: dict[str, Any], answer: dict[str, Any]) -> Problem | None:
    for name in ("manifest_digest", "integers", "digests"):
        if name not in expect or expect[name] == answer[name]:
            continue
        wanted, found = expect[name], answer[name]
        if isinstance(wanted, dict):
            keys = sorted({*wanted, *found})
            key = next(key for key in keys if wanted.get(key) != found.get(key))
            return _differs(f"{name} of {key}", wanted.get(key), found.get(key))
        return _differs(name, wanted, found)
    return None


def _differs(name: str, wanted: object, found: object) -> Problem:
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        place = next(
            i for i, pair in enumerate(zip(wanted, found, strict=True)) if len({*pair}) > 1
        )
        return _differs(f"{name}, number {place}", wanted[place], found[place])
    return Problem("failed", f"{name} {shown(wanted)}", shown(found))


def _check_inspect(operation: Operation, answer: dict[str, Any], output: Output) -> Problem | None:
    """The manifest, in canonical form, has the digest that the answer gives for it."""
    del operation, output
    found = blake3(canonical(answer["manifest"])).hexdigest()
    if found == answer["manifest_digest"]:
        return None
    return Problem(
        "failed",
        f"a manifest whose canonical form has the digest {answer['manifest_digest']}",
        f"one with {found}",
    )


def canonical(value: object) -> bytes:
    """The canonical form of section 2.1 of the specification."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def _check_verify(operation: Operation, answer: dict[str, Any], output: Output) -> Problem | None:
    del operation, answer, output
    return None


def _check_decode(operation: Operation, answer: dict[str, Any], output: Output) -> Problem | None:
    """FILE has the size of the selection, and its parts have the digests of the answer."""
    try:
        size = output.file.stat().st_size
    except OSError:
        return Problem("failed", "FILE", "ok, but there is no FILE")
    parts = part_sizes(output.source, operation.arguments)
    total = sum(parts.values())
    if size != total:
        return Problem("failed", f"a FILE of {total:,} bytes", f"{size:,} bytes")
    if set(parts) != set(answer["digests"]):
        return Problem("failed", f"digests of {', '.join(parts)}", shown(list(answer["digests"])))
    with output.file.open("rb") as file:
        for name, length in parts.items():
            hasher, left = blake3(), length
            while left:
                data = file.read(min(left, HASH_BYTES))
                hasher.update(data)
                left -= len(data)
            if hasher.hexdigest() != answer["digests"][name]:
                wanted = f"{name} in FILE with digest {answer['digests'][name]}"
                return Problem("failed", wanted, hasher.hexdigest())
    return None


_CHECKS: Final = {
    "inspect": _check_inspect,
    "verify": _check_verify,
    "decode": _check_decode,
    "encode": _check_verify,  # the file is for kvconform.writing
}


def part_sizes(source: bytes, arguments: tuple[str, ...]) -> dict[str, int]:
    """Bytes of each group in FILE, from the manifest of a file that is known to be valid."""
    manifest_bytes = int.from_bytes(source[56:64], "little")
    manifest = json.loads(source[128 : 128 + manifest_bytes])
    given = dict(zip(arguments[::2], arguments[1::2], strict=False))
    count = manifest["tokens"]["count"]
    sizes = {}
    for group in manifest["groups"]:
        layers = _inside(given.get("--layers"), 0, group["layers"][-1] + 1)
        chosen = [layer for layer in group["layers"] if layers[0] <= layer < layers[1]]
        if chosen:
            last_head = group["head_start"] + group["heads"]
            heads = _inside(given.get("--heads"), group["head_start"], last_head)
            tokens = _tokens(group["tokens"], given.get("--tokens"), count)
            shape = (len(chosen), tokens, heads[1] - heads[0], group["head_dim"])
            sizes[group["name"]] = prod(shape) * ITEM_BYTES[group["dtype"]]
    return sizes


def _tokens(held: dict[str, Any], wanted: str | None, count: int) -> int:
    if held["kind"] == "state":
        return 1
    first, last = _inside(wanted, held.get("held_start", 0), count)
    return last - first


def _inside(text: str | None, start: int, stop: int) -> tuple[int, int]:
    """The part of ``A:B`` inside [start, stop); all of it without a text."""
    if text is None:
        return start, stop
    begin, _, end = text.partition(":")
    first = min(max(int(begin), start), stop)
    return first, max(first, min(int(end), stop))
