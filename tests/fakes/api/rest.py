"""A front door over a fake engine, on a real uvicorn at a free port of loopback, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from prometheus_client import CollectorRegistry

import coppice
from coppice.tenants.directory import TenantDirectory
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.base.metrics import FrontDoorMetrics
from coppice_scheduler.edge.base.public_tls import PublicTls
from coppice_scheduler.edge.frontend.body_budget import BodyBudget
from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.http_server import HttpLimits, HttpServer
from coppice_scheduler.edge.request_log.call_metrics import CallMetrics, CountedLog
from coppice_scheduler.edge.rest_app import apis_of, create_app
from coppice_scheduler.edge.text.checkpoint_text import CheckpointText, load_checkpoint_text
from tests.fakes.api.engine import FakeEngine, Script
from tests.fakes.telemetry.records import FakeLog

DEMO = Path(coppice.__file__).parent / "demo_model"
MODEL = "org/demo"
CONTEXT = 512
WAIT_S = 60


@dataclass
class Served:
    url: str
    engine: FakeEngine
    checkpoint: CheckpointText
    registry: CollectorRegistry
    http: httpx.Client
    frontdoor: FrontDoor
    records: FakeLog

    def set_tenants(self, tenants: TenantDirectory) -> None:
        """As the planner would have it, once a request came."""
        assert self.engine.loop is not None
        done = threading.Event()
        self.engine.loop.call_soon_threadsafe(lambda: (self.frontdoor.set_tenants(tenants), done.set()))
        assert done.wait(WAIT_S)

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def ids(self, text: str) -> list[int]:
        return list(self.checkpoint.raw.encode(text).ids)

    def says(self, text: str, **fields: Any) -> None:
        self.engine.script = lambda request: Script(self.ids(text), **fields)

    def post(self, body: Any, path: str = "/v1/completions", **options: Any) -> httpx.Response:
        content = body if isinstance(body, (bytes, str)) else json.dumps(body)
        return self.http.post(path, content=content, **options)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def begin(
        self, body: bytes, path: str = "/v1/completions", *, length: int | None = None, headers: str = ""
    ) -> socket.socket:
        """A connection that sent so much of a body of this `length` (None: all of it)."""
        length = len(body) if length is None else length
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {length}\r\n\r\n"
        connection = self.connect()
        connection.sendall(head.encode() + body)
        return connection

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post({"model": MODEL, "prompt": "one", **fields})

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "one"}], **fields}
        return self.post(body, "/v1/chat/completions")


def read_until_closed(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    answer = b""
    try:
        while part := connection.recv(65536):
            answer += part
    except ConnectionResetError:
        pass
    return answer


@contextmanager
def serving(
    tenants: TenantDirectory | None = None,
    *,
    checkpoint: CheckpointText | None = None,
    context: int = CONTEXT,
    bodies: BodyBudget | None = None,
    tls: tuple[Path, Path, Path] | None = None,
    **options: Any,
) -> Iterator[Served]:
    """`tls`: files of a public certificate, its key, and the CA that clients know."""
    checkpoint = checkpoint or load_checkpoint_text(DEMO)
    engine = FakeEngine(ModelInfo(MODEL, context, 1_700_000_000))
    registry = CollectorRegistry()
    frontdoor = FrontDoor(
        engine,
        checkpoint,
        tenants or TenantDirectory.single_default(),
        FrontDoorMetrics(registry, MODEL),
        bodies=bodies,
    )
    of_app = {
        name: options.pop(name) for name in ("body_timeout_s", "first_byte_s", "unknown_fields") if name in options
    }
    of_app.setdefault("first_byte_s", WAIT_S)  # what a busy machine does must not decide what a test sees
    app = create_app(frontdoor, registry, **of_app)
    cors_origins = options.pop("cors_origins", ())
    records = FakeLog()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as the service has it
    public = None if tls is None else PublicTls(*tls[:2])
    calls = CallMetrics(registry, MODEL, apis_of(app))
    log = CountedLog(records, calls)
    server = HttpServer(app, "127.0.0.1", 0, HttpLimits(**options), public, cors_origins, log, calls.turned_away)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    url = f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
    try:
        verify = True if tls is None else ssl.create_default_context(cafile=tls[2])
        with httpx.Client(base_url=url, timeout=WAIT_S, verify=verify) as http:
            yield Served(url, engine, checkpoint, registry, http, frontdoor, records)
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
        listener.close()


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)
