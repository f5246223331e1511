"""What ``obstore`` raises, as errors of ours: a kind, one sentence, and no secret in it.

Its texts quote requests and answers at length, and an answer may quote what was signed and by
whom. So nothing of them is passed on but what is known to be harmless: the status, the code of
the service, and what the system said of a connection.
"""

import re

from kvtiers.errors import Kind, KVTiersError, Retry

_STATUS = re.compile(r"status(?: code)?: (\d{3})\b")
_CODE = re.compile(r"(?:<Code>|code: \"?)([A-Za-z]{1,60})(?:</Code>|\"?[,)])")
_KIND = re.compile(r"kind: (Connect|Interrupted)\b")
_SYSTEM = re.compile(r'(?:Os \{[^{}"]*message|error): "([A-Za-z ]{1,60}(?:: [A-Za-z ]{1,60})?)')
_NAME = re.compile(r'path: "((?:[^"\\]|\\.){0,200})')
_TIMED_OUT = re.compile(r"kind: Timeout|TimedOut|timed out|operation timed out")
_TLS = re.compile(
    r"BadScheme|InvalidContentType|UnknownIssuer|NotValidForName|Expired|BadSignature"
)

_MISSING_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_NOT_ALLOWED = "AccessDenied"
_NO_PATH = "InvalidPath"
_NO_ROOM = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "ServiceQuotaExceeded"}
_NO_ROOM_STATUS = 507
_BEYOND_THE_END = 416
_TOO_MANY = (429, 503)
_CONNECT = "kind: Connect"
_SKEWED = "RequestTimeTooSkewed"


def error_of(failure: BaseException, operation: str, name: str) -> KVTiersError:
    """What became of ``operation`` on the object ``name``.

    ``VANISHED`` is an object that is not there, ``CORRUPT`` one that ends before the range that was
    asked for begins. What the client has tried again already, with pauses, is not to be tried again
    at once; what it did not, such as an answer that broke off, may be.
    """
    text = str(failure)
    status, code = _first(_STATUS, text), _first(_CODE, text)
    kind = _kind(failure, text, int(status or 0), code)
    return KVTiersError(
        f"{operation} of {name} failed: {_reason(failure, text, status, code)}",
        kind=kind,
        retry=_retry(kind, int(status or 0), text),
        operation=operation,
        context={"object": name, "status": status, "code": code},
    )


def _kind(failure: BaseException, text: str, status: int, code: str) -> Kind:
    if isinstance(failure, FileNotFoundError):
        return Kind.IO if code in _MISSING_BUCKET else Kind.VANISHED
    if status == _BEYOND_THE_END:
        return Kind.CORRUPT
    if status == _NO_ROOM_STATUS or code in _NO_ROOM:
        return Kind.FULL
    return Kind.TIMEOUT if _TIMED_OUT.search(text) and not status else Kind.IO


def _retry(kind: Kind, status: int, text: str) -> Retry:
    if kind not in (Kind.IO, Kind.TIMEOUT) or 400 <= status < 429:
        return Retry.NEVER
    tried = status or kind is Kind.TIMEOUT or _CONNECT in text
    return Retry.EXHAUSTED if tried else Retry.MAY


def _reason(failure: BaseException, text: str, status: str, code: str) -> str:
    if status or code:
        said = " ".join(filter(None, (status, code)))
        return f"the server answered {said}{_advice(failure, int(status or 0), code)}"
    if isinstance(failure, FileNotFoundError):
        return "it is not there"
    if _NO_PATH in type(failure).__name__:
        name = ascii(_first(_NAME, text))
        return f"an object there is called {name}, which is no path: call it otherwise"
    if _TIMED_OUT.search(text):
        return "no answer in time: is the server alive?"
    system = _first(_SYSTEM, text) or _first(_TLS, text, 0) or _first(_KIND, text)
    if system:
        return f"{system}: is the endpoint right and the server alive?"
    return f"an answer that cannot be understood ({type(failure).__name__})"


def _advice(failure: BaseException, status: int, code: str) -> str:
    if code in _MISSING_BUCKET:
        return ": make the bucket, or name another"
    if code == _SKEWED:
        return ": the clock of this machine differs from the server's by too much"
    if status in (401, 403) or code == _NOT_ALLOWED:
        return ": check the credentials and what they allow (get, put, list, delete)"
    if status in _TOO_MANY:
        return ": too many requests, or an overloaded server"
    return ""


def _first(pattern: re.Pattern[str], text: str, group: int = 1) -> str:
    match = pattern.search(text)
    return match[group] if match else ""
