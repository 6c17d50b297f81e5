"""What a stranger may take of the gRPC port: nothing is read before the key and the deadline, and not for ever."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from typing import Any

import grpc
import pytest

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_scheduler.edge.grpc.server import STREAMS_MAX
from tests.fakes.api.grpc_served import MAX_CONNECTIONS, MODEL, WAIT_S, Served, serve

METHODS = ("Generate", "ListModels", "Tokenize", "Detokenize")
TENANTS = TenantDirectory([Tenant(id="a", api_key_sha256=(digest_of_key("key-a"),))])
KEY = (("authorization", "Bearer key-a"),)


def raw_call(served: Served, method: str, **options: Any) -> Any:
    """A call that sends the bytes it is told to, when it is told to."""
    return served.channel.stream_stream(f"/coppice_rpc.v1.Generation/{method}")(**options)


async def send(call: Any, data: bytes) -> None:
    """As much as the server takes: it may have ended the call before."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(data)


async def ending(call: Any) -> tuple[str, str]:
    return (await call.code()).name, await call.details()


def is_of_a_closed_loop(record: logging.LogRecord) -> bool:
    """grpc.aio has one queue per process: a late event of an earlier test is logged in this test's loop.

    A service has one loop for all its life and never logs it.
    """
    error = record.exc_info[1] if record.exc_info else None
    return "PollerCompletionQueue" in record.getMessage() and str(error) == "Event loop is closed"


@pytest.mark.parametrize("method", METHODS)
def test_the_key_and_the_deadline_are_looked_at_before_the_message(method: str) -> None:
    async def test(served: Served) -> None:
        code, words = await ending(raw_call(served, method, timeout=WAIT_S))
        assert (code, "API key" in words) == ("UNAUTHENTICATED", True)
        code, words = await ending(raw_call(served, method, metadata=KEY))
        assert (code, "deadline" in words) == ("INVALID_ARGUMENT", True)
        for _ in range(10):  # grpc.aio loses the status of a call that ends while it still writes
            large = raw_call(served, method, timeout=WAIT_S)
            await send(large, b"x" * (64 << 20))
            code, words = await ending(large)
            if words != "Internal error from Core":
                break
        assert code == "UNAUTHENTICATED"

    serve(test, TENANTS)


@pytest.mark.parametrize("method", METHODS)
def test_a_message_that_does_not_come_is_not_waited_for(method: str) -> None:
    async def test(served: Served) -> None:
        code, words = await ending(raw_call(served, method, timeout=WAIT_S))
        assert (code, words) == ("DEADLINE_EXCEEDED", "The message did not arrive within 0.2 s.")

    serve(test, message_timeout_s=0.2)


@pytest.mark.parametrize("method", METHODS)
def test_no_message_noise_and_too_large_ones(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test(served: Served) -> None:
        empty = raw_call(served, method, timeout=WAIT_S)
        await empty.done_writing()
        assert await ending(empty) == ("INVALID_ARGUMENT", "The call has no message.")
        for data, code, words in (
            (b"\xff" * 9, "INVALID_ARGUMENT", f"The message is no {method}Request."),
            (b"\xff" * ((2 << 20) + 1), "INVALID_ARGUMENT", "The request is larger than 2097152 bytes."),
            (b"\xff" * ((4 << 20) + 1), "RESOURCE_EXHAUSTED", "larger than max"),
        ):
            call = raw_call(served, method, timeout=WAIT_S)
            await send(call, data)
            found, told = await ending(call)
            assert (found, words in told) == (code, True)

    serve(test)
    assert [record for record in caplog.records if not is_of_a_closed_loop(record)] == []


def test_more_calls_than_a_connection_may_have_wait() -> None:
    async def test(served: Served) -> None:
        await served.ask(max_tokens=1)  # by then the client was told the limit
        served.says("x", hangs=True)
        request = pb.GenerateRequest(model=MODEL, text="x")
        calls = [served.stub.Generate(request, timeout=3 * WAIT_S) for _ in range(STREAMS_MAX + 2)]
        reads = {asyncio.ensure_future(call.read()) for call in calls}
        while len(reads) > 2:
            _, reads = await asyncio.wait(reads, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        local = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}", local) as other:
            for _ in range(20):  # time enough for a call that does not wait
                await other.unary_unary("/coppice_rpc.v1.Generation/ListModels")(b"", timeout=WAIT_S)
        assert served.engine.num_running == STREAMS_MAX
        for call in calls:
            call.cancel()
        await asyncio.gather(*reads, return_exceptions=True)

    serve(test)


def test_more_connections_than_there_may_be_are_closed() -> None:
    async def test(served: Served) -> None:
        await served.channel.channel_ready()
        others = [socket.create_connection(("127.0.0.1", served.port), timeout=WAIT_S) for _ in range(MAX_CONNECTIONS)]
        spoken = [await asyncio.to_thread(other.recv, 1) for other in others]
        assert spoken.count(b"") == 1
        await served.ask(max_tokens=1)
        for other in others:
            other.close()

    serve(test)
