"""`Idempotency-Key`: a call that is sent again gets the first one's outcome, and is computed once.

A call with a key runs on when its client goes away, so that the next attempt finds it. It holds its place until then.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi.responses import Response

from coppice.tenants.tenant import Tenant
from coppice_scheduler.edge.base.engine import EngineLost
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind, from_output, internal, invalid
from coppice_scheduler.edge.base.idempotency import ANSWER_BYTES_MAX, Claimed, ClaimState, FirstOutcome
from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.http.field_table import IGNORED_HEADER

IDEMPOTENCY_KEY = "idempotency-key"
REPLAYED_HEADER = "idempotent-replayed"
_KEY_CHARS_MAX = 255
_RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class CallKey:
    """Digests of a key, and of the route and body that it came with."""

    key: bytes
    call: bytes


def call_key_of(sent: str | None, path: str, body: bytes) -> CallKey | None:
    """None where no key was sent. Raises ApiError (INVALID)."""
    if sent is None:
        return None
    if not 0 < len(sent) <= _KEY_CHARS_MAX:
        message = f"Idempotency-Key must have 1 to {_KEY_CHARS_MAX} characters."
        raise invalid(message, param=IDEMPOTENCY_KEY, code="invalid_idempotency_key")
    call = hashlib.sha256(path.encode() + b"\0")
    call.update(body)
    return CallKey(hashlib.sha256(sent.encode()).digest(), call.digest())


async def answer_once(
    frontdoor: FrontDoor, tenant: Tenant, key: CallKey, computed: Coroutine[Any, Any, Response]
) -> Response:
    """What `computed` gives, or gave for the first call with this key; it is run or closed. Raises ApiError.

    Ends no sooner when it is cancelled: what the call holds of this front door is held while it runs.
    """
    task = asyncio.create_task(_answer(frontdoor, tenant, key, computed))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        task.cancelled() or task.exception()  # nobody is there to hear of it
        raise


async def _answer(
    frontdoor: FrontDoor, tenant: Tenant, key: CallKey, computed: Coroutine[Any, Any, Response]
) -> Response:
    try:
        claimed = await frontdoor.engine.claim(tenant.id, key.key, key.call, is_strict=tenant.mode == "strict")
        if claimed.state is ClaimState.MINE:
            return await _settled(frontdoor, claimed.number, computed)
        if claimed.state is ClaimState.UNKEPT:
            return _unkept(await computed)
    except EngineLost as lost:
        raise from_output(lost.error) from lost
    finally:
        computed.close()
    response = _replayed(claimed)
    frontdoor.metrics.replayed(tenant.id)
    return response


async def _settled(frontdoor: FrontDoor, number: int, computed: Coroutine[Any, Any, Response]) -> Response:
    """Whatever becomes of the call, the planner hears of it."""
    outcome: FirstOutcome | None = None
    try:
        response = await computed
        if len(response.body) > ANSWER_BYTES_MAX:
            return _unkept(response)
        outcome = FirstOutcome(bytes(response.body), response.headers.get(IGNORED_HEADER, ""))
        return response
    except Exception as error:
        outcome = _failed(error if isinstance(error, ApiError) else internal())
        raise
    finally:
        frontdoor.engine.settle(number, outcome)


def _failed(error: ApiError) -> FirstOutcome:
    return FirstOutcome(
        kind=error.kind.name,
        message=error.message,
        param=error.param,
        code=error.code,
        retry_after_ms=error.retry_after_ms,
    )


def _replayed(claimed: Claimed) -> Response:
    """The first call's outcome. Raises ApiError where that was an error, or cannot be told."""
    first = claimed.outcome
    if first is None:
        raise _refusal(claimed.state)
    if first.kind:
        kind = ErrorKind[first.kind]
        raise ApiError(kind, first.message, param=first.param, code=first.code, retry_after_ms=first.retry_after_ms)
    headers = {REPLAYED_HEADER: "true"} | ({IGNORED_HEADER: first.ignored} if first.ignored else {})
    return Response(first.body, media_type="application/json", headers=headers)


def _refusal(state: ClaimState) -> ApiError:
    kind, message, code, retry_after_ms = {
        ClaimState.ANOTHER: (
            ErrorKind.MISMATCH,
            "This Idempotency-Key was used for another route or body; send a key of its own with each call.",
            "idempotency_key_reused",
            0,
        ),
        ClaimState.CROWDED: (
            ErrorKind.CONFLICT,
            "The first call with this Idempotency-Key still runs, and many wait for it; send it again later.",
            "idempotency_key_in_use",
            _RETRY_MS,
        ),
        ClaimState.LOST: (
            ErrorKind.UNAVAILABLE,
            "The outcome of the first call with this Idempotency-Key is lost or too long; send it again to compute it.",
            "idempotent_outcome_lost",
            _RETRY_MS,
        ),
    }[state]
    return ApiError(kind, message, param=IDEMPOTENCY_KEY, code=code, retry_after_ms=retry_after_ms)


def _unkept(response: Response) -> Response:
    """It says that the key had no effect."""
    listed = response.headers.get(IGNORED_HEADER)
    response.headers[IGNORED_HEADER] = f"{IDEMPOTENCY_KEY}, {listed}" if listed else IDEMPOTENCY_KEY
    return response
