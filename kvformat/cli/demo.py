"""``kvformat demo``: the whole story on a small real cache that comes with the package."""

from __future__ import annotations

import contextlib
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
from kvformat.cli.show import emit, facts, heading, say, table, whole_line
from kvformat.cli.sizes import track_size
from kvformat.cli.statements import Given, make_identity
from kvformat.errors import KvformatError, StorageError
from kvformat.expectations import Expectation
from kvformat.storage import storage_errors
from kvformat.verification import verify
from kvformat.writer import WriteReport, write

SAMPLE: Final = "data/smollm2-135m-sample.safetensors"
TRACKS: Final = "hevc,zstd,exact"
NAME: Final = "demo.kvf"
DAMAGED: Final = "damaged.kvf"


@click.command(name="demo")
@click.option("--keep", metavar="DIR", help="Leave the artifact in this folder.")
def command(keep: str | None) -> None:
    """Encode, verify, restore and damage a small real cache.

    The cache is that of SmolLM2-135M-Instruct after 86 tokens; it comes with the package.
    """
    with _folder(keep) as folder, as_file(files("kvformat") / SAMPLE) as sample:
        source = read_input(str(sample))
        report = _encode(folder / NAME, source)
        _check(folder / NAME)
        _restore(folder / NAME, report, source.cache)
        _damage(folder)
        _ask_for_other_tokens(folder / NAME, source)
    say(_REMARK, "dim")
    if keep is not None:
        say("Left for you. Look at it:")
        whole_line(f"  kvformat inspect {shlex.quote(str(Path(keep) / NAME))}")


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
    if (folder / NAME).exists():
        raise StorageError(
            "io.exists",
            "the target exists already",
            where=str(folder / NAME),
            next_step="Choose another folder",
        )
    with storage_errors(keep, "io.write", "making the folder"):
        folder.mkdir(parents=True, exist_ok=True)
    yield folder


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


def _check(path: Path) -> None:
    heading("2. Verify every byte; video is decoded in a process of its own")
    report = verify(path)
    counts = ", ".join(f"{count:,} {what}" for what, count in report.checked.items())
    rows: list[tuple[str, object]] = [("ok", counts)]
    rows += [("not checked", item.split(":")[0]) for item in report.not_checked]
    labels = "; ".join(str(value) for label, value in rows if label == "not checked")
    emit(facts([rows[0], ("not checked", f"{labels} (kvformat verify explains)")]), "")


def _restore(path: Path, report: WriteReport, cache: Cache) -> None:
    heading("3. Restore each track and compare with the original")
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
    heading("4. Flip one bit in the middle of a copy")
    data = bytearray((folder / NAME).read_bytes())
    data[len(data) // 2] ^= 1
    path = folder / DAMAGED
    try:
        path.write_bytes(data)
        _expect_refusal(lambda: verify(path))
    finally:
        path.unlink(missing_ok=True)


def _ask_for_other_tokens(path: Path, source: Input) -> None:
    heading("5. Ask for the cache of another prompt: one token id of 86 differs")
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
