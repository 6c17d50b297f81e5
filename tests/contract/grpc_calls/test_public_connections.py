"""How long a connection to the gRPC port stays: for calls that come and streams that run, and for nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_scheduler.edge.grpc.keyless import KeylessLimits
from coppice_scheduler.edge.grpc.server import ConnectionLimits
from tests.fakes.api.grpc_served import MAX_CONNECTIONS, MODEL, WAIT_S, Served, serve

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
TENANTS = TenantDirectory([Tenant(id="a", api_key_sha256=(digest_of_key("key-a"),))])
ANYTHING = health_pb2.HealthCheckRequest()
LOCAL = ("grpc.use_local_subchannel_pool", 1)  # a connection of its own
TAKES_NOTHING = (LOCAL, ("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0))


async def until_closed(channel: grpc.aio.Channel) -> None:
    """A connection that the server ends leaves its channel without one."""
    await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), WAIT_S)


async def soon(waiting: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(waiting, WAIT_S)


def connection(served: Served, *options: tuple[str, int]) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{served.port}", options or (LOCAL,))


def test_connections_without_calls_do_not_shut_others_out() -> None:
    async def test(served: Served) -> None:
        idle = [connection(served) for _ in range(MAX_CONNECTIONS)]
        await soon(asyncio.gather(*(channel.channel_ready() for channel in idle)))
        await soon(asyncio.gather(*(until_closed(channel) for channel in idle)))
        await soon(served.channel.channel_ready())
        await served.ask(max_tokens=1)
        await asyncio.gather(*(channel.close() for channel in idle))

    serve(test, limits=ConnectionLimits(MAX_CONNECTIONS, idle_s=0.5))


def test_an_old_connection_ends_and_its_stream_goes_on() -> None:
    async def test(served: Served) -> None:
        served.says("x", hangs=True)
        call = served.stub.Generate(pb.GenerateRequest(model=MODEL, text="x"), timeout=WAIT_S)
        answers = aiter(call)
        await anext(answers)
        await until_closed(served.channel)
        async with connection(served) as later:  # which lives as long, behind the end of the first
            await soon(later.channel_ready())
            await until_closed(later)
        served.engine.finish(next(iter(served.engine.running)))
        assert [answer async for answer in answers]
        assert await call.code() is grpc.StatusCode.OK

    serve(test, limits=ConnectionLimits(MAX_CONNECTIONS, age_s=0.5))


@pytest.mark.parametrize("method", [CHECK, WATCH, REFLECTION])
def test_a_keyless_call_that_says_nothing_ends(method: str) -> None:
    async def test(served: Served) -> None:
        call: Any = served.channel.stream_stream(method)(timeout=WAIT_S)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await call.details() == "a call without a key ends after 0.2 s; call again"

    serve(test, TENANTS, keyless=KeylessLimits(call_s=0.2))


def test_a_keyless_watch_ends() -> None:
    async def test(served: Served) -> None:
        call = health_pb2_grpc.HealthStub(served.channel).Watch(ANYTHING, timeout=WAIT_S)
        assert (await call.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "without a key" in await call.details()

    serve(test, TENANTS, keyless=KeylessLimits(call_s=0.5))


def test_a_call_with_a_key_is_not_ended_so() -> None:
    async def test(served: Served) -> None:
        served.says("x", hangs=True)
        request = pb.GenerateRequest(model=MODEL, text="x")
        call = served.stub.Generate(request, timeout=WAIT_S, metadata=(("authorization", "Bearer key-a"),))
        answers = aiter(call)
        await anext(answers)
        keyless: Any = served.channel.stream_stream(CHECK)(timeout=WAIT_S)
        assert await keyless.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        served.engine.finish(next(iter(served.engine.running)))
        assert [answer async for answer in answers]
        assert await call.code() is grpc.StatusCode.OK

    serve(test, TENANTS, keyless=KeylessLimits(call_s=0.2))


def test_keyless_streams_are_few() -> None:
    async def test(served: Served) -> None:
        health = health_pb2_grpc.HealthStub(served.channel)
        first = health.Watch(ANYTHING, timeout=WAIT_S)
        await first.read()
        for method in (WATCH, REFLECTION):
            refused: Any = served.channel.stream_stream(method)(timeout=WAIT_S)
            assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await health.Check(ANYTHING, timeout=WAIT_S)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await served.ask(max_tokens=1)
        served.server.begin_to_end()
        assert await first.read() is grpc.aio.EOF
        assert await first.code() is grpc.StatusCode.OK

    serve(test, keyless=KeylessLimits(streams=1))


def test_a_watcher_of_health_that_takes_nothing_stops_nobody() -> None:
    async def test(served: Served) -> None:
        async with connection(served, *TAKES_NOTHING) as greedy:
            await soon(greedy.channel_ready())
            stuck: Any = greedy.unary_stream(WATCH)(b"")
            await soon(stuck.initial_metadata())  # it comes before the message that is not taken
            health = health_pb2_grpc.HealthStub(served.channel)
            told = health.Watch(ANYTHING, timeout=WAIT_S)
            assert (await told.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            served.server.set_ready(True)
            assert (await told.read()).status == health_pb2.HealthCheckResponse.SERVING
            assert (await health.Check(ANYTHING, timeout=WAIT_S)).status == health_pb2.HealthCheckResponse.SERVING
            served.server.begin_to_end()
            assert (await told.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await told.read() is grpc.aio.EOF
            stuck.cancel()

    serve(test)
