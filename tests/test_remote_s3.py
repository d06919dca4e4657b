"""Reading from S3, against moto: a mock, not a store (see ``tests/object_store.py``)."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import fsspec
import pytest

import kvformat
from kvformat import StorageError
from kvformat.storage import Transport
from tests.object_store import (
    Call,
    ObjectStore,
    Reply,
    object_store_fixture,  # noqa: F401 - used by name
    real_endpoint,
)
from tests.remote import (
    PREFETCH_BYTES,
    arrays,
    assemble,
    eventually,
    far,
    local,
    ordinary,
    threads,
    wanted,
)
from tests.requirements import covers

FRONT = f"bytes=0-{PREFETCH_BYTES - 1}"
NO_REPEATS: dict[str, Any] = {"config_kwargs": {"retries": {"max_attempts": 0}}}
PART: dict[str, Any] = {"tokens": (500, 1_000), "track": "exact/zstd"}


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("kvformat.storage.ranged.FIRST_WAIT_S", 1e-3)
    yield
    assert eventually(lambda: threads() == [])


def s3_url(store: ObjectStore, data: bytes) -> tuple[str, dict[str, Any]]:
    bucket = store.new_bucket()
    store.file_system().pipe_file(f"{bucket}/some folder/a+b é.kvf", data)
    return f"s3://{bucket}/some folder/a+b é.kvf", store.storage_options


@covers("REQ-1", "REQ-2", "REQ-12")
def test_s3_is_asked_with_get_only(object_store: ObjectStore) -> None:
    data = ordinary()
    url, options = s3_url(object_store, data)
    part = {"tokens": (500, 1_000), "track": "exact/zstd"}
    with (
        object_store.record() as calls,
        kvformat.open(url, storage_options=options) as artifact,
    ):
        assert [call.operation for call in calls] == ["GetObject"]
        assert calls[0].headers["range"] == FRONT
        pieces = wanted(artifact, **part)
        assert arrays(artifact.read(**part)) == local(data, **part)
        assert [call.operation for call in calls] == ["GetObject"] * 2
        place = f"bytes={pieces[0].offset}-{pieces[-1].stop - 1}"
        assert calls[1].headers["range"] == place


def test_verifying_and_streaming_from_s3(object_store: ObjectStore) -> None:
    data = far()
    url, options = s3_url(object_store, data)
    assert kvformat.verify(url, storage_options=options, in_child=False).tokens == 300
    with kvformat.open(url, storage_options=options) as artifact:
        part = {"layers": (0, 4)}
        assert assemble(artifact, data, **part, order="token-major") == local(data, **part)


@pytest.mark.parametrize(
    ("key", "code"),
    [("missing.kvf", "io.not-found"), ("empty.kvf", "header.magic"), ("tiny.kvf", "header.magic")],
)
def test_s3_objects_that_are_none(object_store: ObjectStore, key: str, code: str) -> None:
    bucket = object_store.new_bucket()
    files = object_store.file_system()
    files.pipe_file(f"{bucket}/tiny.kvf", b"no cache")
    files.pipe_file(f"{bucket}/empty.kvf", b"")
    with pytest.raises(kvformat.KvformatError) as caught:
        kvformat.open(f"s3://{bucket}/{key}", storage_options=object_store.storage_options)
    assert caught.value.code == code


def presigned(store: ObjectStore, url: str) -> str:
    return str(store.file_system().sign(url.removeprefix("s3://"), expiration=600))


@covers("REQ-2", "REQ-5")
def test_a_presigned_url_is_read_over_http(object_store: ObjectStore) -> None:
    data = ordinary()
    url, _ = s3_url(object_store, data)
    signed = presigned(object_store, url)
    assert "Signature" in signed
    with object_store.record() as calls, kvformat.open(signed) as artifact:
        assert arrays(artifact.read(tokens=(0, 400))) == local(data, tokens=(0, 400))
        assert "Signature" not in artifact.name + repr(artifact)
        assert artifact.name.endswith("?...")
    assert [call.operation for call in calls] == ["GetObject"] * 2
    assert [call.headers.get("accept-encoding") for call in calls] == ["identity"] * 2
    signature = re.search(r"Signature=([^&]+)", signed)
    assert signature is not None
    assert all(unquote(signature[1]) in call.query.values() for call in calls)


CODES = {
    400: "io.read", 401: "io.denied", 403: "io.denied", 404: "io.not-found", 410: "io.not-found",
    412: "io.read", 416: "io.range", 429: "io.read", 500: "io.read", 503: "io.read",
}  # fmt: skip


@covers("REQ-6", "REQ-9")
@pytest.mark.parametrize(("status", "code"), CODES.items())
@pytest.mark.parametrize("later", [False, True])
def test_statuses_of_s3(object_store: ObjectStore, status: int, code: str, later: bool) -> None:
    url, options = s3_url(object_store, ordinary())
    opened = kvformat.open(url, storage_options={**options, **NO_REPEATS}) if later else None
    transport = Transport(retries=2)

    def rule(call: Call) -> Reply | None:
        return Reply(status, "Code") if call.operation == "GetObject" else None

    with (
        object_store.record() as calls,
        object_store.rule(rule),
        pytest.raises(StorageError) as caught,
    ):
        if opened is None:
            kvformat.open(url, storage_options={**options, **NO_REPEATS}, transport=transport)
        else:
            opened.read(**PART)
    assert caught.value.code == code
    assert "s3://" in caught.value.where
    tries = {False: 3, True: 5}[later] if status in (429, 500, 503) else 1
    assert [call.operation for call in calls] == ["GetObject"] * tries
    if opened is not None:
        opened.close()


@covers("REQ-9")
def test_a_busy_store_is_asked_again(object_store: ObjectStore) -> None:
    data = ordinary()
    url, options = s3_url(object_store, data)
    left = [503, 500, 503]

    def rule(call: Call) -> Reply | None:
        return Reply(left.pop(), "SlowDown") if left and call.operation == "GetObject" else None

    with (
        object_store.rule(rule),
        kvformat.open(url, storage_options={**options, **NO_REPEATS}) as artifact,
    ):
        assert arrays(artifact.read(**PART)) == local(data, **PART)
        assert artifact.source.meter.traffic().retries == 3
    assert left == []


def test_repeats_of_the_client_are_not_repeated(object_store: ObjectStore) -> None:
    """botocore tries as often as it is told; that is enough."""
    url, options = s3_url(object_store, ordinary())
    twice = {"config_kwargs": {"retries": {"max_attempts": 1}}}

    def rule(call: Call) -> Reply | None:
        return Reply(503, "SlowDown") if call.operation == "GetObject" else None

    with (
        object_store.record() as calls,
        object_store.rule(rule),
        pytest.raises(StorageError, match="503 SlowDown"),
    ):
        kvformat.open(url, storage_options={**options, **twice})
    assert len(calls) == 2


@covers("REQ-8")
def test_an_object_that_is_replaced(object_store: ObjectStore) -> None:
    """The same size, another entity tag."""
    data = ordinary()
    url, options = s3_url(object_store, data)
    with kvformat.open(url, storage_options=options) as artifact:
        object_store.file_system().pipe_file(url.removeprefix("s3://"), data[:-1] + b"x")
        with pytest.raises(StorageError) as caught:
            artifact.read(**PART)
    assert caught.value.code == "io.changed"


@covers("REQ-10")
def test_a_store_that_is_silent(object_store: ObjectStore) -> None:
    url, options = s3_url(object_store, ordinary())
    release = threading.Event()

    def rule(call: Call) -> Reply | None:
        if call.operation == "GetObject":
            release.wait(60)
        return None

    limits = Transport(connect_timeout_s=0.1, stall_timeout_s=0.1, retries=0)
    try:
        with object_store.rule(rule), pytest.raises(StorageError) as caught:
            kvformat.open(url, storage_options=options, transport=limits)
    finally:
        release.set()
    assert caught.value.code == "io.timeout"


def test_no_credentials(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    with pytest.raises(StorageError) as caught:
        kvformat.open("s3://no-such/a.kvf", storage_options={"endpoint_url": object_store.endpoint})
    assert caught.value.code in ("io.denied", "io.not-found")


def test_a_real_endpoint() -> None:
    """Skipped, and says so, unless KVFORMAT_S3_URL names a store: also by presigned URL."""
    prefix, options = real_endpoint()
    data = ordinary()
    url = f"{prefix}/kvformat-test-{secrets.token_hex(8)}.kvf"
    fs, path = fsspec.core.url_to_fs(url, **options)
    fs.pipe_file(path, data)
    try:
        assert kvformat.verify(url, storage_options=options, in_child=False).tokens == 1_500
        for place, given in ((url, options), (fs.sign(path), {})):
            with kvformat.open(place, storage_options=given) as artifact:
                restored = artifact.read(**PART)
                assert arrays(restored) == local(data, **PART)
                assert restored.report is not None
                assert restored.report.traffic.requests == 1
                part = {"layers": (0, 4)}
                assert assemble(artifact, data, **part, order="layer-major") == local(data, **part)
    finally:
        fs.rm_file(path)
