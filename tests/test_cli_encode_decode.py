"""``kvformat encode`` and ``kvformat decode``: what goes in comes out, and says what it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

import kvformat
from kvformat.dtypes import DTYPES
from kvformat.planning import RELATIVE_STEPS
from kvformat.tracks import CODEC_NAMES
from tests.requirements import covers
from tests.test_cli_common import MODEL, TOKENS, Files, build, make_kv, run, verdict

SAMPLE = Path(kvformat.__file__).parent / "data" / "smollm2-135m-sample.safetensors"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return build(tmp_path_factory.mktemp("cli"))


def encode(source: Path, target: Path, *options: object) -> kvformat.Artifact:
    result = run("encode", source, target, "--tracks", "exact", *options)
    assert result.exit_code == 0, result.output
    return kvformat.open(target)


def decode(url: Path, output: Path, *options: object) -> None:
    result = run("decode", url, "--output", output, *options)
    assert result.exit_code == 0, result.output


@covers("ARI-8", "PAR-1")
@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_exact_in_exact_out(files: Files, tmp_path: Path, suffix: str) -> None:
    encode(files.npy, tmp_path / "a.kvf", "--model", MODEL).close()
    decode(tmp_path / "a.kvf", tmp_path / f"out{suffix}")
    if suffix == ".npy":
        found = np.load(tmp_path / "out.npy", allow_pickle=False)
        assert found.tobytes() == files.kv.tobytes()
        assert found.shape == files.kv.shape
        return
    with safe_open(tmp_path / "out.safetensors", "numpy") as tensors:
        assert len(tensors.keys()) == 8
        for layer in range(4):
            for index, role in enumerate(("key", "value")):
                array = tensors.get_tensor(f"layers.{layer}.{role}")
                assert array.tobytes() == files.kv[index, layer].tobytes()


@pytest.mark.parametrize(
    ("saved", "dtype"),
    [
        ("V2", "bfloat16"),
        ("u2", "bfloat16"),
        (">u2", "bfloat16"),
        ("u1", "float8_e4m3fn"),
        ("V1", "float8_e5m2"),
        ("u2", "float16"),
        ("f2", "float16"),
        (">f4", "float32"),
    ],
)
def test_raw_elements_are_taken_as_the_dtype_that_is_named(
    tmp_path: Path, saved: str, dtype: str
) -> None:
    kv = make_kv(20, np.float32).astype(DTYPES[dtype])
    array = kv if saved == ">f4" else kv.view(saved.lstrip(">"))
    np.save(tmp_path / "in.npy", array.astype(saved) if saved.startswith(">") else array)
    with encode(
        tmp_path / "in.npy", tmp_path / "a.kvf", "--model", MODEL, "--dtype", dtype
    ) as artifact:
        assert {group.dtype for group in artifact.groups} == {dtype}
        assert artifact.manifest.identity.cache_dtype == dtype
        assert artifact.read().kv.tobytes() == kv.tobytes()


@pytest.mark.parametrize("dtype", [*DTYPES])
def test_every_dtype_through_both_kinds_of_file(tmp_path: Path, dtype: str) -> None:
    kv = make_kv(12, np.float32).astype(DTYPES[dtype])
    kvformat.write(
        tmp_path / "a.kvf",
        kv,
        identity=kvformat.Identity(kvformat.Model(MODEL), 4, dtype, "unbound"),
        tracks="exact",
    )
    decode(tmp_path / "a.kvf", tmp_path / "b.npy")
    decode(tmp_path / "a.kvf", tmp_path / "b.safetensors")
    for name in ("b.npy", "b.safetensors"):
        options = ("--dtype", dtype) if name == "b.npy" else ()
        target = tmp_path / f"{name}.kvf"
        with encode(tmp_path / name, target, "--model", MODEL, *options) as artifact:
            assert artifact.read().kv.tobytes() == kv.tobytes()
            assert artifact.groups[0].dtype == dtype


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_npy_files_of_any_order_and_length(tmp_path: Path, order: Any, tokens: int) -> None:
    kv = np.asarray(make_kv(tokens), order=order)
    np.save(tmp_path / "in.npy", kv)
    with encode(tmp_path / "in.npy", tmp_path / "a.kvf", "--model", MODEL) as artifact:
        assert artifact.read().kv.tobytes() == kv.tobytes("C")
    decode(tmp_path / "a.kvf", tmp_path / "out.npy")
    assert np.load(tmp_path / "out.npy").shape == kv.shape


@covers("IDN-2", "PAR-1")
def test_the_sample_says_what_it_is(tmp_path: Path) -> None:
    with encode(SAMPLE, tmp_path / "a.kvf") as artifact:
        identity = artifact.manifest.identity
        assert identity.model.id == "HuggingFaceTB/SmolLM2-135M-Instruct"
        assert (identity.model.weights_digest or "").startswith("sha256:b179c952")
        assert (identity.kind, identity.layers_total) == ("tokens", 30)
        assert identity.rope[0].layers == tuple(range(30))
        assert identity.rope[0].keys_rotated
        with safe_open(SAMPLE, "numpy") as tensors:
            frequencies = tensors.get_tensor("inv_freq")
        assert identity.rope[0].inv_freq == frequencies.astype(">f4").tobytes().hex()
    np.save(tmp_path / "cut.npy", np.arange(3, dtype=np.uint32))
    ids = tmp_path / "ids.npy"
    with safe_open(SAMPLE, "numpy") as tensors:
        np.save(ids, tensors.get_tensor("token_ids"))
    decode(tmp_path / "a.kvf", tmp_path / "out.safetensors", "--expect-token-ids", ids)


def test_another_model_takes_nothing_from_the_file(tmp_path: Path) -> None:
    with encode(SAMPLE, tmp_path / "a.kvf", "--model", "other", "--revision", "7") as artifact:
        model = artifact.manifest.identity.model
        assert (model.id, model.revision, model.weights_digest) == ("other", "7", None)
        assert artifact.manifest.identity.tokenizer is None


def test_identity_from_options(files: Files, tmp_path: Path) -> None:
    digest = "blake3:" + "1" * 64
    with encode(
        files.npy,
        tmp_path / "a.kvf",
        *("--model", MODEL, "--revision", "main", "--weights-digest", digest),
        *("--tokenizer", f"tok={digest}", "--adapter", f"lora={digest}", "--adapter", "b=c"),
        *("--component", "draft", "--layers-total", "9", "--head-start", "2"),
        *("--heads-total", "8", "--token-ids", files.ids, "--salt-file", files.salt),
        *("--order", "layer-major", "--alignment", "4096", "--segment-tokens", "64"),
    ) as artifact:
        manifest = artifact.manifest
        identity = manifest.identity
        assert identity.tokenizer == kvformat.Reference("tok", digest)
        assert identity.adapters == (
            kvformat.Reference("lora", digest),
            kvformat.Reference("b=c"),
        )
        assert (identity.component, identity.layers_total) == ("draft", 9)
        assert (manifest.groups[0].head_start, manifest.groups[0].heads_total) == (2, 8)
        assert manifest.tokens.chain is not None
        assert manifest.tokens.chain.salted
        assert manifest.segmentation.order == "layer-major"
        assert (manifest.segmentation.alignment, manifest.segmentation.tokens) == (4096, 64)
    assert files.salt.read_bytes() not in (tmp_path / "a.kvf").read_bytes()
    options = ("--expect-token-ids", files.ids, "--salt-file", files.salt)
    decode(tmp_path / "a.kvf", tmp_path / "out.npy", *options, "--heads", "3", "--layers", "2:")
    found = np.load(tmp_path / "out.npy")
    assert found.tobytes() == files.kv[:, 2:, :, 1:2].tobytes()


@covers("ENG-2")
def test_an_unbound_cache_is_called_unverified(files: Files, tmp_path: Path) -> None:
    result = run("encode", files.npy, tmp_path / "a.kvf", "--model", MODEL, "--tracks", "zstd")
    assert "tokens are not verified" in result.stderr
    assert result.stderr.count("\n") == 1
    result = run("decode", tmp_path / "a.kvf", "--output", tmp_path / "a.npy")
    assert "tokens are not verified" in result.stderr
    result = run("decode", files.bound, "--output", tmp_path / "b.npy")
    assert not result.stderr


@covers("LIN-1")
def test_generations_are_counted(files: Files, tmp_path: Path) -> None:
    lossy = tmp_path / "1.safetensors"
    decode(files.bound, lossy, "--track", "near-lossless/zstd")
    with encode(lossy, tmp_path / "1.kvf") as artifact:
        assert artifact.manifest.lineage == kvformat.Lineage("lossy", 1, "near-lossless")
        assert artifact.manifest.identity.model.id == MODEL
    decode(tmp_path / "1.kvf", tmp_path / "2.safetensors")  # from its exact track
    result = run("encode", tmp_path / "2.safetensors", tmp_path / "2.kvf", "--quality", "small")
    assert result.exit_code == 0
    with kvformat.open(tmp_path / "2.kvf") as artifact:
        assert artifact.manifest.lineage.generations == 1
    decode(tmp_path / "2.kvf", tmp_path / "3.safetensors")
    with encode(tmp_path / "3.safetensors", tmp_path / "3.kvf") as artifact:
        assert artifact.manifest.lineage == kvformat.Lineage("lossy", 2, "small")
    decode(files.bound, tmp_path / "0.safetensors")
    with encode(tmp_path / "0.safetensors", tmp_path / "0.kvf") as artifact:
        assert artifact.manifest.lineage.kind == "exact"


@covers("LIN-1")
def test_the_lineage_of_arrays_is_said_by_hand(files: Files, tmp_path: Path) -> None:
    result = run("decode", files.bound, "--output", tmp_path / "a.npy", "--track", "hevc")
    assert "--lossy-source near-lossless" in " ".join(result.stdout.split())
    options = ("--model", MODEL, "--lossy-source", "near-lossless:3")
    with encode(tmp_path / "a.npy", tmp_path / "a.kvf", *options) as artifact:
        assert artifact.manifest.lineage == kvformat.Lineage("lossy", 3, "near-lossless")


def test_the_metadata_of_restored_tensors(files: Files, tmp_path: Path) -> None:
    decode(files.bound, tmp_path / "a.safetensors", "--track", "near-lossless/hevc")
    with (
        safe_open(tmp_path / "a.safetensors", "numpy") as tensors,
        kvformat.open(files.bound) as artifact,
    ):
        metadata = tensors.metadata()
        assert metadata["kvformat.manifest_digest"] == artifact.manifest_digest
        assert metadata["kvformat.content_id"] == artifact.manifest.content_id
        assert metadata["kvformat.track"] == "near-lossless/hevc"
        assert json.loads(metadata["kvformat.lineage"])["generations"] == 1
        assert "token_ids" not in tensors.keys()  # noqa: SIM118 - not a mapping


@covers("PAR-1")
@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
@pytest.mark.parametrize("check", [True, False])
def test_a_part_equals_that_of_the_whole(
    files: Files, tmp_path: Path, suffix: str, check: bool
) -> None:
    output = tmp_path / f"out{suffix}"
    options = ["--tokens", "250:270", "--layers", ":3", "--heads", "1", "--track", "hevc"]
    decode(files.bound, output, *options, *(["--check"] if check else []))
    with kvformat.open(files.bound) as artifact:
        expected = artifact.read(track="hevc").kv[:, :3, 250:270, 1:2]
    if suffix == ".npy":
        assert np.load(output).tobytes() == expected.tobytes()
    else:
        with safe_open(output, "numpy") as tensors:
            assert tensors.get_tensor("layers.2.value").tobytes() == expected[1, 2].tobytes()


def test_intervals(files: Files, tmp_path: Path) -> None:
    cases = {"7": 1, "0:512": None, "290:": 10, ":3": 3, ":": TOKENS, " 1 : 4 ": 3}
    for text, count in cases.items():
        output = tmp_path / "out.npy"
        result = run("decode", files.bound, "--output", output, "--tokens", text, "--overwrite")
        assert (result.exit_code == 0) == (count is not None), text
        if count is not None:
            assert np.load(output).shape[2] == count


def test_groups_that_do_not_match_need_safetensors(files: Files, tmp_path: Path) -> None:
    result = run("decode", files.window, "--output", tmp_path / "a.npy")
    assert result.exit_code == 64
    assert ".safetensors" in result.stderr
    assert not list(tmp_path.iterdir())
    decode(files.window, tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "numpy") as tensors:
        assert tensors.get_tensor("layers.1.key").shape == (16, 2, 32)
    result = run("decode", files.bound, "--output", tmp_path / "b.npy", "--roles", "key")
    assert result.exit_code == 64
    decode(files.bound, tmp_path / "b.safetensors", "--roles", "key")


def test_overwrite_when_asked(files: Files, tmp_path: Path) -> None:
    output = tmp_path / "out.npy"
    output.write_text("mine")
    assert run("decode", files.bound, "--output", output).exit_code == 74
    assert output.read_text() == "mine"
    decode(files.bound, output, "--overwrite")
    assert np.load(output).shape == files.kv.shape
    assert list(tmp_path.iterdir()) == [output]


def test_the_output_never_replaces_the_input(files: Files, tmp_path: Path) -> None:
    artifact = tmp_path / "a.npy"  # a name that decode would also write
    shutil.copy(files.bound, artifact)
    result = run("decode", artifact, "--output", artifact, "--overwrite")
    assert result.exit_code == 64
    assert artifact.read_bytes() == files.bound.read_bytes()


@covers("CID-2")
def test_encode_prints_one_json_object(files: Files, tmp_path: Path) -> None:
    target = tmp_path / "a.kvf"
    result = run(
        *("encode", files.npy, target, "--json", "--model", MODEL, "--token-ids", files.ids),
        *("--tracks", "hevc,zstd,exact"),
    )
    value = json.loads(result.stdout)
    with kvformat.open(target) as artifact:
        assert value["content_id"] == artifact.manifest.content_id
        assert value["manifest_digest"] == artifact.manifest_digest
        assert [item["name"] for item in value["tracks"]] == list(artifact.tracks)
    assert value["file_bytes"] == target.stat().st_size
    assert value["raw_bytes"] == files.kv.nbytes
    for item in value["tracks"]:
        assert item["bits_per_value"] == pytest.approx(8 * item["bytes"] / files.kv.size, 1e-3)
        assert item["ratio"] == pytest.approx(files.kv.nbytes / item["bytes"], 1e-3)
    assert not result.stderr


@pytest.mark.parametrize("text", ["[{}]", "{}", "\n{}\n", "csv"])
def test_token_ids_in_many_forms(files: Files, tmp_path: Path, text: str) -> None:
    ids = [str(1000 + number) for number in range(TOKENS)]
    forms = {"[{}]": ", ".join(ids), "csv": ",".join(ids)}
    body = forms["csv"] if text == "csv" else text.format(forms.get(text, "\n".join(ids)))
    (tmp_path / "ids").write_text(body)
    options = ("--expect-token-ids", tmp_path / "ids")
    decode(files.bound, tmp_path / "out.npy", *options, "--tokens", "0:300")
    np.save(tmp_path / "ids.npy", np.array(ids, np.int64))
    options = ("--expect-token-ids", tmp_path / "ids.npy")
    decode(files.bound, tmp_path / "again.npy", *options)


@pytest.mark.parametrize(
    "text", ["1 two 3", "[1, 2.5]", "[true]", "[null]", "[[1]]", "-1", "[", "1e3"]
)
def test_bad_token_ids(files: Files, tmp_path: Path, text: str) -> None:
    (tmp_path / "ids").write_text(text)
    result = run("verify", files.bound, "--expect-token-ids", tmp_path / "ids")
    assert result.exit_code == 64
    (tmp_path / "large").write_text(str(2**32))
    result = run("verify", files.bound, "--expect-token-ids", tmp_path / "large")
    assert result.exit_code == 64


@covers("TOK-14")
def test_a_later_part_of_a_sequence(files: Files, tmp_path: Path) -> None:
    np.save(tmp_path / "part.npy", files.kv[:, :, 256:])
    options = ("--model", MODEL, "--first-position", "256", "--token-ids", files.ids)
    with encode(tmp_path / "part.npy", tmp_path / "a.kvf", *options) as artifact:
        assert artifact.manifest.tokens.first_position == 256
        assert artifact.manifest.tokens.chain is not None
        assert artifact.manifest.tokens.chain.parent is not None
    decode(tmp_path / "a.kvf", tmp_path / "out.npy", "--expect-token-ids", files.ids)


def test_scaled_rope_is_left_out(tmp_path: Path) -> None:
    from kvformat.cli.outputs import write_safetensors

    tensors = {
        "layers.0.key": np.zeros((3, 1, 8), ml_dtypes.bfloat16),
        "inv_freq": np.ones(4, np.float32),
    }
    said = {"model_id": "m", "keys_rotated": "true", "rope_type": "yarn"}
    for kind, count in (("yarn", 0), ("llama3", 1)):
        source = tmp_path / f"{kind}.safetensors"
        write_safetensors(str(source), tensors, said | {"rope_type": kind}, overwrite=False)
        with encode(source, tmp_path / f"{kind}.kvf") as artifact:
            assert len(artifact.manifest.identity.rope) == count


def test_encode_help_says_what_the_input_can_say() -> None:
    text = " ".join(run("encode", "--help").stdout.split())
    for word in (
        "model_id",
        "weights_sha256",
        "weights_digest",
        "tokenizer_id",
        "num_layers",
        "keys_rotated",
        "rope_type",
        "inv_freq",
        "kvformat.lineage",
        "token_ids",
        "--model is needed",
        "exact means exact/zstd",
        *("high about 4.9", "near-lossless about 3.9", "balanced about 2.4", "small about 1.8"),
    ):
        assert word in text
    for name in (*RELATIVE_STEPS, *CODEC_NAMES):
        assert name in text


def test_decode_help_promises_what_the_artifact_defines() -> None:
    text = " ".join(run("decode", "--help").stdout.split())
    assert "exactly as the artifact defines it" in text
    assert "bit for bit" not in text


def test_axes_in_a_wrong_order_are_noticed(files: Files, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kv = rng.normal(size=(2, 4, 2, 200, 32)).astype(np.float16)  # heads before tokens
    np.save(tmp_path / "in.npy", kv)
    options = ("--model", MODEL, "--tracks", "zstd")
    result = run("encode", tmp_path / "in.npy", tmp_path / "a.kvf", *options)
    assert result.exit_code == 0
    assert "track near-lossless/zstd is larger than the raw cache" in result.stderr
    assert "[2, layers, tokens, heads, head_dim]" in result.stderr
    assert "4 layers, 2 tokens, 200 heads" in result.stderr
    result = run("encode", tmp_path / "in.npy", tmp_path / "b.kvf", *options, "--json")
    assert "larger than the raw" in result.stderr
    assert json.loads(result.stdout)["verdict"] == "ok"
    result = run("encode", tmp_path / "in.npy", tmp_path / "c.kvf", *options, "--tracks", "exact")
    assert "larger" not in result.stderr
    result = run("encode", files.npy, tmp_path / "d.kvf", *options)
    assert "larger" not in result.stderr


def test_decode_answers_in_json(files: Files, tmp_path: Path) -> None:
    output = tmp_path / "a.npy"
    ids = ("--expect-token-ids", files.ids)
    result = run("decode", "--json", files.bound, "--output", output, "--track", "hevc", *ids)
    value = verdict(result)
    assert (value["verdict"], result.stderr) == ("ok", "")
    said = value["report"]["artifact"]
    assert (said["track"], said["output"]) == ("near-lossless/hevc", str(output))
    assert said["verified_tokens"] == TOKENS
    assert said["lineage"]["generations"] == 1
    assert said["groups"]["key"]["shape"] == [4, TOKENS, 2, 32]
    assert value["report"]["checked"]["values"] == files.kv.size
    assert not any(item.startswith("tokens") for item in value["report"]["not_checked"])
    result = run("decode", "--json", files.unbound, "--output", tmp_path / "b.npy", "--check")
    value = verdict(result)
    assert [item.split(":")[0] for item in value["report"]["not_checked"]] == ["artifact", "tokens"]
    assert "not verified" in result.stderr
