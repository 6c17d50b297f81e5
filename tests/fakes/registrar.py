"""A stand-in for the cache service's side of a worker session: registers every worker, sends fences, keeps answers."""

from __future__ import annotations

import queue
from typing import Any

import grpc

from coppice.edge import registration_codec
from coppice.edge.grpc_server import GrpcServer
from coppice.edge.link_server import LinkServer
from coppice.ids import CacheEpoch, WorkerEpoch
from coppice.messages.registration import Fence, Register, Registered
from coppice.session.frames import Hello, Reject
from coppice.session.link import ServerLink, ServerLinks
from coppice_rpc.v1 import cache_pb2_grpc


class Registrar(cache_pb2_grpc.PrefixIndexServicer):
    """Worker epochs count from 1 for workers that have none; `received` holds every body that came."""

    def __init__(self) -> None:
        self.received: queue.Queue[Any] = queue.Queue()
        self._epochs = 0
        self._link: ServerLink[Any] | None = None
        self._links = LinkServer(
            ServerLinks(1, 1), registration_codec.SERVER_FRAMES, registration_codec.WORKER_FRAMES, self
        )
        self._server = GrpcServer("127.0.0.1:0", (), self._add, "registrar")
        self._server.start()
        self.address = f"127.0.0.1:{self._server.port}"

    def _add(self, server: grpc.Server) -> None:
        cache_pb2_grpc.add_PrefixIndexServicer_to_server(self, server)

    def WorkerSession(self, request_iterator: Any, context: Any) -> Any:
        yield from self._links.serve(request_iterator, context)

    def fence(self, fence: Fence) -> None:
        assert self._link is not None
        self._links.post(self._link, fence)

    def restart(self) -> None:
        """Forget every session, as a restarted service would."""
        self._links.replace(ServerLinks(2, 2))

    def close(self) -> None:
        self._links.close()
        self._server.stop(0)

    def session_opening(self, hello: Hello) -> int | Reject:
        return 1

    def session_connected(self, link: ServerLink[Any], is_new: bool) -> None:
        self._link = link

    def session_heard(self, link: ServerLink[Any]) -> None:
        """Nobody expires here."""

    def session_body(self, link: ServerLink[Any], body: Any) -> None:
        if isinstance(body, Register):
            epoch = body.worker_epoch
            if not epoch:
                self._epochs += 1
                epoch = WorkerEpoch(self._epochs)
            self._links.post(link, Registered(epoch, CacheEpoch(1)))
        self.received.put(body)
