"""The portable archive: an uncompressed tar that anybody can list.

Members, in this order: ``kvtiers-archive.json`` with format, version and the manifests of all
namespaces; ``<namespace>/<digest>-g<group>.kvc`` for each chunk, as :mod:`kvtiers.tiers.record`
writes it: header page and payload; ``kvtiers-end.json`` with how many chunks there were, so that
an archive that was cut short is known for one.
"""

import contextlib
import io
import json
import mmap
import os
import re
import stat
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from typing import Any, BinaryIO

from kvtiers.chunks import PAGE_BYTES, Key, Namespace
from kvtiers.errors import ConfigError, Kind, KVTiersError, map_errors
from kvtiers.tiers import record
from kvtiers.tiers.base import Entry
from kvtiers.tiers.fs import names
from kvtiers.tiers.places import MAX_CHUNK_BYTES, Payload
from kvtiers.tiers.whole import whole_file

FORMAT = "kvtiers-archive"
VERSION = 1

_HEAD = "kvtiers-archive.json"
_END = "kvtiers-end.json"
_CHUNK = re.compile(r"([0-9a-f]{32})/([^/]+)")
_MAX_JSON = 64 << 20


class ArchiveWriter:
    """An archive that is being written, beside its name until it is whole."""

    def __init__(self, file: BinaryIO, namespaces: Sequence[Namespace]) -> None:
        self._tar = tarfile.TarFile(fileobj=file, mode="w", format=tarfile.PAX_FORMAT)
        self._chunks = 0
        manifests = {n.id: dict(n.fields) for n in namespaces}
        head = {"format": FORMAT, "version": VERSION, "namespaces": manifests}
        self._add(_HEAD, json.dumps(head, indent=1).encode())

    def add(self, namespace_id: str, entry: Entry, payload: memoryview) -> None:
        """A verified chunk."""
        name = f"{namespace_id}/{os.path.basename(names.chunk_path(entry.key))}"
        header = record.pack(entry.key, namespace_id, payload)
        self._add(name, b"".join((header, payload)), entry.used_at)
        self._chunks += 1

    def end(self) -> None:
        """It is whole."""
        self._add(_END, json.dumps({"chunks": self._chunks}).encode())
        self._tar.close()

    def _add(self, name: str, data: bytes, at: float = 0.0) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mtime, member.mode = len(data), max(0, int(at)), 0o600
        self._tar.addfile(member, io.BytesIO(data))
        self._tar.getmembers().clear()  # nobody asks for them, and a tier may hold millions


@contextlib.contextmanager
def writing(path: str, namespaces: Sequence[Namespace]) -> Iterator[ArchiveWriter]:
    """A new archive that appears as ``path``, mode 0600, when the body is done, or never."""
    with whole_file(path) as file:
        writer = ArchiveWriter(file, namespaces)
        yield writer
        writer.end()


@dataclass(frozen=True, slots=True)
class Member:
    """A chunk in an archive: what its name says."""

    namespace_id: str
    entry: Entry


class ArchiveReader:
    """An archive that is there.

    Raises ConfigError if it is none or of another version, KVTiersError if it is not whole.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.namespaces: dict[str, Namespace] = {}
        self.members: list[Member] = []
        self.strange: list[str] = []
        """What in it is no chunk of it: one sentence each."""
        self._found: dict[tuple[str, Key], tarfile.TarInfo] = {}
        self._file = _open(path)
        try:
            self._index()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def payloads(self, namespace_id: str, keys: Sequence[Key]) -> Iterator[tuple[Key, Payload]]:
        """Each chunk, verified, valid until the next is asked for."""
        memory = mmap.mmap(-1, PAGE_BYTES)
        for key in keys:
            member = self._found[namespace_id, key]
            if member.size > len(memory):
                memory = mmap.mmap(-1, member.size)
            view = memoryview(memory)[: member.size]
            with map_errors("read", self._path):
                self._file.seek(member.offset_data)
                short = self._file.readinto(view) != member.size
            error = _problem(view, short, key, namespace_id)
            if error is not None:
                error = KVTiersError(f"{member.name}: {error}", kind=error.kind)
            yield key, error or view[PAGE_BYTES:]

    def _index(self) -> None:
        """One pass over the members' headers, and the first and last of them."""
        ends = None
        with _tar_errors(self._path), tarfile.open(fileobj=self._file, mode="r:") as tar:
            for number, member in enumerate(tar):
                if number == 0:
                    self._begin(member, self._json(member))
                elif member.name == _END:
                    ends = self._json(member)
                else:
                    self._sort(member)
        if not self.namespaces:
            raise _no_archive(self._path, "it is empty")
        count = len(self.members) + len(self.strange)
        if not isinstance(ends, dict) or ends.get("chunks") != count:
            raise _damaged(f"{self._path!a} was cut short or changed: write it again")

    def _json(self, member: tarfile.TarInfo) -> Any:
        if not member.isreg() or member.size > _MAX_JSON:
            raise _no_archive(self._path, "it does not begin with a description")
        back = self._file.tell()
        self._file.seek(member.offset_data)
        text = self._file.read(member.size)
        self._file.seek(back)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return None

    def _begin(self, member: tarfile.TarInfo, head: Any) -> None:
        if member.name != _HEAD or not isinstance(head, dict) or head.get("format") != FORMAT:
            raise _no_archive(self._path, f"it does not begin with {_HEAD}")
        if head.get("version") != VERSION:
            raise ConfigError(
                f"{self._path!a} has version {head.get('version')!a}, this kvtiers reads version "
                f"{VERSION}: use the kvtiers that wrote it"
            )
        manifests = head.get("namespaces")
        if not isinstance(manifests, dict) or not manifests:
            raise _no_archive(self._path, "it names no namespace")
        for name, fields in manifests.items():
            self.namespaces[name] = self._namespace(name, fields)

    def _namespace(self, name: str, fields: Any) -> Namespace:
        try:
            namespace = Namespace(fields) if isinstance(fields, Mapping) else None
        except (ValueError, TypeError):
            namespace = None
        if namespace is None or namespace.id != name:
            raise _damaged(
                f"{self._path!a}: the manifest of namespace {name!a} is damaged or another's"
            )
        return namespace

    def _sort(self, member: tarfile.TarInfo) -> None:
        match = _CHUNK.fullmatch(member.name)
        key = names.chunk_key(match[2]) if match else None
        if match is None or key is None or match[1] not in self.namespaces:
            self.strange.append(f"{member.name!a} is no chunk of its namespaces")
        elif not member.isreg() or member.issparse():
            self.strange.append(f"{member.name!a} is no plain file")
        elif not PAGE_BYTES <= member.size <= MAX_CHUNK_BYTES:
            self.strange.append(f"{member.name!a} has {member.size} bytes, as no chunk has")
        elif (match[1], key) in self._found:
            self.strange.append(f"{member.name!a} is there twice")
        else:
            self._found[match[1], key] = member
            entry = Entry(key, member.size - PAGE_BYTES, float(member.mtime))
            self.members.append(Member(match[1], entry))


def _open(path: str) -> BufferedReader:
    """A regular file, for reading; does not wait for the writer of a fifo."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        raise ConfigError(f"{path!a} cannot be read: {e.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigError(f"{path!a} is no regular file: name an archive")
    return os.fdopen(fd, "rb")


@contextlib.contextmanager
def _tar_errors(path: str) -> Iterator[None]:
    try:
        yield
    except KVTiersError:
        raise
    except (tarfile.TarError, ValueError, OverflowError, EOFError, OSError) as e:
        raise _no_archive(path, str(e) or type(e).__name__) from None


def _no_archive(path: str, why: str) -> ConfigError:
    return ConfigError(f"{path!a} is no archive of kvtiers: {why}")


def _damaged(sentence: str) -> KVTiersError:
    return KVTiersError(sentence, kind=Kind.CORRUPT, operation="import")


def _problem(view: memoryview, short: bool, key: Key, namespace_id: str) -> KVTiersError | None:
    if short:
        return _damaged("it is cut short")
    return record.verify(view[:PAGE_BYTES], key, namespace_id, view[PAGE_BYTES:])
