"""What tests of every kind share: real servers, started when a test first asks for one."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

pytest.register_assert_rewrite(
    "tests.crash", "tests.laws", "tests.model", "tests.servers", "tests.ui", "tests.unit"
)  # also under python -O

from tests.servers import seaweedfs  # noqa: E402

settings.register_profile("shared", deadline=None)  # others may take the machine at any moment
settings.load_profile("shared")


@pytest.fixture(scope="session")
def _seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[seaweedfs.SeaweedFS]:
    root = tmp_path_factory.mktemp("seaweedfs")  # what a killed session leaves goes with later ones
    with seaweedfs.seaweedfs(str(root)) as server:
        yield server


@pytest.fixture
def s3(_seaweedfs: seaweedfs.SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> seaweedfs.SeaweedFS:
    """A real S3 server that answers, its credentials in the environment; tests may kill it."""
    if not _seaweedfs.process.alive:
        _seaweedfs.start()
    for name, value in _seaweedfs.credentials.items():
        monkeypatch.setenv(name, value)
    return _seaweedfs


@pytest.fixture
def bucket(s3: seaweedfs.SeaweedFS) -> str:
    """An empty bucket of the server, for this test alone."""
    return s3.new_bucket()
