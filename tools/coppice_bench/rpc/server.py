"""The serving process of `coppice bench rpc`: the cache service, and two echoes beside it.

    session   the cache service as it is
    echo      the same session protocol on the same kind of server; an Acquire gets a Grant of the size that it names
    bare      bytes in, bytes out, on a stream of gRPC alone

Prints one JSON line with the ports and serves until its standard input ends, so it never outlives who started it.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from coppice.addresses import Address
from coppice.edge import codec
from coppice.edge.grpc_server import GrpcServer
from coppice.edge.link_server import LinkServer
from coppice.edge.session_listener import SessionListener
from coppice.edge.signal_event import SignalEvent
from coppice.handles import HANDLE_BYTES
from coppice.ids import CacheEpoch, WorkerEpoch
from coppice.messages.index import Acquire, Answer, AnswerBatch, Grant, Op, OpBatch, Released
from coppice.seals import SEAL_BYTES
from coppice.session.frames import Hello, Reject
from coppice.session.link import ServerLink, ServerLinks
from coppice.telemetry.logs import configure_logging
from coppice_bench.rpc.wire import BARE_METHOD, BARE_SERVICE, BLOCK_SIZE, bare_answer_bytes
from coppice_cache.edge.process import CacheProcess
from coppice_cache.edge.settings import CacheSettings

_EPOCH = CacheEpoch(1)
_TOKENS_MAX = 1 << 17
_ZEROS = bytes(_TOKENS_MAX // BLOCK_SIZE * SEAL_BYTES)
_SETTINGS = {"grpc_port": 0, "admin_grpc_port": 0, "session_port": 0, "http_port": 0, "seal_key": "5e" * 32}
_GRACE_S = 0.2


class _EchoSessions:
    """A `SessionHandler` that knows no core: answers have the size of real ones and nothing in them."""

    def __init__(self) -> None:
        links: ServerLinks[Any] = ServerLinks((_EPOCH << 32) | 1, _EPOCH)
        self.server = LinkServer(links, codec.INDEX, self)

    def session_opening(self, hello: Hello) -> int | Reject:
        return 1

    def session_connected(self, link: ServerLink[Any], is_new: bool) -> None: ...

    def session_heard(self, link: ServerLink[Any]) -> None: ...

    def session_body(self, link: ServerLink[Any], body: Any) -> None:
        if isinstance(body, OpBatch):
            self.server.post(link, AnswerBatch(_EPOCH, tuple(_echo(op) for op in body.ops)))


def _echo(op: Op) -> Answer:
    """The candidate's load_cost says how many blocks of the answer are shared."""
    if not isinstance(op, Acquire):
        return Released(op.lease_id)
    candidate = op.candidates[0]
    shared = candidate.load_cost
    owned = -(-op.reserve_tokens // BLOCK_SIZE) - shared
    return Grant(
        lease_id=op.lease_id,
        worker_id=candidate.worker_id,
        worker_epoch=WorkerEpoch(1 << 32),
        num_cached_tokens=shared * BLOCK_SIZE,
        shared=_ZEROS[: shared * HANDLE_BYTES],
        shared_seals=_ZEROS[: shared * SEAL_BYTES],
        owned=_ZEROS[: owned * HANDLE_BYTES],
        zero=b"",
    )


def _bare(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
    for request in requests:
        yield _ZEROS[: bare_answer_bytes(request)]


def _add_bare(server: grpc.Server) -> None:
    bare: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(_bare)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(BARE_SERVICE, {BARE_METHOD: bare}),))


def _end_with_input(ending: SignalEvent) -> None:
    sys.stdin.read()
    ending.set()


def main() -> None:
    configure_logging("warning")
    ending = SignalEvent()
    threading.Thread(target=_end_with_input, args=(ending,), daemon=True).start()
    cache = CacheProcess(CacheSettings.model_validate(_SETTINGS), ending)
    cache.start()
    sessions = _EchoSessions()
    echo = SessionListener(Address("127.0.0.1", 0))
    echo.start((sessions.server,))
    bare = GrpcServer("127.0.0.1:0", (), _add_bare, "bare")
    bare.start()
    print(json.dumps({"session": str(cache.session_address), "echo": str(echo.address), "bare": bare.port}), flush=True)
    try:
        ending.wait()
    except KeyboardInterrupt:
        pass
    echo.close()
    sessions.server.close()
    bare.stop(_GRACE_S)
    cache.stop()


if __name__ == "__main__":
    main()
