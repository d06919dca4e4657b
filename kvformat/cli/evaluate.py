"""``kvformat evaluate``: what the restored cache does to the model's output."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvformat.artifact import Artifact, open_artifact
from kvformat.cli import evaluate_show
from kvformat.cli.evaluate_plot import PLOTS, draw_all
from kvformat.cli.layer_sizes import layer_sizes
from kvformat.cli.options import UTF8, read_salt, read_token_ids
from kvformat.cli.outputs import check_target
from kvformat.cli.plan_plot import require_matplotlib
from kvformat.cli.show import progress
from kvformat.cli.sizes import count_values, track_size
from kvformat.cli.text import warn, write_json
from kvformat.errors import MismatchError, UsageError
from kvformat.expectations import Expectation
from kvformat.storage import storage_errors
from kvformat.tracks import Track

if TYPE_CHECKING:
    from kvformat.integrations.evaluated_tracks import Original, Tracks
    from kvformat.integrations.evaluation import Evaluation
    from kvformat.integrations.model_loading import LoadedModel

POSITIVE = click.IntRange(min=1)
NATURAL = click.IntRange(min=0)
DTYPES: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of ``evaluate``, as click hands them over."""

    model: str
    model_id: str | None
    gguf: str | None
    texts: tuple[str, ...]
    token_ids: str | None
    skip: int
    tracks: tuple[str, ...]
    fp8: bool
    reference: str | None
    profiles: tuple[str, ...]
    salt_file: str | None
    tokens: int
    greedy: int
    turns: int
    no_needle: bool
    depths: int
    context: int | None
    dtype: str
    device: str
    plots: str | None
    overwrite: bool
    as_json: bool


@click.command(name="evaluate")
@click.argument("url", metavar="URL")
@click.option(
    "--model",
    required=True,
    metavar="M",
    help="A directory with a transformers model, "
    "or an id; in a checkout also smollm2 or gemma3-270m.",
)
@click.option("--model-id", type=UTF8, metavar="ID", help="What artifacts call it. Default: M.")
@click.option("--gguf", metavar="NAME", help="The GGUF file in M that holds the weights.")
@click.option(
    "--text",
    "texts",
    multiple=True,
    metavar="FILE",
    help="The text, which begins with "
    "the cached tokens and goes on. Repeatable: joined by an empty line.",
)
@click.option(
    "--token-ids",
    metavar="FILE",
    help="Its token ids in place of --text: a JSON list, a .npy file, or integers.",
)
@click.option(
    "--skip",
    type=NATURAL,
    default=0,
    metavar="N",
    help="Tokens of the text before the cached ones.",
)
@click.option(
    "--track",
    "tracks",
    type=UTF8,
    multiple=True,
    metavar="T",
    help="A track, quality or codec. Repeatable. Default: one track per quality.",
)
@click.option("--fp8", is_flag=True, help="Also evaluate the cache as float8_e4m3fn, a yardstick.")
@click.option(
    "--reference",
    metavar="URL2",
    help="Another artifact of the same cache with an exact "
    "track, to compare with. Default: an exact track of URL, or else the model "
    "computes the cache.",
)
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    metavar="P",
    help="Where calibration profiles are: a file or directory. Repeatable.",
)
@click.option("--salt-file", metavar="FILE", help="The tenant's salt: all bytes of this file.")
@click.option(
    "--tokens",
    type=click.IntRange(min=2),
    default=1000,
    show_default=True,
    metavar="N",
    help="Tokens behind the cache that are compared.",
)
@click.option(
    "--greedy",
    type=POSITIVE,
    default=64,
    show_default=True,
    metavar="N",
    help="Tokens to generate.",
)
@click.option(
    "--turns",
    type=NATURAL,
    default=3,
    show_default=True,
    metavar="N",
    help="Turns in which the cache is stored again and again; 0 leaves them out.",
)
@click.option("--no-needle", is_flag=True, help="Leave out needle retrieval, the longest part.")
@click.option(
    "--depths",
    type=click.IntRange(1, 32),
    default=5,
    show_default=True,
    metavar="N",
    help="Needles, from the start of the context to its end.",
)
@click.option(
    "--context",
    type=POSITIVE,
    metavar="N",
    help="Tokens of the needle test. Default: the model's full context.",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default=DTYPES[0],
    show_default=True,
    help="Dtype of the model. Others than float32 add noise of their own.",
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="D",
    help="cpu, cuda, or auto to spread the model over GPUs.",
)
@click.option("--plots", metavar="DIR", help=f"Write {', '.join(PLOTS)} into this folder.")
@click.option("--overwrite", is_flag=True, help="Replace plots that exist.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(url: str, **given: Any) -> None:
    """Measure what the cache in the artifact URL does to the model's output.

    The model reads the text behind the cached tokens on the original and on the restored cache.
    Reported: the change of cross-entropy, KL divergence and agreement of the next token, where
    greedy generation departs, needles found by depth, the error of each layer, and what several
    lossy turns in a row do.

    The text must be that of the artifact; a cache of other tokens or of another model is refused.
    Measure on text that was not used for calibration, and your own model: one model's figures
    say nothing about another.

    Needs the extra [transformers], and [plot] for --plots. Nothing is downloaded, unless the
    environment has HF_HUB_OFFLINE=0.
    """
    asked = Asked(**given)
    _check(url, asked)
    ids = None if asked.token_ids is None else [int(n) for n in read_token_ids(asked.token_ids)]
    text = "\n\n".join(_read_text(name) for name in asked.texts)
    with open_artifact(url) as front:  # a bad file is told before a model is loaded
        for name in asked.tracks:
            front.track(name)
    loaded = _load(asked)
    candidates = [ids] if ids is not None else _tokenised(loaded.tokenizer, text)
    artifact, used = _open(url, [item[asked.skip :] for item in candidates], asked)
    with artifact:
        report = _evaluate(url, artifact, used, loaded, asked)
    if asked.plots is not None:
        draw_all(Path(asked.plots), report, overwrite=asked.overwrite)
    if asked.as_json:
        write_json(report)
    else:
        evaluate_show.show(report)
    _warn(report)


def _check(url: str, asked: Asked) -> None:
    """What can be refused before a model is loaded."""
    if bool(asked.texts) == (asked.token_ids is not None):
        raise UsageError("usage.argument", "give either --text or --token-ids")
    if asked.plots is not None:
        require_matplotlib("--plots")
        folder = Path(asked.plots)
        for name in PLOTS if folder.is_dir() else ():
            check_target(str(folder / name), url, overwrite=asked.overwrite)
        if not folder.is_dir():
            check_target(asked.plots, url, overwrite=False)


def _read_text(name: str) -> str:
    with storage_errors(name, "io.read", "reading the text"):
        data = Path(name).read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            "usage.argument", "the text is not UTF-8", where=name, found=f"byte {error.start}"
        ) from None


def _load(asked: Asked) -> LoadedModel:
    os.environ.setdefault("TQDM_DISABLE", "1")  # libraries must not write beside the error line
    try:
        from kvformat.integrations.model_loading import load_model
        from kvformat.integrations.model_runs import require_causal
    except (ImportError, UsageError) as error:
        raise UsageError(
            "usage.argument",
            f"evaluate needs torch and transformers: {' '.join(str(error).split())}",
            next_step="pip install 'kvformat[transformers]'",
        ) from error
    loaded = load_model(asked.model, dtype=asked.dtype, device=asked.device, gguf=asked.gguf)
    require_causal(loaded.model)
    return loaded


def _tokenised(tokenizer: Any, text: str) -> list[list[int]]:
    """The ids of the text, without and with the tokens that begin a text."""
    found: list[list[int]] = []
    for special in (False, True):
        ids = [int(item) for item in tokenizer(text, add_special_tokens=special)["input_ids"]]
        if ids not in found:
            found.append(ids)
    return found


def _open(url: str, candidates: Sequence[list[int]], asked: Asked) -> tuple[Artifact, list[int]]:
    """The artifact, and the ids of those given that it holds the cache of."""
    from kvformat.integrations.evaluated_tracks import agreed_length

    salt = b"" if asked.salt_file is None else read_salt(asked.salt_file)
    refusal: MismatchError | None = None
    for ids in candidates:
        try:
            expect = Expectation(token_ids=ids, salt=salt)
            artifact = open_artifact(url, expect=expect, profiles=asked.profiles)
        except MismatchError as error:
            refusal = refusal or error
            continue
        try:
            agreed_length(artifact, ids)
        except BaseException as error:
            artifact.close()
            if not isinstance(error, MismatchError):
                raise
            refusal = error
            continue
        return artifact, ids
    if refusal is None:
        raise UsageError("usage.argument", "the text is empty")
    raise refusal


def _evaluate(
    url: str, artifact: Artifact, ids: list[int], loaded: LoadedModel, asked: Asked
) -> dict[str, Any]:
    """The whole report, as ``--json`` prints it."""
    from kvformat.integrations.evaluated_tracks import Tracks, known_identity
    from kvformat.integrations.evaluation import Options, evaluate, fp8_method, haystack_of
    from kvformat.integrations.model_runs import Runner

    model_id = asked.model_id or loaded.model_id
    identity = known_identity(artifact, loaded.model, model_id)
    runner = Runner(loaded.model)
    tracks = Tracks(artifact, runner, ids, identity, asked.profiles)
    chosen = _chosen(artifact, asked.tracks)
    values = count_values(artifact.manifest)
    bits = {item.name: track_size(artifact.manifest, item).bits_per_value for item in chosen}
    options = Options(
        asked.tokens, asked.greedy, asked.turns, 0 if asked.no_needle else asked.depths,
        asked.context,
    )  # fmt: skip
    haystack = haystack_of(runner, loaded.tokenizer, ids, options)
    methods = [tracks.method(item, bits[item.name]) for item in chosen]
    with progress("evaluating") as step:
        original = _original(tracks, ids, asked)
        if asked.fp8:
            methods.append(fp8_method(original.cache))
        found = evaluate(
            runner, ids, original.cache, methods, options, cached=tracks.count,
            haystack=haystack, rounded=tracks.rounded, progress=step,
        )  # fmt: skip
    return {
        "verdict": "ok",
        "code": None,
        "artifact": {
            "url": url,
            "manifest_digest": artifact.manifest_digest,
            "content_id": artifact.manifest.content_id,
            "tokens": tracks.count,
            "values": values,
            "profile": _profile(tracks, chosen),
        },
        "model": {"id": model_id, "dtype": asked.dtype, "device": asked.device},
        "original": {"origin": original.origin, "is_source": original.is_source},
        "result": found.to_json(),
        "sizes": {
            item.name: [run.to_json() for run in layer_sizes(artifact, item)] for item in chosen
        },
        "measurements": _measurements(found, artifact, model_id),
    }


def _chosen(artifact: Artifact, names: Sequence[str]) -> list[Track]:
    """The tracks named, by default one of each quality: the others restore the same bits."""
    wanted = names or [item.name for item in artifact.manifest.qualities]
    return list({item.name: item for item in map(artifact.track, wanted)}.values())


def _original(tracks: Tracks, ids: list[int], asked: Asked) -> Original:
    if asked.reference is None:
        return tracks.original()
    salt = b"" if asked.salt_file is None else read_salt(asked.salt_file)
    with open_artifact(asked.reference, expect=Expectation(token_ids=ids, salt=salt)) as other:
        return tracks.original(other)


def _profile(tracks: Tracks, chosen: Iterable[Track]) -> dict[str, Any] | None:
    """The digest and size of the calibration profile that these tracks need."""
    profile = next((found for found in map(tracks.profile_of, chosen) if found), None)
    return None if profile is None else {"digest": profile.digest, "bytes": len(profile.data)}


def _measurements(found: Evaluation, artifact: Artifact, model_id: str) -> list[dict[str, Any]]:
    """What ``kvformat encode --measured`` takes: one entry per track of the artifact."""
    names = {track.name: track.quality for track in artifact.manifest.tracks}
    content = artifact.manifest.content_id
    result = []
    for item in found.methods:
        if item.name in names:
            one = found.measurement(item, model_id, content)
            alike = [name for name, quality in names.items() if quality == names[item.name]]
            result += [{**one.to_json(), "track": name} for name in alike]
    return list({entry["track"]: entry for entry in result}.values())


def _warn(report: dict[str, Any]) -> None:
    if not report["original"]["is_source"]:
        warn(
            "the artifact has no exact track, and the cache that this model computes is not bit "
            "for bit the one that was stored (another machine or kernel, or chunks of another "
            "size): the divergences include that difference. Give --reference"
        )
    for item in report["result"]["methods"]:
        if item["left_out"]:
            warn(item["left_out"])
