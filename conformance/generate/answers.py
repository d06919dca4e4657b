"""What the reference says to a call of the protocol, asked in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from blake3 import blake3

import kvformat
from conformance.adapters.reference import MissingCodec, spans
from kvformat import Expectation, KvformatError
from kvformat.artifact import open_artifact
from kvformat.codecs.registry import CODECS
from kvformat.verification import verify
from tests import reference


@dataclass
class Answer:
    """A verdict with what belongs to it."""

    code: str
    detail: str = ""
    manifest_digest: str = ""
    integers: dict[str, list[str]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


def ask(
    call: str,
    arguments: Sequence[str],
    data: bytes | None,
    files: Mapping[str, bytes],
    *,
    without: str = "",
) -> Answer:
    """The answer of the package; where it is ``ok``, the second reader must say the same.

    ``without`` is a codec that the package shall not have.
    """
    if without:
        with patch.dict(CODECS, {without: MissingCodec(without)}):
            return ask(call, arguments, data, files)
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    expected: dict[str, Any] = {}
    if "--expect-model" in options:
        expected["model"] = options["--expect-model"]
    if "--expect-token-ids" in options:
        expected["token_ids"] = np.array(
            json.loads(files[options["--expect-token-ids"]]), np.uint32
        )
    if "--expect-content" in options:
        expected["content"] = spans(json.loads(files[options["--expect-content"]]))
    if "--salt-file" in options:
        expected["salt"] = files[options["--salt-file"]]
    expect = Expectation(**expected) if expected else None
    profile = files[options["--profile"]] if "--profile" in options else b""
    try:
        if data is None:
            kvformat.open("/nonexistent/absent.kvf")
            raise AssertionError("unreachable")
        if call == "verify":
            found = verify(data, expect=expect, in_child=False, workers=1)
            return Answer("ok", "", found.manifest_digest, integers_of(data))
        with (
            given(profile) as places,
            open_artifact(data, expect=expect, profiles=places) as artifact,
        ):
            if call == "inspect":
                return Answer("ok", "", artifact.manifest_digest)
            return Answer("ok", "", digests=_decode(artifact, data, options, profile))
    except KvformatError as error:
        if not error.where and error.verdict == "invalid":
            raise AssertionError(f"no place: {error}") from error
        return Answer(error.code, str(error))


@contextmanager
def given(profile: bytes) -> Iterator[tuple[Path, ...]]:
    """The file that ``--profile`` names, if there is one."""
    if not profile:
        yield ()
        return
    with TemporaryDirectory() as folder:
        path = Path(folder) / "given.kvp"
        path.write_bytes(profile)
        yield (path,)


def _interval(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, last = text.split(":")
    return int(first), int(last)


def _decode(
    artifact: kvformat.Artifact, data: bytes, options: Mapping[str, str], profile: bytes
) -> dict[str, str]:
    parts = {name: _interval(options.get(f"--{name}")) for name in ("tokens", "layers", "heads")}
    track = options["--track"]
    restored = artifact.read(track=track, workers=1, **parts)
    result = {}
    whole = _whole(data, profile, track)
    count = artifact.manifest.tokens.count
    for group in artifact.manifest.groups:
        if group.name not in restored:
            continue
        first = group.held(count)[0]
        tokens = slice(None)
        if parts["tokens"] and group.tokens.kind != "state":
            tokens = slice(max(parts["tokens"][0] - first, 0), max(parts["tokens"][1] - first, 0))
        layers = [
            index
            for index, layer in enumerate(group.layers)
            if parts["layers"] is None or parts["layers"][0] <= layer < parts["layers"][1]
        ]
        heads = slice(None)
        if parts["heads"]:
            heads = slice(*(item - group.head_start for item in parts["heads"]))
        second = np.ascontiguousarray(whole[group.name][layers][:, tokens, heads]).tobytes()
        mine = np.ascontiguousarray(restored[group.name]).tobytes()
        if mine != second:
            raise AssertionError(f"the two readers differ in group {group.name} of {track}")
        result[group.name] = blake3(mine).hexdigest()
    return result


_CACHE: dict[tuple[bytes, bytes, str], Any] = {}


def _whole(data: bytes, profile: bytes, track: str) -> dict[str, Any]:
    """All groups of a track, from the second reader."""
    key = (data, profile, track)
    if key not in _CACHE:
        if not any(held == data for held, _, _ in _CACHE):
            _CACHE.clear()
        _CACHE[key] = reference.reference_restore(data, profile, only=track)[track]
    found: dict[str, Any] = _CACHE[key]
    return found


def integers_of(data: bytes) -> dict[str, list[str]]:
    """The integer digests of every track, from the second reader's decoded integers."""
    cut = reference.cut_up(data)
    result: dict[str, list[str]] = {}
    for track in cut.manifest["tracks"]:
        quality = next(q for q in cut.manifest["qualities"] if q["name"] == track["quality"])
        mine = result.setdefault(track["name"], [])
        for row in cut.segments[track["name"]]:
            group = cut.manifest["groups"][row["group"]]
            shape = (row["layer_count"], row["token_count"], row["head_count"], group["head_dim"])
            stored = cut.data[row["offset"] : row["offset"] + row["stored_bytes"]]
            payload, codec = stored[row["side_bytes"] :], track["codecs"][row["group"]]
            if quality["encodings"][row["group"]] == "exact":
                size = reference.DTYPES[group["dtype"]].itemsize
                q = reference.exact_bytes(codec, payload, shape, size)
            else:
                where = cut.sets[quality["name"]][row["set_index"]]
                item = reference.parse_set(
                    cut.data[where["offset"] : where["offset"] + where["bytes"]]
                )
                heads = slice(row["head_start"], row["head_start"] + row["head_count"])
                order = None if item.order is None else item.order[:, heads]
                layout = track["layouts"][row["layout"]] if codec == "hevc" else None
                q = reference.integers_of(codec, payload, shape, order, layout)
            digest = blake3(np.ascontiguousarray(q).tobytes()).digest()
            if digest != row["integer_digest"]:
                raise AssertionError(
                    f"the second reader differs in the integers of {track['name']}"
                )
            mine.append(digest.hex())
    return result
