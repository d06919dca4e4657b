"""``kvformat demo``: the whole story on a small real cache that comes with the package."""

from __future__ import annotations

import contextlib
import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from numpy.typing import NDArray

from kvformat.artifact import open_artifact
from kvformat.cache import Cache
from kvformat.cli.inputs import Input, read_input
from kvformat.cli.inspect import show
from kvformat.cli.outputs import require_name, write_bytes
from kvformat.cli.show import emit, facts, heading, say, table, whole_line
from kvformat.cli.sizes import track_size
from kvformat.cli.statements import Given, make_identity
from kvformat.cli.verify import for_people
from kvformat.errors import KvformatError, StorageError
from kvformat.expectations import Expectation
from kvformat.storage import storage_errors
from kvformat.verification import verify
from kvformat.writer import WriteReport, write

SAMPLE: Final = "data/smollm2-135m-sample.safetensors"
TRACKS: Final = "hevc,zstd,exact"
NAME: Final = "prefix.kvf"
TOKENS: Final = "tokens.json"
DAMAGED: Final = "damaged.kvf"


@click.command(name="demo")
@click.option("--keep", metavar="DIR", help=f"Leave {NAME} and {TOKENS} in this folder.")
def command(keep: str | None) -> None:
    """Encode, inspect, verify, restore and damage a small real cache.

    The cache is that of SmolLM2-135M-Instruct after 86 tokens; it comes with the package.
    """
    with _folder(keep) as folder, as_file(files("kvformat") / SAMPLE) as sample:
        source = read_input(str(sample))
        report = _encode(folder / NAME, source)
        _inspect(folder / NAME)
        _check(folder / NAME)
        _restore(folder / NAME, report, source.cache)
        _damage(folder)
        _ask_for_other_tokens(folder / NAME, source)
        ids = json.dumps(np.array(source.token_ids).tolist())
        write_bytes(str(folder / TOKENS), f"{ids}\n".encode(), overwrite=False)
    say(_REASON, "dim")
    say(_REMARK, "dim")
    emit("")
    _end(keep)


def _end(keep: str | None) -> None:
    """What to do next."""
    if keep is None:
        say("Nothing is left behind. To keep the files: kvformat demo --keep DIR")
        return
    path, ids = (str(Path(keep) / name) for name in (NAME, TOKENS))
    say("Left for you:")
    whole_line(f"  {path}")
    whole_line(f"  {ids}")
    say("Go on with:")
    whole_line(f"  kvformat inspect {shlex.quote(path)}")
    whole_line(f"  kvformat verify {shlex.quote(path)} --expect-token-ids {shlex.quote(ids)}")


_REASON: Final = (
    "About 10 % error on values is intended: values get a coarser step than keys. An error of a "
    "key moves the model's attention, errors of values average out, so this split keeps the "
    "model's answers closer at the same size. What counts is how far the model diverges, not the "
    "error: see spec/rationale.md, record 17."
)


_REMARK: Final = (
    "86 tokens are very few. Parameters per channel and the first four tokens, which are kept "
    "exactly, weigh far more here than in a cache of thousands of tokens: expect fewer bits per "
    "value there. Whether a quality is good enough for your model is yours to measure."
)


_EXPLANATION: Final = (
    "keys, values: root mean square of the error over that of the original. same bits: as in the "
    "original. hevc and zstd hold the same integers, so they restore the same bits."
)


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    """A folder that vanishes, or the one to keep."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="kvformat-demo-") as name:
            yield Path(name)
        return
    folder = Path(keep)
    require_name(keep)
    with storage_errors(keep, "io.write", "making the folder"):
        for name in (NAME, TOKENS):
            if (folder / name).exists():
                raise StorageError(
                    "io.exists",
                    "the target exists already",
                    where=str(folder / name),
                    next_step="Choose another folder",
                )
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException as error:
        if isinstance(error, StorageError) and error.code == "io.exists":
            raise  # someone else's file
        for name in (NAME, TOKENS):
            (folder / name).unlink(missing_ok=True)
        raise


def _encode(path: Path, source: Input) -> WriteReport:
    heading("1. Encode the cache of 86 tokens as one file with three tracks")
    report = write(
        path,
        source.cache,
        identity=make_identity(Given(), source, bound=True),
        token_ids=source.token_ids,
        tracks=TRACKS,
    )
    manifest = report.manifest
    emit(
        facts(
            [
                ("model", manifest.identity.model.id),
                ("values", f"{report.values:,}, bfloat16 as the model held them"),
                ("file", f"{report.file_bytes:,} bytes, written in {report.seconds:.1f} s"),
                ("content id", manifest.content_id),
            ]
        ),
        "",
    )
    return report


def _inspect(path: Path) -> None:
    heading(f"2. Inspect it, as kvformat inspect {NAME} does")
    with open_artifact(path) as artifact:
        show(artifact, NAME)
    emit("")


def _check(path: Path) -> None:
    heading("3. Verify every byte; video is decoded in a process of its own")
    report = verify(path)
    counts = ", ".join(f"{count:,} {what}" for what, count in report.checked.items())
    rows: list[tuple[str, object]] = [("ok", counts)]
    rows += [
        ("" if index else "not checked", sentence)
        for index, sentence in enumerate(for_people(report.not_checked))
    ]
    emit(facts(rows), "")


def _restore(path: Path, report: WriteReport, cache: Cache) -> None:
    heading("4. Restore each track and compare with the original")
    original = _by_role(
        {
            f"layers.{layer}.{item.group.role}": array
            for item in cache.groups
            for layer, array in zip(item.group.layers, item.layers, strict=True)
        }
    )
    rows = []
    with open_artifact(path) as artifact:
        for track in report.manifest.tracks:
            found = _by_role(artifact.read(track=track.name, check=True).tensors())
            size = track_size(report.manifest, track)
            same = all(found[role].tobytes() == original[role].tobytes() for role in original)
            errors = [_relative_error(found[role], original[role]) for role in ("key", "value")]
            rows.append(
                (
                    track.name,
                    f"{size.size_bytes:,}",
                    f"{size.bits_per_value:.2f}",
                    *(f"{error:.2%}" if error else "0" for error in errors),
                    "yes" if same else "no",
                )
            )
    columns = ("track", ">bytes", ">bits/value", ">keys", ">values", "same bits")
    emit(table(columns, rows))
    say(_EXPLANATION)
    emit("")


def _by_role(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """All layers of a role as one array."""
    roles: dict[str, list[NDArray[Any]]] = {}
    for name in sorted(tensors):
        roles.setdefault(name.rsplit(".", 1)[1], []).append(tensors[name])
    return {role: np.stack(arrays) for role, arrays in roles.items()}


def _relative_error(found: NDArray[Any], original: NDArray[Any]) -> float:
    x = original.astype(np.float64)
    return float(np.sqrt(np.square(found.astype(np.float64) - x).sum() / np.square(x).sum()))


def _damage(folder: Path) -> None:
    heading("5. Flip one bit in the middle of a copy")
    data = bytearray((folder / NAME).read_bytes())
    data[len(data) // 2] ^= 1
    path = folder / DAMAGED
    try:
        path.write_bytes(data)
        _expect_refusal(lambda: verify(path))
    finally:
        path.unlink(missing_ok=True)


def _ask_for_other_tokens(path: Path, source: Input) -> None:
    heading("6. Ask for the cache of another prompt: one token id of 86 differs")
    ids = np.array(source.token_ids)
    ids[40] += 1
    _expect_refusal(lambda: open_artifact(path, expect=Expectation(token_ids=ids)).close())


def _expect_refusal(act: Any) -> None:
    """Show the refusal; a demo without it is a bug."""
    try:
        act()
    except KvformatError as error:
        emit(
            facts(
                [
                    ("refused", f"[{error.code}] {error.message}"),
                    ("where", error.where),
                    ("exit code", f"{error.exit_code} ({error.verdict})"),
                ]
            ),
            "",
        )
        return
    raise RuntimeError("the damaged or foreign cache was accepted")
