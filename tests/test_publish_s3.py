"""Publication in S3 (spec 11.4), against moto: a mock, not a store (see ``tests/object_store.py``).

``test_a_real_endpoint`` repeats the basics on the endpoint that KVFORMAT_S3_URL names, if any.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import fsspec
import numpy as np
import pytest

import kvformat
from kvformat.errors import StorageError
from kvformat.storage import publish, publish_s3
from tests.object_store import (
    Call,
    Reply,
    object_store_fixture,  # noqa: F401 - a fixture, used by name
    real_endpoint,
)
from tests.publishing import (
    COMMITS,
    LARGE,
    PARTS,
    SIZES,
    SMALL,
    Target,
    content,
    error_code,
    operations,
    target_fixture,  # noqa: F401 - a fixture, used by name
)
from tests.requirements import covers

# --- what is sent ----------------------------------------------------------------------------


@covers("PUB-4", "PUB-5")
def test_a_small_artifact_is_one_conditional_request(target: Target) -> None:
    with target.store.record() as log:
        target.publish(content(SMALL))
    assert operations(log) == ["HeadObject", "PutObject", "HeadObject"]
    assert log[1].headers["if-none-match"] == "*"
    assert target.bytes() == content(SMALL)


@covers("PUB-4", "PUB-5")
def test_a_large_artifact_goes_in_parts_of_which_the_first_is_sent_last(target: Target) -> None:
    with target.store.record() as log:
        target.publish(content(LARGE))
    sent = [call.part for call in log if call.operation == "UploadPart"]
    assert sorted(sent) == list(range(1, PARTS + 1))
    assert sent[-1] == 1
    assert operations(log)[:2] == ["HeadObject", "CreateMultipartUpload"]
    assert operations(log)[-2:] == ["CompleteMultipartUpload", "HeadObject"]
    assert log[-2].headers["if-none-match"] == "*"
    assert target.bytes() == content(LARGE)
    assert target.leftovers() == []


@covers("PUB-4")
def test_part_1_waits_until_every_other_part_has_arrived(target: Target) -> None:
    """Part 2 is answered only after all later parts have come in, and part 1 must not be there."""
    later, early = threading.Event(), []
    arrived: set[int] = set()

    def rule(call: Call) -> Reply | None:
        arrived.add(call.part)
        if set(range(3, PARTS + 1)) <= arrived:
            later.set()
        if call.part == 2:
            assert later.wait(60)
            early.append(1 in arrived)
        return None

    with target.store.rule(rule):
        target.publish(content(LARGE))
    assert early == [False]


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (1, 8 * 2**20),
        (80_000 * 2**20, 8 * 2**20),
        (80_000 * 2**20 + 1, 9 * 2**20),
        (5 * 2**40, 525 * 2**20),
    ],
)
def test_parts_grow_with_the_artifact(size_bytes: int, expected: int) -> None:
    assert publish_s3.part_size(size_bytes) == expected
    assert -(-size_bytes // expected) <= publish_s3.PARTS_MAX


@SIZES
@covers("PUB-3")
def test_overwriting_replaces_and_sets_no_condition(target: Target, size_bytes: int) -> None:
    target.put(b"before")
    with target.store.record() as log:
        target.publish(content(size_bytes), overwrite=True)
    assert target.bytes() == content(size_bytes)
    assert not [call for call in log if "if-none-match" in call.headers]


@SIZES
def test_the_options_of_the_file_system_hold(target: Target, size_bytes: int) -> None:
    """Endpoint, credentials, encryption, metadata: requests go through the caller's s3fs."""
    with target.store.record() as log:
        target.publish(
            content(size_bytes),
            s3_additional_kwargs={
                "ServerSideEncryption": "AES256",
                "Metadata": {"tenant": "seven"},
            },
            client_kwargs={"region_name": "eu-central-1"},
        )
    first = next(call for call in log if call.operation in ("PutObject", "CreateMultipartUpload"))
    assert "Credential=test-key/" in first.headers["authorization"]
    assert "/eu-central-1/" in first.headers["authorization"]
    assert first.headers["x-amz-server-side-encryption"] == "AES256"
    assert first.headers["x-amz-meta-tenant"] == "seven"


def test_a_written_cache_equals_the_local_file(target: Target, tmp_path: Path) -> None:
    kv = np.random.default_rng(3).standard_normal((2, 2, 64, 2, 32)).astype(np.float16)
    identity = kvformat.Identity(kvformat.Model("example/model", "1"), 2, "float16")
    local = tmp_path / "a.kvf"
    for url, options in ((str(local), None), (target.url, target.store.storage_options)):
        kvformat.write(
            url,
            kv,
            identity=identity,
            token_ids=np.arange(64),
            tracks=["zstd"],
            storage_options=options,
        )
    assert target.bytes() == local.read_bytes()


# --- create-only -----------------------------------------------------------------------------


@SIZES
@covers("PUB-3", "PUB-5")
def test_an_existing_object_is_refused_before_anything_is_sent(
    target: Target, size_bytes: int
) -> None:
    target.put(b"before")
    with target.store.record() as log:
        assert error_code(target, content(size_bytes)) == "io.exists"
    assert operations(log) == ["HeadObject"]
    with pytest.raises(StorageError):
        publish(
            target.url,
            lambda _: pytest.fail("written"),
            storage_options=target.store.storage_options,
        )
    assert target.bytes() == b"before"


@SIZES
@covers("PUB-3", "PUB-5", "PUB-6")
def test_the_store_refuses_what_a_look_could_not_see(target: Target, size_bytes: int) -> None:
    """S3 answers HEAD with 403 to those who may not list the bucket; the condition decides."""
    target.put(b"before")

    def rule(call: Call) -> Reply | None:
        return Reply(403) if call.operation == "HeadObject" else None

    with target.store.rule(rule):
        assert error_code(target, content(size_bytes)) == "io.exists"
    assert target.bytes() == b"before"
    assert target.leftovers() == []


@SIZES
@covers("PUB-3", "PUB-5", "PUB-6")
def test_of_two_writers_at_once_one_wins(target: Target, size_bytes: int) -> None:
    """Both have looked and have sent everything when the first of them commits."""
    both = threading.Barrier(2)

    def rule(call: Call) -> None:
        if call.operation in COMMITS:
            both.wait(60)

    def attempt(first: int) -> str:
        try:
            target.publish(content(size_bytes, first))
        except StorageError as error:
            return error.code
        return "ok"

    with target.store.rule(rule), ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(attempt, (0, 10**9)))
    assert sorted(outcomes) == ["io.exists", "ok"]
    assert target.bytes() == content(size_bytes, (0, 10**9)[outcomes.index("ok")])
    assert target.leftovers() == []


@SIZES
@covers("PUB-5")
def test_a_conflict_repeats_the_whole_upload(target: Target, size_bytes: int) -> None:
    conflicts = iter([Reply(409, "ConditionalRequestConflict")])

    def rule(call: Call) -> Reply | None:
        return next(conflicts, None) if call.operation in COMMITS else None

    with target.store.rule(rule), target.store.record() as log:
        target.publish(content(size_bytes))
    commit = COMMITS[size_bytes == LARGE]
    assert operations(log).count(commit) == 2
    assert operations(log).count("CreateMultipartUpload") == (2 if size_bytes == LARGE else 0)
    assert operations(log).count("AbortMultipartUpload") == (1 if size_bytes == LARGE else 0)
    assert target.bytes() == content(size_bytes)
    assert target.leftovers() == []


def test_endless_conflicts_end(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_s3, "CONFLICT_TRIES", 2)

    def rule(call: Call) -> Reply | None:
        conflict = Reply(409, "ConditionalRequestConflict")
        return conflict if call.operation == "PutObject" else None

    with target.store.rule(rule), target.store.record() as log:
        assert error_code(target, content(SMALL)) == "io.write"
    assert operations(log).count("PutObject") == 2


@SIZES
@covers("PUB-5")
def test_a_store_without_conditions_is_asked_before_and_that_is_said(
    target: Target, size_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    def rule(call: Call) -> Reply | None:
        return Reply(501, "NotImplemented") if "if-none-match" in call.headers else None

    with target.store.rule(rule), caplog.at_level(logging.WARNING):
        target.publish(content(size_bytes))
        assert error_code(target, b"another") == "io.exists"
    assert target.bytes() == content(size_bytes)
    assert [record.name for record in caplog.records] == ["kvformat.storage.publish_s3"]
    assert "a writer at the same moment may replace" in caplog.text


@SIZES
@covers("PUB-3", "PUB-5", "PUB-6")
def test_it_is_asked_again_right_before_the_unconditional_request(
    target: Target, size_bytes: int
) -> None:
    """Another writer comes between the first look and the refusal of the condition."""

    def rule(call: Call) -> Reply | None:
        if "if-none-match" not in call.headers:
            return None
        target.put(b"faster")
        return Reply(501, "NotImplemented")

    with target.store.rule(rule):
        assert error_code(target, content(size_bytes)) == "io.exists"
    assert target.bytes() == b"faster"
    assert target.leftovers() == []


@covers("PUB-3", "PUB-5")
def test_a_store_that_ignores_conditions_is_still_asked_before(target: Target) -> None:
    """Such a store replaces what it should not; the look before catches all but a race."""
    target.put(b"before")

    def rule(call: Call) -> Reply | None:
        if call.operation == "PutObject":
            target.put(b"replaced")
        return None

    with target.store.rule(rule):
        assert error_code(target, content(SMALL)) == "io.exists"
    assert target.bytes() == b"before"


@pytest.mark.parametrize(
    "repeated",
    [None, Reply(412, "PreconditionFailed"), Reply(404, "NoSuchUpload")],
    ids=["as moto", "412", "no upload"],
)
@SIZES
def test_a_lost_reply_is_not_another_writer(
    target: Target, size_bytes: int, repeated: Reply | None
) -> None:
    """The store has done it, the answer never came, and the repeated request is refused."""
    answers = iter([Reply(503, "SlowDown", done=True), repeated])

    def rule(call: Call) -> Reply | None:
        return next(answers, None) if call.operation in COMMITS else None

    with target.store.rule(rule):
        target.publish(content(size_bytes))
    assert next(answers, "asked twice") == "asked twice"
    assert target.bytes() == content(size_bytes)
    assert target.leftovers() == []


# --- a real store ----------------------------------------------------------------------------


@pytest.fixture(name="real_url")
def real_url_fixture() -> Iterator[tuple[str, dict[str, Any]]]:
    prefix, options = real_endpoint()
    url = f"{prefix}/kvformat-test-{secrets.token_hex(8)}.kvf"
    yield url, options
    fs, path = fsspec.core.url_to_fs(url, **options)
    if fs.exists(path):
        fs.rm_file(path)


@SIZES
def test_a_real_endpoint(real_url: tuple[str, dict[str, Any]], size_bytes: int) -> None:
    """Skipped, and says so, unless KVFORMAT_S3_URL names a store: create, refuse, overwrite."""
    url, options = real_url

    def attempt(first: int, *, overwrite: bool = False) -> str:
        def write(file: IO[bytes]) -> None:
            file.write(content(size_bytes, first))

        try:
            publish(url, write, overwrite=overwrite, storage_options=options)
        except StorageError as error:
            return error.code
        return "ok"

    def stored() -> bytes:
        fs, path = fsspec.core.url_to_fs(url, **options)
        return bytes(fs.cat_file(path))

    assert attempt(0) == "ok"
    assert attempt(5) == "io.exists"
    assert stored() == content(size_bytes, 0)
    assert attempt(7, overwrite=True) == "ok"
    assert stored() == content(size_bytes, 7)
