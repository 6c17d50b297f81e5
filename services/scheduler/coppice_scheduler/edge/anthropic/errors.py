"""Errors in the shape of the Anthropic API: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from __future__ import annotations

from typing import Any

from coppice_scheduler.edge.base.errors import ApiError, ErrorKind

TOO_LONG = "context_length_exceeded"
TYPES = {
    ErrorKind.INVALID: "invalid_request_error",
    ErrorKind.UNAUTHENTICATED: "authentication_error",
    ErrorKind.NOT_FOUND: "not_found_error",
    ErrorKind.METHOD: "invalid_request_error",
    ErrorKind.TIMEOUT: "invalid_request_error",
    ErrorKind.TOO_LARGE: "request_too_large",
    ErrorKind.CONFLICT: "invalid_request_error",
    ErrorKind.MISMATCH: "invalid_request_error",
    ErrorKind.BUSY: "rate_limit_error",
    ErrorKind.ABORTED: "invalid_request_error",  # they have none for it; others are sent again
    ErrorKind.INTERNAL: "api_error",
    ErrorKind.UNAVAILABLE: "overloaded_error",
    ErrorKind.DEADLINE: "timeout_error",
}


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    message = error.message
    if error.code == TOO_LONG:
        message = f"prompt is too long: {message}"  # which programs look for, to shorten it
    return {
        "type": "error",
        "error": {"type": TYPES[error.kind], "message": message},
        "request_id": request_id,
    }
