"""``kvconform check-cases``: the case folders keep their own rules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from jsonschema import Draft202012Validator

from kvconform.behaviours import BEHAVIOURS
from kvconform.cases import Case, CaseError, Operation, case_files, parse, read_input, schema
from kvconform.protocol import CODES, LEVELS

LARGEST_INPUT: Final = 65_536
"""Of a file as it is in the folder; see ``cases.LARGEST_INFLATED`` for one that is compressed."""
_FILE_OPTIONS: Final = ("--expect-token-ids", "--expect-content", "--profile", "--salt-file")
_OPTIONS: Final = (*_FILE_OPTIONS, "--expect-model", "--track", "--tokens", "--layers", "--heads")
_HTTP_OPTIONS: Final = ("--timeout",)
_RESULTS: Final = {
    "inspect": {"manifest_digest"},
    "verify": {"manifest_digest", "integers"},
    "decode": {"digests"},
    "encode": {"encoded"},
}


def check_cases(root: Path) -> list[str]:
    """All problems of the cases below ``root``, one line each."""
    validator = Draft202012Validator(schema("case"))
    problems: list[str] = []
    seen: dict[str, Path] = {}
    for path in case_files(root):
        name = path.parent.relative_to(root).as_posix()
        try:
            value = json.loads(path.read_bytes())
        except ValueError as error:
            problems.append(f"{name}: case.json is not JSON: {error}")
            continue
        wrong = [f"{item.json_path}: {item.message}" for item in validator.iter_errors(value)]
        wrong = wrong or list(_check_case(value, path.parent))
        if not wrong and seen.setdefault(value["id"], path) != path:
            wrong.append(f"the id is also that of {seen[value['id']].parent}")
        problems += [f"{name}: {item}" for item in wrong]
    problems += _strays(root)
    return problems


def _strays(root: Path) -> Iterator[str]:
    """Folders of a level without ``case.json``."""
    for level in LEVELS:
        for folder in sorted((root / level).glob("*/")):
            if not (folder / "case.json").is_file():
                yield f"{level}/{folder.name}: there is no case.json"


def _check_case(value: dict[str, Any], folder: Path) -> Iterator[str]:
    case = parse(value, folder)
    if folder.name != case.id:
        yield f"the folder's name is not the id {case.id}"
    if folder.parent.name != case.level:
        yield f"the folder is in {folder.parent.name}, the level is {case.level}"
    if not (folder / "README.md").is_file():
        yield "there is no README.md"
    absent = all(item.expect.get("codes") == ["io.not-found"] for item in case.operations)
    for path in (case.input, *(folder / item for item in case.files)):
        if not path.is_file():
            if not (absent and path == case.input):
                yield f"there is no file {path.name}"
        elif path.stat().st_size > LARGEST_INPUT:
            yield f"{path.name} has more than {LARGEST_INPUT:,} bytes"
    known = {"case.json", "README.md", case.input.name, *case.files}
    for path in sorted(folder.iterdir()):
        if path.name not in known:
            yield f"the file {path.name} is not listed"
    try:
        data = read_input(case.input)
    except CaseError as error:
        yield str(error)
        return
    size = None if data is None else len(data)
    if ("http" in case.requires) != any(item.http for item in case.operations):
        yield "http must be in requires exactly if an operation reads over HTTP"
    if any(item.call == "encode" for item in case.operations):
        yield from _check_encode(case)
    for index, operation in enumerate(case.operations):
        for item in _check_operation(case, operation, size):
            yield f"operation {index}: {item}"


def _check_operation(case: Case, operation: Operation, size: int | None) -> Iterator[str]:
    expect = operation.expect
    verdict = expect["verdict"]
    if operation.call == "encode" and verdict == "ok" and "encoded" not in expect:
        yield "encode with verdict ok says nothing of the file"
    if verdict == "ok":
        extra = set(expect) - {"verdict"} - _RESULTS[operation.call]
    else:
        extra = set(expect) - {"verdict", "codes"}
        unknown = set(expect.get("codes", ())) - set(CODES[verdict])
        if unknown:
            yield f"no codes of the verdict {verdict}: {', '.join(sorted(unknown))}"
    yield from _check_http(operation)
    extra -= {"accept", "requests"} if operation.http else set()
    if extra:
        yield f"does not fit {operation.call} with verdict {verdict}: {', '.join(sorted(extra))}"
    yield from _check_arguments(case, operation)
    for variant in operation.variants if size is not None else ():
        fits = variant.place < (size or 0)
        if variant.kind == "flip" and not (fits and 0 < variant.mask < 256):
            yield f"a flip outside the input or without effect: {variant}"
        if variant.kind == "cut" and not fits:
            yield f"a cut that cuts nothing: {variant}"


def _check_encode(case: Case) -> Iterator[str]:
    """SPEC keeps its schema and names files of the case; all operations encode it once."""
    if any(item.call != "encode" or item.changes_input for item in case.operations):
        yield "encode beside another call, or with flips or cuts"
    if not any(item.startswith("encode:") for item in case.requires):
        yield "encode, but no track that a writer must declare is in requires"
    try:
        value = json.loads(case.input.read_bytes())
    except (ValueError, OSError) as error:
        yield f"{case.input.name} is not JSON: {error}"
        return
    wrong = list(Draft202012Validator(schema("encode")).iter_errors(value))
    if wrong:
        yield from (f"{case.input.name}: {item.json_path}: {item.message}" for item in wrong)
        return
    named = {group["file"] for group in value["groups"]}
    if named != set(case.files):
        yield f"files are {sorted(case.files)}, {case.input.name} names {sorted(map(str, named))}"


def _check_http(operation: Operation) -> Iterator[str]:
    if not operation.http:
        return
    if operation.http not in BEHAVIOURS:
        yield f"no behaviour of the server: {operation.http}"
    if operation.call == "encode":
        yield "encode does not read over HTTP"
    every = {code for codes in CODES.values() for code in codes}
    unknown = set(operation.expect.get("accept", ())) - every
    if unknown:
        yield f"no codes: {', '.join(sorted(unknown))}"


def _check_arguments(case: Case, operation: Operation) -> Iterator[str]:
    if operation.expect["verdict"] == "usage":
        return  # wrong arguments may be what the case is about
    if operation.call == "decode" and "--track" not in operation.arguments:
        yield "decode without --track"
    for option, value in zip(operation.arguments[::2], operation.arguments[1::2], strict=False):
        if option not in (*_OPTIONS, *(_HTTP_OPTIONS if operation.http else ())):
            yield f"no option of the protocol: {option}"
        if option in _FILE_OPTIONS and value not in case.files:
            yield f"{option} names {value}, which is not in files"
    if len(operation.arguments) % 2:
        yield "an option without value"
