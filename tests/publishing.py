"""What the tests of publication in S3 share; there are no tests here."""

from __future__ import annotations

import contextlib
from typing import IO, Any

import numpy as np
import pytest

from kvformat.errors import StorageError
from kvformat.storage import publish, publish_s3
from tests.object_store import Call, ObjectStore

SMALL = 1_000
LARGE = 2 * publish_s3.PUT_BYTES + 8_000  # four parts and a bit
PARTS = -(-LARGE // publish_s3.PART_BYTES)
SIZES = pytest.mark.parametrize("size_bytes", [SMALL, LARGE], ids=["put", "multipart"])
COMMITS = ("PutObject", "CompleteMultipartUpload")


def content(size_bytes: int, first: int = 0) -> bytes:
    """Bytes of which no two words are equal, so that an exchanged part is noticed."""
    return np.arange(first, first + size_bytes // 8, dtype="<u8").tobytes()


class Target:
    """One name in a bucket of its own, and what can be seen of it."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.bucket = store.new_bucket()
        self.path = f"{self.bucket}/folder/a.kvf"
        self.url = f"s3://{self.path}"

    def publish(self, data: bytes, *, overwrite: bool = False, **options: Any) -> None:
        def write(file: IO[bytes]) -> None:
            file.write(data)

        options = {**self.store.storage_options, **options}
        publish(self.url, write, overwrite=overwrite, storage_options=options)

    def bytes(self) -> bytes | None:
        """The whole object, None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return bytes(self.store.file_system().cat_file(self.path))
        return None

    def put(self, data: bytes, **options: Any) -> None:
        """Another writer."""
        self.store.file_system().pipe_file(self.path, data, **options)

    def leftovers(self) -> list[str]:
        return self.store.unfinished_uploads(self.bucket)


@pytest.fixture(name="target")
def target_fixture(object_store: ObjectStore) -> Target:
    return Target(object_store)


def operations(log: list[Call]) -> list[str]:
    return [call.operation for call in log]


def error_code(target: Target, data: bytes, **options: Any) -> str:
    with pytest.raises(StorageError) as caught:
        target.publish(data, **options)
    return caught.value.code
