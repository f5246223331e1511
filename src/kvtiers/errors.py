"""One error family: what kind, whether to try again, during which operation, on what.

Absent, busy and partly done are results, not exceptions. Foreign exceptions are mapped once, at
the edge, with :func:`map_errors`.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum


class Kind(Enum):
    """What went wrong."""

    CONFIG = "config"
    """The configuration asks for something that cannot be had."""
    CORRUPT = "corrupt"
    """Stored bytes are damaged, short, or not those of the key."""
    VANISHED = "vanished"
    """A chunk that was there is gone."""
    FULL = "full"
    """No space: disk, quota, or the tier's own capacity."""
    TIMEOUT = "timeout"
    """A deadline passed."""
    IO = "io"
    """The device or the server failed."""
    UNSUPPORTED = "unsupported"
    """A declared absent ability was asked for."""
    CLOSED = "closed"
    """The object was shut down."""
    BROKEN = "broken"
    """A plug-in broke its contract."""


class Retry(Enum):
    """Whether the same call may be made again."""

    NEVER = "never"
    MAY = "may"
    EXHAUSTED = "exhausted"


class KVTiersError(Exception):
    """The one exception kvtiers raises on purpose.

    ``str()`` is one sentence for a person: what is wrong, which key or file, what to do.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: Kind,
        retry: Retry = Retry.NEVER,
        operation: str = "",
        context: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry = retry
        self.operation = operation
        self.context = context or {}
        self.said = False
        """Whether a line of the log says it already; travels along between processes."""

    def __repr__(self) -> str:
        where = f" in {self.operation}" if self.operation else ""
        return f"<KVTiersError {self.kind.value}{where}: {self}>"

    def __reduce__(self) -> tuple[object, ...]:
        """All that is known goes along when it is pickled, as it is between vLLM's processes."""
        return (_rebuild, (type(self), str(self)), vars(self))


def _rebuild(cls: type[KVTiersError], message: str) -> KVTiersError:
    """An error as it is before the state that pickle sets; constructors differ by class."""
    return cls.__new__(cls, message)


class ConfigError(KVTiersError):
    """Bad configuration: raised before anything is started."""

    def __init__(self, message: str, **context: str) -> None:
        super().__init__(message, kind=Kind.CONFIG, operation="configure", context=context)


def closed(who: str, operation: str) -> KVTiersError:
    """The error of an operation that comes after ``close``."""
    return KVTiersError(f"{who}: {operation} after close", kind=Kind.CLOSED, operation=operation)


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_TRANSIENT = {errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT, errno.EIO, errno.ESTALE}


@contextmanager
def map_errors(operation: str, path: str = "") -> Iterator[None]:
    """Turn an ``OSError`` from the body into a :class:`KVTiersError` that names ``path``."""
    try:
        yield
    except OSError as e:
        code = e.errno or 0
        if code == errno.ENOENT:
            kind = Kind.VANISHED
        elif code in _FULL:
            kind = Kind.FULL
        else:
            kind = Kind.IO
        retry = Retry.MAY if code in _TRANSIENT or kind is Kind.FULL else Retry.NEVER
        where = f" {path}" if path else ""
        raise KVTiersError(
            f"{operation}{where} failed: {e.strerror or e}",
            kind=kind,
            retry=retry,
            operation=operation,
            context={"path": path},
        ) from e
