"""Errors of the gRPC API. A status carries google.rpc details:

ErrorInfo      always; reason = the code that REST has
RetryInfo      where a time is known
QuotaFailure   where a limit of the tenant's was hit: which tenant, which limit
BadRequest     where a field of the request is wrong
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from coppice_scheduler.core.state.request import OutputErrorCode, RefusedReason
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind
from coppice_scheduler.edge.base.request_id import HEADER, RequestId

CODES = {
    ErrorKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorKind.METHOD: grpc.StatusCode.UNIMPLEMENTED,
    ErrorKind.TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorKind.TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.CONFLICT: grpc.StatusCode.ABORTED,  # of REST alone, as the next one
    ErrorKind.MISMATCH: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.ABORTED: grpc.StatusCode.CANCELLED,
    ErrorKind.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorKind.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}
_QUOTA_CODES = frozenset(
    {
        RefusedReason.TENANT_CONCURRENCY.value,
        RefusedReason.TENANT_QUEUE.value,
        RefusedReason.TENANT_RATE.value,
        OutputErrorCode.TENANT_MAXIMUM.value,
    }
)


async def abort(
    context: grpc.aio.ServicerContext[Any, Any],
    error: ApiError,
    request_id: RequestId,
    tenant: str = "",
    limits_left: Mapping[str, str] = {},
) -> NoReturn:
    """End the call with the error's status. `tenant` is whose limits a refusal speaks of, and `limits_left` tells."""
    code = CODES[error.kind]
    status = status_pb2.Status(code=code.value[0], message=error.message, details=map(_packed, _details(error, tenant)))
    trailing: list[tuple[str, str | bytes]] = [
        ("grpc-status-details-bin", status.SerializeToString()),
        (HEADER, request_id.shown),
        *limits_left.items(),
    ]
    if error.retry_after_ms:
        trailing.append(("retry-after-ms", str(error.retry_after_ms)))
    await context.abort(code, error.message, tuple(trailing))
    raise AssertionError("abort raises")


def _details(error: ApiError, tenant: str) -> list[Message]:
    info = error_details_pb2.ErrorInfo(reason=error.code or error.kind.name.lower(), domain="coppice")
    if error.param is not None:
        info.metadata["param"] = error.param
    details: list[Message] = [info]
    if error.retry_after_ms:
        delay = Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if error.code in _QUOTA_CODES:
        violation = error_details_pb2.QuotaFailure.Violation(
            subject=f"tenant:{tenant}", description=f"{error.code}: {error.message}"
        )
        details.append(error_details_pb2.QuotaFailure(violations=[violation]))
    if error.kind in (ErrorKind.INVALID, ErrorKind.TOO_LARGE) and error.param is not None:
        wrong = error_details_pb2.BadRequest.FieldViolation(field=error.param, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[wrong]))
    return details


def _packed(message: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed
