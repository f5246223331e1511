from collections.abc import Iterator

import pytest

from tests.servers.fake_s3 import FakeS3
from tests.servers.seaweedfs import SeaweedFS
from tests.unit.tiers.obj.obj_kit import SECRETS, Bucket


@pytest.fixture
def real(s3: SeaweedFS, bucket: str) -> Bucket:
    """An empty bucket of a real server."""
    return Bucket(s3.endpoint, bucket)


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    with FakeS3() as server:
        yield server


@pytest.fixture
def faulty(fake: FakeS3) -> Bucket:
    """A bucket of a server that can be told to fail."""
    credentials = dict(zip(("access_key_id", "secret_access_key"), SECRETS, strict=False))
    return Bucket(fake.endpoint, "bucket", {**credentials, "max_retries": 1})
