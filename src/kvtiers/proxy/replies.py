"""What the proxy says itself: errors in the shape of OpenAI's, one sentence each."""

import json
from dataclasses import dataclass

_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    502: "upstream_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not answered by a worker."""

    status: int
    sentence: str
    param: str | None = None
    """The field of the body that is at fault."""
    retry_after_s: int | None = None

    def body(self) -> bytes:
        """JSON with ``error``: ``message``, ``type``, ``param``, ``code``."""
        error = {
            "message": self.sentence,
            "type": _TYPES.get(self.status, "server_error"),
            "param": self.param,
            "code": self.status,
        }
        return json.dumps({"error": error}).encode()

    def headers(self) -> dict[str, str]:
        """Beside the content type."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


FULL = Refusal(
    429, "More requests wait than the proxy keeps waiting: send this one again.", None, 1
)
NO_TURN = Refusal(503, "No worker had room in time: send the request again later.", None, 5)
NO_WORKER = Refusal(503, "No worker can be reached: send the request again later.", None, 5)
ENDING = Refusal(503, "The proxy is being stopped: send the request to another one.", None, 5)
FAILED = Refusal(502, "Every worker that was tried failed before it answered: send it again.")
NOT_JSON = Refusal(415, "The Content-Type is not application/json: send JSON and say so.")
"""Of a form that a web page could make a browser send here, among others."""
BROKEN_BODY = Refusal(400, "The body of the request is malformed: send it again.")
SLOW_BODY = Refusal(408, "The body of the request did not arrive in time: send it again.")


def too_large(max_body_bytes: int) -> Refusal:
    """Of a body above the bound."""
    return Refusal(413, f"The body is larger than {max_body_bytes} bytes: send less.")
