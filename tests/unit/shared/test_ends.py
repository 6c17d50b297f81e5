"""Processes end as soon as nothing is left to be done: nobody waits for a clock, or for an interpreter's end."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading

import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from coppice.processes.prompt_uvicorn import PromptServer
from coppice.telemetry import metrics_server
from tests.fakes.waiting import WAIT_S

LEAVES = """
import sys, threading, time
from coppice.processes.leaving import leave
threading.Thread(target=time.sleep, args=(3600,)).start()
print("said", end="")
print("told", end="", file=sys.stderr)
leave(7)
"""


def test_a_process_leaves_with_what_it_said_and_waits_for_no_thread() -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, timeout=WAIT_S, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, b"said", b"told")


def test_a_metrics_server_is_woken_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "POLL_S", 3600.0)
    server = metrics_server.serve_metrics("127.0.0.1", 0, CollectorRegistry(), tuple)
    closing = threading.Thread(target=server.close, daemon=True)
    closing.start()
    closing.join(WAIT_S)
    assert not closing.is_alive()


class Connection:
    """Of a client that is still there."""

    def __init__(self) -> None:
        self.is_told = False

    def shutdown(self) -> None:
        self.is_told = True


@pytest.mark.parametrize("num_connections", [0, 1])
def test_only_connections_are_given_time_to_close(caplog: pytest.LogCaptureFixture, num_connections: int) -> None:
    caplog.set_level(logging.INFO, "uvicorn.error")

    async def app(*_: object) -> None: ...

    async def begin_and_end() -> list[Connection]:
        server = PromptServer(uvicorn.Config(app, port=0, lifespan="off", log_config=None, timeout_graceful_shutdown=0))
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup()
        connections = [Connection() for _ in range(num_connections)]
        server.server_state.connections.update(connections)  # type: ignore[arg-type]
        await server.shutdown()
        assert not any(one.is_serving() for one in server.servers)
        return connections

    assert all(connection.is_told for connection in asyncio.run(begin_and_end()))
    assert ("Shutting down" in caplog.messages) == bool(num_connections), "uvicorn's own end, which takes its time"
