"""Both ends of a session over real gRPC, with handlers that write down what they hear.

The worker's edge is used because its bodies are the shortest: plans go up, results come down, numbered by `step`.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from coppice.edge import step_codec
from coppice.edge.grpc_server import CHANNEL_OPTIONS, GrpcServer
from coppice.edge.link_client import LinkClient
from coppice.edge.link_server import HELLO_S, LinkServer
from coppice.messages.step import StepPlan, StepResult
from coppice.session.frames import KEY_BYTES, Hello, Reject
from coppice.session.link import Attached, ClientLink, ServerLink, ServerLinks
from coppice_rpc.v1 import worker_pb2_grpc
from tests.fakes.waiting import WAIT_S, wait_for


class ServerEnd:
    """A LinkServer on a real port. `refusal` is answered to new sessions; `on_body` may raise."""

    def __init__(self, links: ServerLinks[Any] | None, port: int = 0, hello_s: float = HELLO_S) -> None:
        self.bodies: list[tuple[int, int]] = []  # (session epoch, step)
        self.connected: list[tuple[ServerLink[Any], bool]] = []
        self.heard = 0
        self.opened: list[Hello] = []
        self.refusal: Reject | None = None
        self.on_body: Any = lambda step: None
        self._epochs = 0
        self.server = LinkServer(links, step_codec.RESULT_FRAMES, step_codec.PLAN_FRAMES, self, hello_s=hello_s)
        servicer = _Servicer(self.server)
        self.grpc = GrpcServer(
            f"127.0.0.1:{port}",
            ("coppice_rpc.v1.Worker",),
            lambda server: worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server),
            "test",
        )
        self.port = self.grpc.port
        self.grpc.start()

    def session_opening(self, hello: Hello) -> int | Reject:
        self.opened.append(hello)
        self._epochs += 1
        return self.refusal if self.refusal is not None else self._epochs

    def session_connected(self, link: ServerLink[Any], is_new: bool) -> None:
        self.connected.append((link, is_new))

    def session_heard(self, link: ServerLink[Any]) -> None:
        self.heard += 1

    def session_body(self, link: ServerLink[Any], body: Any) -> None:
        self.on_body(body.step)
        self.bodies.append((link.epoch, body.step))

    @property
    def steps(self) -> list[int]:
        return [step for _, step in self.bodies]

    def newest(self) -> ServerLink[Any]:
        return wait_for(lambda: self.connected, "a session connects")[-1][0]

    def post(self, step: int) -> bool:
        return self.server.post(self.newest(), StepResult(step))

    def stop(self) -> None:
        self.server.close()
        self.grpc.stop(0.2)


class _Servicer(worker_pb2_grpc.WorkerServicer):
    def __init__(self, server: LinkServer) -> None:
        self._server = server

    def Steps(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:
        yield from self._server.serve(request_iterator, context)


class ClientEnd:
    """A LinkClient that writes down what it hears, with the attachment that it was heard under."""

    def __init__(self, port: int, outbox_max: int = 65_536) -> None:
        self.attached: list[Attached] = []
        self.bodies: list[tuple[int, int]] = []  # (attachment, step)
        self.lost: list[str] = []
        self.rejected: list[Reject] = []
        self.attachment = 0
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS)
        self.link = LinkClient(
            ClientLink(os.urandom(KEY_BYTES), "client", outbox_max=outbox_max),
            worker_pb2_grpc.WorkerStub(self.channel).Steps,
            step_codec.PLAN_FRAMES,
            step_codec.RESULT_FRAMES,
            self,
            "client",
        )
        self.link.start()

    def link_attached(self, attached: Attached, attachment: int) -> None:
        self.attachment = attachment
        self.attached.append(attached)

    def link_body(self, body: Any, attachment: int) -> None:
        self.bodies.append((attachment, body.step))

    def link_lost(self, reason: str) -> None:
        self.lost.append(reason)

    def link_rejected(self, reject: Reject) -> None:
        self.rejected.append(reject)

    @property
    def steps(self) -> list[int]:
        return [step for _, step in self.bodies]

    def wait_attached(self, times: int = 1) -> None:
        wait_for(lambda: len(self.attached) >= times, f"{times} attachments; rejected: {self.rejected}")

    def post(self, step: int) -> None:
        self.link.post(StepPlan(step), self.attachment)

    def stop(self) -> None:
        self.link.stop()
        self.channel.close()


class RawStream:
    """One stream of frames, written and read by hand."""

    def __init__(self, port: int) -> None:
        self._outbox: queue.Queue[Any] = queue.Queue()
        self._inbox: queue.Queue[Any] = queue.Queue()
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS)
        self.call = worker_pb2_grpc.WorkerStub(self.channel).Steps(iter(self._outbox.get, None))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for wire in self.call:
                self._inbox.put(step_codec.RESULT_FRAMES.decode(wire))
        except grpc.RpcError:
            pass  # ended by either side
        self._inbox.put(None)

    def write(self, frame: Any) -> None:
        self._outbox.put(step_codec.PLAN_FRAMES.encode(frame))

    def write_wire(self, wire: Any) -> None:
        self._outbox.put(wire)

    def read(self) -> Any:
        """The next frame; None once the stream has ended."""
        return self._inbox.get(timeout=WAIT_S)

    def wait_end(self) -> None:
        while self.read() is not None:
            pass

    def close(self) -> None:
        self._outbox.put(None)
        self.call.cancel()
        self._thread.join(timeout=5)
        self.channel.close()
