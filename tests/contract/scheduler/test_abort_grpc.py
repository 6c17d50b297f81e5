"""`Abort` over gRPC: the same rule as over REST, and calls of either API end with it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_scheduler.core.state.request import OutputError, OutputErrorCode
from tests.fakes.api.grpc_served import WAIT_S, Served, details_of, serve

TENANTS = TenantDirectory([Tenant(id=name, api_key_sha256=(digest_of_key(f"key-{name}"),)) for name in "ab"])
ID = "job-7"


def metadata(tenant: str, request_id: str = ID) -> tuple[tuple[str, str], ...]:
    return ("authorization", f"Bearer key-{tenant}"), ("x-request-id", request_id)


async def abort(served: Served, tenant: str = "a", request_id: str = ID) -> int:
    request = pb.AbortRequest(request_id=request_id)
    answer = await served.stub.Abort(request, timeout=WAIT_S, metadata=metadata(tenant, "another"))
    return int(answer.num_answers)


async def refusal(served: Served, *asked: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await abort(served, *asked)
    return caught.value


async def hanging(served: Served, tenant: str = "a", **fields: Any) -> asyncio.Task[Any]:
    num_before = len(served.engine.requests)
    call = asyncio.create_task(served.ask(metadata(tenant), **fields))
    while len(served.engine.requests) == num_before:
        await asyncio.sleep(0.005)
    return call


def test_all_answers_of_the_id_end_as_cancelled_with_the_reason() -> None:
    async def test(served: Served) -> None:
        served.says("fine", hangs=True)
        calls = [await hanging(served, n=3), await hanging(served)]
        kept = await hanging(served, "b")
        assert (await refusal(served, "a", "job-8")).code() is grpc.StatusCode.NOT_FOUND
        assert await abort(served) == 4
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.CANCELLED
            assert details_of(caught.value)["ErrorInfo"].reason == "request_aborted"
            assert dict(caught.value.trailing_metadata() or ())["x-request-id"] == ID
        assert not kept.done()
        assert served.engine.cancelled == []
        assert await abort(served, "b") == 1
        with pytest.raises(grpc.aio.AioRpcError, match="aborted"):
            await kept

    serve(test, TENANTS)


def test_what_another_tenant_has_is_answered_like_what_nobody_has() -> None:
    async def test(served: Served) -> None:
        served.says("fine", hangs=True)
        call = await hanging(served, "b")
        theirs = await refusal(served)
        assert not call.done()
        await abort(served, "b")
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        nobodys = await refusal(served)
        for error in (theirs, nobodys):
            assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, nobodys.details())
            assert error.trailing_metadata() == nobodys.trailing_metadata()
        assert details_of(nobodys)["ErrorInfo"].reason == "request_not_found"

    serve(test, TENANTS)


def test_a_planner_that_is_gone_is_no_answer() -> None:
    async def test(served: Served) -> None:
        served.engine.lost = OutputError(OutputErrorCode.SCHEDULER_LOST, "it is gone", 1000)
        error = await refusal(served)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert details_of(error)["RetryInfo"].retry_delay.ToMilliseconds() == 1000

    serve(test, TENANTS)
