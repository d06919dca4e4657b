"""Publication in S3 that fails, against moto: a mock, not a store (``tests/object_store.py``)."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import pytest

from kvformat.errors import StorageError, UsageError
from kvformat.storage import publish
from tests.object_store import (
    Call,
    ObjectStore,
    Reply,
    object_store_fixture,  # noqa: F401 - a fixture, used by name
)
from tests.publishing import (
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


@pytest.mark.parametrize("part", range(1, PARTS + 1))
@covers("PUB-1", "PUB-6")
def test_a_part_that_fails_aborts_the_upload(target: Target, part: int) -> None:
    def rule(call: Call) -> Reply | None:
        return Reply(400, "InvalidArgument") if call.part == part else None

    with target.store.rule(rule), target.store.record() as log:
        assert error_code(target, content(LARGE)) == "io.write"
    assert operations(log)[-1] == "AbortMultipartUpload"
    assert "CompleteMultipartUpload" not in operations(log)
    assert target.bytes() is None
    assert target.leftovers() == []


@covers("PUB-1", "PUB-3", "PUB-6")
def test_a_completion_that_fails_leaves_what_was_there(target: Target) -> None:
    target.put(b"before")

    def rule(call: Call) -> Reply | None:
        return Reply(400, "InvalidPart") if call.operation == "CompleteMultipartUpload" else None

    with target.store.rule(rule):
        assert error_code(target, content(LARGE), overwrite=True) == "io.write"
    assert target.bytes() == b"before"
    assert target.leftovers() == []


def test_an_upload_that_cannot_be_aborted_is_named(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    def rule(call: Call) -> Reply | None:
        denied = call.part == 2 or call.operation == "AbortMultipartUpload"
        return Reply(403, "AccessDenied") if denied else None

    with target.store.rule(rule), caplog.at_level(logging.WARNING):
        assert error_code(target, content(LARGE)) == "io.denied"
    assert target.leftovers() == ["folder/a.kvf"]
    assert "could not be aborted" in caplog.text
    assert target.path in caplog.text


@covers("PUB-1", "PUB-6")
def test_an_interrupt_aborts_the_upload(target: Target) -> None:
    """Control-C while part 3 is under way; the part's reply never comes."""
    release = threading.Event()

    def rule(call: Call) -> Reply | None:
        if call.part == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            release.wait(60)
            return Reply(400, "InvalidArgument")
        return None

    with target.store.rule(rule), target.store.record() as log:
        try:
            with pytest.raises(KeyboardInterrupt):
                target.publish(content(LARGE))
            assert operations(log)[-1] == "AbortMultipartUpload"
            assert target.bytes() is None
            assert target.leftovers() == []
        finally:
            release.set()


PUBLISH = """
import json, sys
from kvformat.storage import publish
url, options, size_bytes = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
def write(file):
    for start in range(0, size_bytes, 2**20):
        file.write(bytes(min(2**20, size_bytes - start)))
publish(url, write, storage_options=options)
lines = open("/proc/self/status").read().splitlines()
print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")))
"""


def publisher(target: Target, size_bytes: int) -> subprocess.Popen[str]:
    """Another process that publishes zeros and prints its peak resident size in KiB."""
    options = json.dumps(target.store.storage_options)
    command = [sys.executable, "-c", PUBLISH, target.url, options, str(size_bytes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@covers("PUB-1", "PUB-6")
def test_a_killed_writer_leaves_no_object(target: Target) -> None:
    """SIGKILL in the middle of a part: parts stay, without a name; the next writer succeeds."""
    arrived, release = threading.Event(), threading.Event()

    def rule(call: Call) -> Reply | None:
        if call.part == PARTS:
            arrived.set()
            release.wait(60)
        return None

    with target.store.rule(rule), publisher(target, LARGE) as process:
        try:
            assert arrived.wait(60)
            process.kill()
            assert process.wait() == -signal.SIGKILL
            assert target.bytes() is None
            assert target.leftovers() == ["folder/a.kvf"]
        finally:
            release.set()
    target.publish(content(LARGE))
    assert target.bytes() == content(LARGE)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_memory_does_not_grow_with_the_artifact(object_store: ObjectStore) -> None:
    """96 MiB more to send cost less than half of that in memory."""
    peaks_kib = []
    for size_bytes in (32 * 2**20, 128 * 2**20):
        with publisher(Target(object_store), size_bytes) as process:
            output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        peaks_kib.append(int(output))
    assert peaks_kib[1] - peaks_kib[0] < 48 * 1024


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (403, "AccessDenied", "io.denied"),
        (403, "SignatureDoesNotMatch", "io.denied"),
        (404, "NoSuchBucket", "io.not-found"),
        (400, "InvalidArgument", "io.write"),
    ],
)
@SIZES
@covers("PUB-1")
def test_refusals_have_the_code_of_their_reason(
    target: Target, size_bytes: int, status: int, code: str, expected: str
) -> None:
    def rule(call: Call) -> Reply | None:
        first = call.operation in ("PutObject", "CreateMultipartUpload")
        return Reply(status, code) if first else None

    with target.store.rule(rule):
        assert error_code(target, content(size_bytes)) == expected
    assert target.bytes() is None


@SIZES
def test_a_missing_bucket_is_not_found(object_store: ObjectStore, size_bytes: int) -> None:
    target = Target(object_store)
    target.url = "s3://no-such-bucket-here/a.kvf"
    with pytest.raises(StorageError, match="make it first") as caught:
        target.publish(content(size_bytes))
    assert caught.value.code == "io.not-found"


def test_no_credentials_are_a_denial(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(StorageError) as caught:
        target.publish(content(SMALL), key=None, secret=None)
    assert caught.value.code == "io.denied"


@covers("PUB-1")
def test_an_object_of_another_size_is_removed_and_reported(target: Target) -> None:
    """A store that keeps less than it acknowledges, under the entity tag that it answered."""

    def rule(call: Call) -> Reply | None:
        if "if-none-match" not in call.headers:
            return None
        target.put(b"cut")
        etag = target.store.file_system().info(target.path)["ETag"]
        return Reply(200, headers={"ETag": etag})

    with target.store.rule(rule):
        assert error_code(target, content(SMALL)) == "io.write"
    assert target.bytes() is None


@covers("PUB-2")
def test_an_object_that_was_replaced_since_is_left_alone(target: Target) -> None:
    """Another writer overwrote it right after this one: its size is not ours to judge."""

    def rule(call: Call) -> Reply | None:
        if "if-none-match" not in call.headers:
            return None
        target.put(b"newer")
        return Reply(200, headers={"ETag": '"0123"'})

    with target.store.rule(rule):
        target.publish(content(SMALL))
    assert target.bytes() == b"newer"


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/", "s3://bucket/folder/"])
def test_a_bucket_or_folder_is_not_a_target(object_store: ObjectStore, url: str) -> None:
    with pytest.raises(UsageError) as caught:
        publish(url, lambda _: None, storage_options=object_store.storage_options)
    assert caught.value.code == "usage.argument"
