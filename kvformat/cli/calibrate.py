"""``kvformat calibrate``: a calibration profile from a model and text."""

from __future__ import annotations

from pathlib import Path

import click

from kvformat.cli.options import UTF8
from kvformat.cli.outputs import check_target, require_suffix, write_bytes
from kvformat.cli.show import emit, facts, heading
from kvformat.cli.text import write_error, write_json
from kvformat.errors import UsageError
from kvformat.profile_shelf import SUFFIX, load_profile
from kvformat.profiles import Profile
from kvformat.storage import storage_errors


@click.command(name="calibrate")
@click.argument("output", metavar="OUT")
@click.option("--model", required=True, metavar="DIR", help="A transformers model on this machine.")
@click.option("--model-id", type=UTF8, metavar="ID", help="What artifacts call it. Default: DIR.")
@click.option("--gguf", metavar="NAME", help="The GGUF file in DIR that holds the weights.")
@click.option("--text", "texts", multiple=True, required=True, metavar="FILE", help="Repeatable.")
@click.option("--windows", type=click.IntRange(1, 64), default=4, show_default=True, metavar="N",
              help="Stretches of 2,024 tokens of the text.")  # fmt: skip
@click.option("--samples", type=click.IntRange(1, 64), default=4, show_default=True, metavar="N",
              help="Continuations drawn from the model per stretch.")  # fmt: skip
@click.option("--step", "steps", multiple=True, metavar="QUALITY=STEP",
              help="Only these qualities, with these steps. Repeatable.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    output: str,
    *,
    model: str,
    model_id: str | None,
    gguf: str | None,
    texts: tuple[str, ...],
    windows: int,
    samples: int,
    steps: tuple[str, ...],
    overwrite: bool,
    as_json: bool,
) -> None:
    """Measure which errors of a model's cache matter, and write the profile OUT (.kvp).

    kvformat encode --profile OUT then makes much smaller files of the same quality; readers need
    the same profile. Calibrate on text like that of your requests, not on what you measure with.
    """
    require_suffix(output, SUFFIX)
    check_target(output, texts[0], overwrite=overwrite)
    chosen = _steps(steps)
    text = "\n\n".join(_read(name) for name in texts)
    data = _calibrate(model, gguf, text, model_id=model_id, steps=chosen,
                      windows=windows, samples=samples)  # fmt: skip
    write_bytes(output, memoryview(data), overwrite=overwrite)
    profile = load_profile(output)
    if as_json:
        write_json({"profile": profile.digest, "bytes": len(data), "file": output})
    else:
        _show(output, len(data), profile)


def _steps(given: tuple[str, ...]) -> dict[str, float] | None:
    """Qualities and steps, None for the defaults."""
    found: dict[str, float] = {}
    for item in given:
        name, _, value = item.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = 0.0
        if not 1e-9 < found[name] < 1e3:
            raise UsageError(
                "usage.argument", "this is no step", expected="balanced=0.0024", found=ascii(item)
            )
    return found or None


def _read(name: str) -> str:
    with storage_errors(name, "io.read", "reading the text"):
        return Path(name).read_text(encoding="utf-8", errors="replace")


def _calibrate(
    model: str,
    gguf: str | None,
    text: str,
    *,
    model_id: str | None,
    steps: dict[str, float] | None,
    windows: int,
    samples: int,
) -> bytes:
    """Load the model, as ``evaluate`` does, and calibrate."""
    try:
        from kvformat.integrations.calibration import STEPS, beginning_of, calibrate
        from kvformat.integrations.model_loading import load_model
    except ImportError as error:
        raise UsageError(
            "usage.argument",
            f"calibration needs torch and transformers: {error}",
            next_step="pip install 'kvformat[transformers]'",
        ) from error
    loaded = load_model(model, gguf=gguf)
    ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    return calibrate(
        loaded.model,
        ids,
        beginning=beginning_of(loaded.tokenizer),
        model_id=model_id or loaded.model_id,
        steps=steps or STEPS,
        windows=windows,
        samples=samples,
        progress=write_error,
    )


def _show(output: str, size_bytes: int, profile: Profile) -> None:
    heading(f"wrote {output}")
    qualities = list(dict.fromkeys(record.quality for record in profile.records))
    layers = {record.layer for record in profile.records}
    rows: list[tuple[str, object]] = [
        ("digest", profile.digest),
        ("model", profile.model.id),
        ("qualities", ", ".join(qualities)),
        ("layers", len(layers)),
        ("bytes", f"{size_bytes:,}"),
    ]
    emit(facts(rows))
