"""Write spec/appendix-a.md: a small artifact explained from its first byte to its last.

The text is made from the committed file spec/examples/worked.kvf, because another version of zstd
may make other frames. ``--new`` writes that file again, with ``example`` below, and the manifests
beside it. The text is computed from the file's bytes without the package kvformat.
"""

from __future__ import annotations

import argparse
import inspect
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from appendix_reader import (
    TOKENS_PER_BYTE,
    Array,
    Parsed,
    Record,
    Walk,
    canonical,
    digest,
    numbers,
    pretty,
    steps,
    walk_front,
    walk_segment,
    walk_set,
    weight,
)
from blake3 import blake3

SPEC = Path(__file__).resolve().parent.parent / "spec"
WORKED = SPEC / "examples" / "worked.kvf"
TEXT = SPEC / "appendix-a.md"
CONTEXT = "kvformat 0.9 token chain"
PICKS = ((0, 0, 4, 1), (0, 0, 6, 3), (1, 1, 5, 0), (0, 1, 1, 3))
"""Values of the worked restoration: group, layer, token, dim."""


def example(path: str) -> None:
    """Write the artifact of this appendix."""
    import numpy as np

    import kvformat

    layer, token, _, dim = np.indices((2, 7, 1, 4))
    key = ((3 * layer + 5 * token + 2 * dim * dim) % 7 - 3) * (1 + 3 * dim % 4) / 4 + dim - 1
    value = ((5 * layer + 3 * token + 4 * dim) % 11 - 5) * 2.0 ** (2 - dim) / 8
    kvformat.write(
        path,
        np.stack([key, value]).astype(np.float16),
        identity=kvformat.Identity(
            model=kvformat.Model("example/two-layers"),
            layers_total=2,
            cache_dtype="float16",
            rope=(kvformat.Rope.from_array(np.array([1, 0.01], np.float32), layers=(0, 1)),),
        ),
        token_ids=[5, 1005, 2005, 3005, 4005, 5005, 6005],
        tracks=["near-lossless/zstd", "near-lossless/stored", "exact/zstd", "exact/stored"],
        overwrite=True,
    )


def tensors(shapes: dict[str, tuple[tuple[int, ...], str, Sequence[int]]]) -> dict[str, Array]:
    """Made-up tensors named ``layers.{i}.{role}``, from shape, dtype and layers of each role."""
    result: dict[str, Array] = {}
    for role, (shape, dtype, layers) in shapes.items():
        for layer in layers:
            values = np.arange(int(np.prod(shape))).reshape(shape) * 7 % 251 % (29 + layer) - 14
            result[f"layers.{layer}.{role}"] = (values / 8).astype(np.dtype(dtype))
    return result


def manifests() -> dict[str, Record]:
    """Manifests of artifacts that are written for this and thrown away, by file name."""
    import ml_dtypes

    from kvformat import (
        Cache,
        ContentSpan,
        EngineKey,
        Identity,
        Lineage,
        Model,
        Reference,
        ScaleScheme,
    )
    from kvformat.identity import CacheScale

    def written(cache: Cache | dict[str, Array], identity: Identity, **options: Any) -> Record:
        import tempfile

        import kvformat

        with tempfile.TemporaryDirectory() as folder:
            report = kvformat.write(f"{folder}/one.kvf", cache, identity=identity, **options)
        return report.manifest.to_json()

    brain, tiny = str(np.dtype(ml_dtypes.bfloat16)), str(np.dtype(ml_dtypes.float8_e4m3fn))
    latent = ((600, 1, 576), brain, range(3))
    indexer = ((600, 1, 128), tiny, range(3))
    full, window = ((300, 2, 64), "float16", (0, 3)), ((44, 2, 64), "float16", (1, 4))
    state = ((2, 16, 8), "float32", (2,))
    windowed = tensors({"key": full, "value": full})
    windowed |= tensors({"key": window, "value": window, "state": state})
    scales = tuple(
        CacheScale(layer, role, "3d800000") for role in ("key", "value") for layer in (0, 1)
    )
    rank = ((512, 4, 128), tiny, (0, 1))
    prefix = ((300, 2, 64), brain, (0, 1))
    model = Model("example/model", "main", "sha256:" + "5a" * 32)
    return {
        "latent-indexer": written(
            tensors({"latent": latent, "indexer": indexer}),
            Identity(model, 3, "bfloat16", tokenizer=Reference("example/tokenizer")),
            token_ids=range(600),
        ),
        "window-state": written(
            windowed, Identity(model, 5, "float16", kind="unbound"), tracks="zstd,exact"
        ),
        "engine-key": written(
            Cache.from_tensors(tensors({"key": rank, "value": rank}), head_start=4, heads_total=8),
            Identity(
                model,
                2,
                "fp8_e4m3",
                kind="engine_key",
                adapters=(Reference("example/adapter", "sha256:" + "a5" * 32),),
                scale_scheme=ScaleScheme("per-layer", scales),
                engine_key=EngineKey("example-engine", "sha256", "8f14e45f", 1, 2, "1.0"),
            ),
            tracks="zstd",
            lineage=Lineage("lossy", 1, "high", None),
            alignment=4096,
            order="layer-major",
        ),
        "later-part": written(
            tensors({"key": prefix, "value": prefix}),
            Identity(model, 2, "bfloat16", tokenizer=Reference("example/tokenizer")),
            token_ids=range(812),
            salt=b"salt of one tenant",
            first_position=512,
            content=(ContentSpan(520, 64, "image", "sha256:" + "c3" * 32),),
            tracks="exact",
        ),
    }


def bits(value: Any) -> str:
    """The bits of a binary32 or binary16 number, and the number."""
    raw = value.tobytes()[::-1].hex()
    return f"`{raw}` ({float(value):.7g})"


def restoring(parsed: Parsed) -> list[str]:
    """Section A.5.7: the arithmetic of some values."""
    labels = ("q - zero", "scale", "product", "token scale", "product", "bias", "sum", "binary16")
    records = parsed.records["near-lossless/stored"]
    columns: list[list[str]] = []
    for number, layer, token, dim in PICKS:
        record = records[number]
        place = (layer, token, 0, dim)
        found = [bits(item) for item in steps(record, parsed.sets[record["set_index"]], place)]
        name = parsed.manifest["groups"][record["group"]]["name"]
        patch = [row for a, b, row in record["patches"] if (a, b) == (layer, token)]
        held = parsed.values["near-lossless/stored"][number][place]
        columns.append(
            [
                f"{name}, layer {layer}, token {token}, dim {dim}",
                str(record["integers"][place]),
                *found,
                bits(patch[0][0, dim]) if patch else "none",
                bits(held),
            ]
        )
    names = ("", "q", *labels, "patch", "result")
    lines = [
        "| " + " | ".join((name, *(column[row] for column in columns))) + " |"
        for row, name in enumerate(names)
    ]
    return [lines[0], "|---" * (len(columns) + 1) + "|", *lines[1:]]


def hexdump(data: bytes) -> list[str]:
    """16 bytes a line."""
    lines = []
    for start in range(0, len(data), 16):
        part = data[start : start + 16]
        text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in part)
        lines.append(f"{start:04x}  {part.hex(' '):<47}  {text}")
    return lines


def fill(template: str, values: dict[str, str]) -> str:
    """``template`` with each ``@name@`` replaced."""
    for name, value in values.items():
        template = template.replace(f"@{name}@", value)
    return template


def worked_values(data: bytes, parsed: Parsed) -> dict[str, str]:
    """What the template of section A.5 shows."""
    manifest = parsed.manifest
    identity = canonical(manifest["identity"])
    key = blake3(b"", derive_key_context=CONTEXT).digest()
    first = blake3(identity, key=key).digest()
    ids = [5 + 1000 * token for token in range(manifest["tokens"]["count"])]
    message = first + struct.pack(f"<I{len(ids)}I", len(ids), *ids)
    second = blake3(message, key=key).digest()
    exact = [parsed.values[name] for name in ("exact/zstd", "exact/stored")]
    layers = [layer for group in exact[0] for layer in group]
    layer_digests = [digest(layer.tobytes()) for layer in layers]
    members = ("groups", "identity", "source_digest")
    content = canonical({name: manifest[name] for name in members})
    checks = (
        (digest(data[:16] + data[48:128]), data[16:48].hex()),
        (digest(data[128 : 128 + data[56] + 256 * data[57]]), data[72:104].hex()),
        (second, manifest["tokens"]["chain"]["hashes"][0]),
        (digest(b"".join(layer_digests)), manifest["source_digest"]),
        (digest(content), manifest["content_id"]),
    )
    if any(found.hex() != wanted for found, wanted in checks):
        raise ValueError("a digest of the worked file is wrong")
    record = parsed.records["near-lossless/stored"][0]
    zstd = parsed.records["near-lossless/zstd"][0]
    segment = data[parsed.data_start + zstd["offset"] :][: zstd["stored_bytes"]]
    payload = segment[zstd["side_bytes"] :]
    low, radix = payload[12], payload[13] + 1
    frame = zstandard.ZstdDecompressor().decompress(payload[14:])
    dim = int(parsed.sets[0]["order"][0, 0, 0])
    row = record["integers"][0, :, 0, dim].tolist()
    finals = [
        f"| `{name}` | `{group['name']}` | `{digest(values.tobytes()).hex()}` |"
        for name, arrays in parsed.values.items()
        for group, values in zip(manifest["groups"], arrays, strict=True)
    ]
    layer_rows = [
        f"| `{group['name']}` | {layer} | `{found.hex()}` |"
        for (group, layer), found in zip(
            [(group, layer) for group in manifest["groups"] for layer in group["layers"]],
            layer_digests,
            strict=True,
        )
    ]
    return {
        "check_input": (data[:16] + data[48:128]).hex(),
        "check": checks[0][0].hex(),
        "manifest_bytes": f"{data[56] + 256 * data[57]:,}",
        "manifest_digest": checks[1][0].hex(),
        "key": key.hex(),
        "identity": identity.decode(),
        "identity_bytes": str(len(identity)),
        "h0": first.hex(),
        "h1_input": message.hex(),
        "h1_bytes": str(len(message)),
        "h1": second.hex(),
        "layer_rows": "\n".join(layer_rows),
        "source_digest": manifest["source_digest"],
        "content": content.decode(),
        "content_bytes": f"{len(content):,}",
        "content_id": manifest["content_id"],
        "integers": record["integers"].tobytes().hex(),
        "integer_digest": record["integer_digest"].hex(),
        "integer_sum": f"{record['integer_sum']:,}",
        "weight_0": f"{weight(4096):,}",
        "weight_1": f"{weight(1):,} x {weight(4096):,}",
        "low": str(low),
        "radix": str(radix),
        "per_byte": str(TOKENS_PER_BYTE[radix]),
        "row_hex": frame[: -(-len(row) // TOKENS_PER_BYTE[radix])].hex(" "),
        "row": numbers(row),
        "row_dim": str(dim),
        "row_0": str(row[0]),
        "row_1": str(row[1]),
        "byte_0": str(frame[0]),
        "restoring": "\n".join(restoring(parsed)),
        "finals": "\n".join(finals),
        "file_digest": digest(data).hex(),
        "file_bytes": f"{len(data):,}",
        "empty": digest(b"").hex(),
        "source": inspect.getsource(example).rstrip(),
        "input_rows": input_rows(*exact[0]),
        "frame": frame.hex(),
    }


def input_rows(keys: Array, values: Array) -> str:
    """The input as table rows."""
    return "\n".join(
        f"| {layer} | {token} | {numbers(keys[layer, token, 0].tolist())} "
        f"| {numbers(values[layer, token, 0].tolist())} |"
        for layer, token in np.ndindex(keys.shape[:2])
    )


def explain(data: bytes) -> tuple[Walk, Parsed]:
    """Rows for every byte of the artifact ``data`` and what it holds; checks all digests."""
    walk = Walk(data)
    parsed = walk_front(walk)
    walk.lines += ["", "### A.4.4 Data: quantisation sets, then segments"]
    for index in range(len(parsed.sets)):
        walk_set(walk, parsed, index)
    for track in parsed.manifest["tracks"]:
        for index in range(track["segments"]):
            walk_segment(walk, parsed, track, index)
    walk.check()
    return walk, parsed


def render(data: bytes) -> str:
    """The text of the appendix for the artifact ``data``."""
    walk, parsed = explain(data)
    values = {
        **worked_values(data, parsed),
        "hexdump": "\n".join(hexdump(data)),
        "walk": "\n".join(walk.lines).lstrip(),
    }
    return fill((SPEC / "examples" / "appendix-a.template.md").read_text("utf-8"), values)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new", action="store_true", help="write spec/examples anew first")
    if parser.parse_args().new:
        example(str(WORKED))
        for name, manifest in manifests().items():
            WORKED.with_name(f"{name}.json").write_text(pretty(manifest) + "\n", encoding="utf-8")
    TEXT.write_text(render(WORKED.read_bytes()), encoding="utf-8")


if __name__ == "__main__":
    main()
