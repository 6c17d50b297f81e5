"""What the front door says no with. One type, so that REST and gRPC cannot differ in when they refuse.

ApiError(kind, message, param, code, retry_after_ms)
   HTTP   status of kind, {"error": {"message", "type", "param", "code"}}, Retry-After
   gRPC   code of kind, the same message, details
"""

from __future__ import annotations

import asyncio
from enum import Enum

from coppice_scheduler.core.state.request import Finish, Output, OutputError, OutputErrorCode, Refused, RefusedReason

CLIENT_CLOSED_STATUS = 499  # nobody reads it; access logs do
_SHOWN_CHARS = 100  # of what a client sent; gRPC has 16 KiB for a whole error


class ErrorKind(Enum):
    """(HTTP status, OpenAI's error type)."""

    INVALID = (400, "invalid_request_error")
    UNAUTHENTICATED = (401, "authentication_error")
    NOT_FOUND = (404, "not_found_error")
    METHOD = (405, "invalid_request_error")
    TIMEOUT = (408, "invalid_request_error")
    CONFLICT = (409, "invalid_request_error")
    TOO_LARGE = (413, "invalid_request_error")
    MISMATCH = (422, "invalid_request_error")
    BUSY = (429, "rate_limit_error")
    ABORTED = (499, "aborted_error")  # as google.rpc.Code maps CANCELLED; clients send 409 and 5xx again by themselves
    INTERNAL = (500, "server_error")
    UNAVAILABLE = (503, "service_unavailable_error")
    DEADLINE = (504, "timeout_error")

    @property
    def http_status(self) -> int:
        return self.value[0]

    @property
    def type_name(self) -> str:
        return self.value[1]


class ApiError(Exception):
    """A refusal or failure that the client is told. `retry_after_ms` 0 = trying again does not help by itself."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_ms: int = 0,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_ms = retry_after_ms

    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind.type_name,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(ErrorKind.INVALID, message, param=param, code=code)


def internal() -> ApiError:
    return ApiError(ErrorKind.INTERNAL, "The server failed on this request. It has been logged.", code="internal")


def model_not_found(asked: str | None, served: str | None) -> ApiError:
    """The same for what never was and what this tenant may not ask for. `served`: what it may ask for, if anything."""
    what = "No model was named" if asked is None else f"The model {asked[:_SHOWN_CHARS]!r} does not exist"
    has = "none for this tenant" if served is None else repr(served)
    return ApiError(
        ErrorKind.NOT_FOUND,
        f"{what}; this server has {has}.",
        param="model",
        code="model_not_found",
    )


def request_not_found(asked: str) -> ApiError:
    """The same for what never was, what is over, and what another tenant has."""
    return ApiError(
        ErrorKind.NOT_FOUND,
        f"No request {asked[:_SHOWN_CHARS]!r} of yours is running or waiting.",
        param="request_id",
        code="request_not_found",
    )


def not_ready() -> ApiError:
    return ApiError(
        ErrorKind.UNAVAILABLE,
        "No worker can take requests now; the service is starting, draining or has lost a part.",
        code="not_ready",
        retry_after_ms=1000,
    )


# What is not named here passes by itself: limits and shortages, which trying again later helps.
_REFUSED_KIND = {
    RefusedReason.TOO_LONG: ErrorKind.INVALID,
    RefusedReason.NEVER_FITS: ErrorKind.INVALID,
    RefusedReason.EMPTY: ErrorKind.INVALID,
    RefusedReason.DRAINING: ErrorKind.UNAVAILABLE,
    RefusedReason.CALL_ENDED: ErrorKind.UNAVAILABLE,
    RefusedReason.QUARANTINED: ErrorKind.UNAVAILABLE,
    RefusedReason.INTERNAL: ErrorKind.INTERNAL,
    RefusedReason.TENANT_REMOVED: ErrorKind.UNAUTHENTICATED,
}

_OUTPUT_KIND = {
    OutputErrorCode.QUEUE_TIMEOUT: ErrorKind.BUSY,
    OutputErrorCode.TENANT_MAXIMUM: ErrorKind.BUSY,
    OutputErrorCode.NEVER_FITS: ErrorKind.INVALID,
    OutputErrorCode.DEADLINE: ErrorKind.DEADLINE,
    OutputErrorCode.GRAMMAR: ErrorKind.INVALID,
    OutputErrorCode.INTERNAL: ErrorKind.INTERNAL,
    OutputErrorCode.TENANT_REMOVED: ErrorKind.UNAUTHENTICATED,
    OutputErrorCode.KEY_REVOKED: ErrorKind.UNAUTHENTICATED,
    OutputErrorCode.ABORTED: ErrorKind.ABORTED,
}

_RETRY_ANYWAY_MS = 1000  # for kinds that pass by themselves when the core names no time


def from_refused(refused: Refused) -> ApiError:
    """The core's verdict on admission."""
    kind = _REFUSED_KIND.get(refused.reason, ErrorKind.BUSY)
    code = "context_length_exceeded" if refused.reason is RefusedReason.TOO_LONG else refused.reason.value
    return ApiError(kind, refused.message, code=code, retry_after_ms=_retry(kind, refused.retry_after_ms))


def from_output(error: OutputError | None) -> ApiError:
    """The core's verdict on a request that it had taken."""
    if error is None:
        return ApiError(ErrorKind.INTERNAL, "The request failed.", code="internal")
    kind = _OUTPUT_KIND.get(error.code, ErrorKind.UNAVAILABLE)
    code = "deadline_exceeded" if error.code is OutputErrorCode.DEADLINE else error.code.value
    return ApiError(kind, error.message, code=code, retry_after_ms=_retry(kind, error.retry_after_ms))


def _retry(kind: ErrorKind, retry_after_ms: int) -> int:
    if kind in (ErrorKind.BUSY, ErrorKind.UNAVAILABLE):
        return retry_after_ms or _RETRY_ANYWAY_MS
    return 0


def failure_of(output: Output) -> ApiError | None:
    """What to say where the engine ended a request by itself; None where the request goes on or came to its end."""
    if output.finish is Finish.ERROR:
        return from_output(output.error)
    if output.finish is Finish.CANCELLED:
        return ApiError(ErrorKind.UNAVAILABLE, "The server cancelled the request.", code="cancelled")
    return None


def no_ending() -> ApiError:
    return ApiError(ErrorKind.INTERNAL, "The engine ended the request without a reason.", code="internal")


def status_of(error: BaseException) -> int:
    """HTTP's."""
    if isinstance(error, ApiError):
        return error.kind.http_status
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return ErrorKind.ABORTED.http_status
    return ErrorKind.INTERNAL.http_status


def code_of(error: BaseException) -> str:
    """What metrics and spans call it."""
    if isinstance(error, ApiError):
        return error.code or error.kind.name.lower()
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return "cancelled"
    return "internal"
