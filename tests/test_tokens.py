"""The prefix chain and what a reader compares before it restores (sections 6.1 and 6.2)."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

import kvformat
from kvformat import ContentSpan, Expectation, KvformatError, UsageError
from kvformat.artifact import Artifact
from kvformat.front import read_front
from kvformat.storage import BytesSource
from kvformat.verification import verify
from tests.builder import Builder, canonical
from tests.damage import artifact, bound_artifact, open_code, verdict, with_members
from tests.requirements import covers
from tests.strategies import unbound, write_bytes

COUNT = 600
SALT = b"tenant"
IDS = (np.arange(1200) * 7919 % 50_000).astype(np.uint32)
IMAGE = ContentSpan(300, 20, "image", "sha256:" + "ab" * 32)
LATE = ContentSpan(310, 250, "audio", None)
IDENTITY = kvformat.Identity(
    kvformat.Model("a model", "main", None), 4, "float16", tokenizer=kvformat.Reference("tok")
)


def chain(
    identity: dict[str, Any], ids: Any, salt: bytes, spans: list[dict[str, Any]], count: int
) -> list[bytes]:
    """TOK-1 to TOK-6 from position 0 on, in plain Python: h(0), h(1), ..."""
    key = blake3(salt, derive_key_context="kvformat 0.9 token chain").digest()
    result = [blake3(canonical(identity), key=key).digest()]
    for start in range(0, count, 256):
        stop = min(start + 256, count)
        message = result[-1] + struct.pack("<I", stop - start)
        for position in range(start, stop):
            inside = any(s["start"] <= position < s["start"] + s["count"] for s in spans)
            message += struct.pack("<I", 2**32 - 1 if inside else int(ids[position]))
        for span in spans:
            if span["start"] < stop and span["start"] + span["count"] > start:
                message += bytes.fromhex(span["digest"].split(":")[1])
                message += struct.pack("<QQ", span["start"], span["count"])
        result.append(blake3(message, key=key).digest())
    return result


def write(**options: Any) -> bytes:
    """A bound artifact of ``COUNT`` tokens behind ``first_position``."""
    first = options.setdefault("first_position", 0)
    kv = np.zeros((2, 1, COUNT, 1, 1), np.float16)
    options = {"token_ids": IDS[: first + COUNT], "salt": SALT, **options}
    return write_bytes(kv, identity=IDENTITY, tracks=["exact/zstd"], workers=1, **options)


def manifest_of(file: bytes) -> dict[str, Any]:
    return Builder(file).manifest


# --- the chain -------------------------------------------------------------------------------


@covers("TOK-1", "TOK-2", "TOK-3", "TOK-4", "TOK-5", "TOK-6", "IDN-5", "CNV-4")
@pytest.mark.parametrize("salt", [b"", SALT])
@pytest.mark.parametrize("content", [(), (IMAGE,), (ContentSpan(250, 6, "image", IMAGE.digest),)])
@pytest.mark.parametrize("first", [0, 256, 512])
def test_the_chain_is_that_of_the_text(salt: bytes, content: Any, first: int) -> None:
    file = write(first_position=first, salt=salt, content=content)
    manifest = manifest_of(file)
    spans = [item.to_json() for item in content]
    expected = chain(manifest["identity"], IDS, salt, spans, first + COUNT)
    tokens = manifest["tokens"]
    assert tokens["chain"]["salted"] == bool(salt)
    assert tokens["chain"]["hashes"] == [link.hex() for link in expected[1 + first // 256 :]]
    assert tokens["chain"]["parent"] == (expected[first // 256].hex() if first else None)
    assert verdict(file) == "ok"


@covers("TOK-5")
@pytest.mark.parametrize(("start", "blocks"), [(0, 0), (255, 0), (256, 1), (511, 1), (512, 2)])
def test_the_chain_ends_before_a_span_without_digest(start: int, blocks: int) -> None:
    manifest = manifest_of(write(content=(ContentSpan(start, 5, "image", None),)))
    assert len(manifest["tokens"]["chain"]["hashes"]) == blocks
    expected = chain(manifest["identity"], IDS, SALT, [], 256 * blocks)
    assert manifest["tokens"]["chain"]["hashes"] == [link.hex() for link in expected[1:]]


@covers("TOK-6")
def test_no_token_has_the_id_of_content() -> None:
    ids = IDS[:COUNT].copy()
    ids[17] = 2**32 - 1
    with pytest.raises(KvformatError) as caught:
        write(token_ids=ids)
    assert caught.value.verdict == "usage"
    assert open_code(write(token_ids=np.full(COUNT, 2**32 - 2))) == "ok"


@covers("TOK-9", "TOK-1")
def test_the_salt_is_not_stored() -> None:
    salt = b"a salt that would be found"
    file = write(salt=salt)
    key = blake3(salt, derive_key_context="kvformat 0.9 token chain").digest()
    for secret in (salt, salt.hex().encode(), key, key.hex().encode()):
        assert secret not in file


# --- what is compared ------------------------------------------------------------------------


def opened(file: bytes, **expected: Any) -> str | int | None:
    """The verified length, or the code of opening."""
    try:
        with kvformat.open(file, expect=Expectation(**expected)) as found:
            return found.verified_length
    except KvformatError as error:
        assert error.verdict == "mismatch"
        return error.code


@covers("TOK-10", "TOK-11")
@pytest.mark.parametrize(
    ("given", "length"),
    [
        (0, "identity.tokens"), (1, "identity.tokens"), (255, "identity.tokens"), (256, 256),
        (511, 256), (512, 512), (599, 512), (600, 600), (601, 600), (1200, 600),
    ],
)  # fmt: skip
def test_verified_length(given: int, length: int | str) -> None:
    assert opened(write(), token_ids=IDS[:given], salt=SALT) == length


@covers("TOK-10", "TOK-11", "PAR-4")
@pytest.mark.parametrize(("place", "length"), [(255, 0), (256, 256), (511, 256), (599, 512)])
def test_other_tokens(place: int, length: int) -> None:
    ids = IDS[:COUNT].copy()
    ids[place] ^= 1
    file = write()
    if not length:
        assert opened(file, token_ids=ids, salt=SALT) == "identity.tokens"
        return
    with kvformat.open(file, expect=Expectation(token_ids=ids, salt=SALT)) as found:
        assert found.verified_length == length
        assert found.read(tokens=(0, length)).kv.shape[2] == length
        for tokens in (None, (0, length + 1), (length, length + 1), (length, COUNT)):
            with pytest.raises(KvformatError) as caught:
                found.read(tokens=tokens)
            assert caught.value.code == "identity.tokens"


@covers("TOK-16", "TOK-1")
@pytest.mark.parametrize(
    ("written", "given", "length"),
    [(SALT, SALT, 600), (b"", b"", 600), (SALT, b"", None), (b"", SALT, None), (SALT, b"x", None)],
)
def test_salts(written: bytes, given: bytes, length: int | None) -> None:
    found = opened(write(salt=written), token_ids=IDS[:COUNT], salt=given)
    assert found == (length or "identity.tokens")


@covers("TOK-15")
def test_content_comes_from_the_caller() -> None:
    file = write(content=(IMAGE,))
    ids = {"token_ids": IDS[:COUNT], "salt": SALT}
    assert opened(file, **ids, content=(IMAGE,)) == 600
    assert opened(file, **ids) == 256
    other = ContentSpan(300, 20, "image", "sha256:" + "ac" * 32)
    moved = ContentSpan(301, 20, "image", IMAGE.digest)
    for span in (other, moved, LATE):
        assert opened(file, **ids, content=(span,)) == 256
    early = write(content=(ContentSpan(3, 20, "image", IMAGE.digest),))
    assert opened(early, **ids) == "identity.tokens"
    plain = write()
    assert opened(plain, **ids, content=(IMAGE,)) == 256


@covers("TOK-14", "TOK-2")
def test_a_later_part_of_a_sequence() -> None:
    file = write(first_position=512, content=(IMAGE,))
    ids, spans = IDS[: 512 + COUNT], (IMAGE,)
    assert opened(file, token_ids=ids, salt=SALT, content=spans) == 600
    assert opened(file, token_ids=IDS[:768], salt=SALT, content=spans) == 256
    for wrong in (IDS[:512], IDS[:100], IDS[512 : 512 + COUNT]):
        assert opened(file, token_ids=wrong, salt=SALT, content=spans) == "identity.tokens"
    assert opened(file, token_ids=ids, salt=SALT) == "identity.tokens"  # the image is before it
    other = ids.copy()
    other[3] += 1
    assert opened(file, token_ids=other, salt=SALT, content=spans) == "identity.tokens"


@covers("TOK-12", "TOK-13")
def test_identities() -> None:
    assert opened(artifact(), token_ids=IDS[:10]) == "identity.missing"
    file = write()
    ids = {"token_ids": IDS[:COUNT], "salt": SALT}
    good = {"model": "a model", "revision": "main", "tokenizer": "tok", "component": "main"}
    assert opened(file, **good, **ids, adapters=(), cache_dtype="float16") == 600
    for name, wanted, code in (
        ("model", "b", "identity.field"), ("revision", "dev", "identity.field"),
        ("weights_digest", "sha256:" + "0" * 64, "identity.missing"),
        ("tokenizer", "other", "identity.field"), ("component", "draft", "identity.field"),
        ("tokenizer_digest", "sha256:" + "0" * 64, "identity.missing"),
        ("adapters", ("lora",), "identity.field"), ("cache_dtype", "bfloat16", "identity.field"),
        ("rotation", "hadamard", "identity.missing"), ("engine_key", "k", "identity.missing"),
    ):  # fmt: skip
        assert opened(file, **{**good, name: wanted}) == code, name
    assert opened(bound_artifact(), adapters=("lora",), rotation="hadamard") is None


@covers("CID-2", "CID-1", "TOK-9")
def test_content_id_does_not_depend_on_salt_or_track() -> None:
    files = [write(), write(salt=b"other"), write(salt=b"", order="layer-major")]
    ids = {manifest_of(file)["content_id"] for file in files}
    assert len(ids) == 1


@covers("EXT-3", "EXT-4")
def test_an_extension_changes_no_value() -> None:
    file = artifact()
    value = {"must_understand": False, "value": {"transform": "hadamard", "scale": 2}}
    other = with_members(Builder(file), {"/extensions/com.example.scale": value})
    with kvformat.open(file) as one, kvformat.open(other) as two:
        for track in one.tracks:
            first, second = one.read(track=track), two.read(track=track)
            assert {k: v.tobytes() for k, v in first.items()} == {
                k: v.tobytes() for k, v in second.items()
            }


# --- storage that answers wrongly ------------------------------------------------------------


class Liar(BytesSource):
    """A source whose replies to later requests have another length."""

    change = 0

    def read(self, offset: int, length: int) -> bytes:
        if self.change:
            return super().read(offset, length + self.change)
        return super().read(offset, length)


@covers("REQ-4", "PAR-2")
def test_the_file_is_replaced_by_a_shorter_one(tmp_path: Any) -> None:
    kv = np.random.default_rng(0).standard_normal((2, 2, 600, 8, 32)).astype(np.float32)
    path = tmp_path / "a.kvf"
    kvformat.write(path, kv, identity=unbound(), tracks=["exact/stored"])
    size = path.stat().st_size
    assert size > 2 * 262_144
    with kvformat.open(path) as found:
        with path.open("r+b") as file:
            file.truncate(size - 1)
        with pytest.raises(KvformatError) as caught:
            found.read()
    assert caught.value.code == "io.short"
    assert caught.value.verdict == "io_error"


@covers("REQ-4", "PAR-2")
def test_a_longer_reply_is_not_used() -> None:
    kv = np.random.default_rng(0).standard_normal((2, 1, 600, 8, 32)).astype(np.float32)
    source = Liar(write_bytes(kv, tracks=["exact/stored"]))
    found = Artifact(source, read_front(source))
    source.change = -1
    with pytest.raises(KvformatError) as caught:
        found.read()
    assert caught.value.code in {"segment.digest", "io.short"}


@covers("VER-7")
def test_verification_wants_every_block_that_the_ids_cover() -> None:
    file, ids = write(), IDS[:COUNT]
    wrong = ids.copy()
    wrong[400] += 1
    for given in (ids, ids[:300], wrong[:511]):
        verify(file, expect=Expectation(token_ids=given, salt=SALT), in_child=False)
    for given in (wrong, wrong[:512]):
        with pytest.raises(KvformatError) as caught:
            verify(file, expect=Expectation(token_ids=given, salt=SALT), in_child=False)
        assert caught.value.code == "identity.tokens"


@covers("TOK-15", "TOK-10")
def test_content_comes_from_the_caller_and_must_agree() -> None:
    file = write(content=(IMAGE,))
    ids = IDS[:COUNT]

    def length(*content: ContentSpan) -> int | None:
        expect = Expectation(token_ids=ids, salt=SALT, content=content)
        with kvformat.open(file, expect=expect) as opened:
            return opened.verified_length

    other = ContentSpan(300, 20, "image", "sha256:" + "cd" * 32)
    assert length(IMAGE) == COUNT
    assert length() == 256
    assert length(other) == 256
    assert length(ContentSpan(300, 20, "image", None)) == 256
    # a file that lists a span which its chain does not know, and the other way round
    digits = str(IMAGE.digest).partition(":")[2]
    for name, kind in (("blake3", IMAGE.kind), ("sha256", IMAGE.kind), ("blake3", "audio")):
        assert length(replace(IMAGE, digest=f"{name}:{digits}", kind=kind)) == 600
    assert length(replace(IMAGE, digest=f"sha256:{digits[::-1]}")) == 256
    listed = with_members(Builder(write()), {"/tokens/content": [IMAGE.to_json()]})
    hidden = with_members(Builder(file), {"/tokens/content": []})
    for odd, content in ((listed, ()), (hidden, (IMAGE,))):
        expect = Expectation(token_ids=ids, salt=SALT, content=content)
        with kvformat.open(odd, expect=expect) as opened:
            assert opened.verified_length == 256


@pytest.mark.parametrize(
    "odd",
    [
        {"content": (ContentSpan(-1, 5, "image", IMAGE.digest),)},
        {"content": (ContentSpan(1, 2**70, "image", IMAGE.digest),)},
        {"content": (ContentSpan(1, 2, "image", "zz"),)},
        {"content": (5,)},
        {"content": 5},
        {"token_ids": [[1], [1, 2]]},
        {"token_ids": [-1, 2]},
        {"adapters": 5},
    ],
    ids=str,
)
def test_odd_expectations_are_usage_errors(odd: dict[str, Any]) -> None:
    expect = Expectation(**{"token_ids": IDS[:COUNT], "salt": SALT, **odd})
    with pytest.raises(UsageError):
        kvformat.open(write(), expect=expect)


@covers("TOK-5", "TOK-8")
def test_content_that_no_chain_can_cross_is_refused() -> None:
    undigested = ContentSpan(100, 5, "image", None)
    across = ContentSpan(250, 12, "image", IMAGE.digest)
    for content in ((undigested,), (across,), (IMAGE, IMAGE), (ContentSpan(-1, 5, "x", None),)):
        with pytest.raises(KvformatError) as caught:
            write(first_position=256, content=content)
        assert caught.value.verdict == "usage"
