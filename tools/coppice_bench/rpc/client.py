"""The asking process of `coppice bench rpc`: sessions that time each answer, a worker that only registers."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Self

import grpc

from coppice.edge import codec
from coppice.edge.grpc_server import CHANNEL_OPTIONS
from coppice.edge.link_client import LinkClient
from coppice.errors import CoppiceError
from coppice.ids import CacheEpoch, Namespace, WorkerEpoch, WorkerId
from coppice.messages.index import Answer, AnswerBatch, Op, OpBatch, Workers
from coppice.messages.registration import Fence, FenceAck, Register, Registered
from coppice.session.frames import Reject
from coppice.session.link import Attached
from coppice_bench.rpc.wire import BARE_METHOD, BARE_SERVICE, BLOCK_SIZE

ANSWER_S = 10.0
NAMESPACE = Namespace(b"bench")
WORKER = WorkerId("bench")


class _Ends:
    """A session; bodies go to `heard` with the time at which they arrived."""

    def __init__(self, address: str) -> None:
        self.heard: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.attachment = 0
        self.link = self._open(address)
        self.link.start()

    def _open(self, address: str) -> LinkClient:
        raise AssertionError("a kind of session is needed")

    def wait(self, kind: type) -> tuple[int, Any]:
        """The next body of this kind, and when it came. Raises CoppiceError."""
        while True:
            try:
                when_ns, body = self.heard.get(timeout=ANSWER_S)
            except queue.Empty:
                raise CoppiceError(f"no {kind.__name__} came within {ANSWER_S:.0f} s") from None
            if isinstance(body, Reject):
                raise CoppiceError(f"the session was refused: {body.message}")
            if isinstance(body, kind):
                return when_ns, body

    def link_attached(self, attached: Attached, attachment: int) -> None:
        self.attachment = attachment
        self.heard.put((0, attached))

    def link_body(self, body: Any, attachment: int) -> None:
        self.heard.put((perf_counter_ns(), body))

    def link_lost(self, reason: str) -> None: ...

    def link_rejected(self, reject: Reject) -> None:
        self.heard.put((0, reject))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.link.stop()


class TimedSession(_Ends):
    """A client of the cache service."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.wait(Attached)

    def _open(self, address: str) -> LinkClient:
        return LinkClient(codec.INDEX, address, self, "bench", "cache")

    def ask(self, *ops: Op) -> tuple[int, tuple[Answer, ...]]:
        """Nanoseconds from posting the ops to having the answers decoded, and the answers."""
        batch = OpBatch(ops)
        began_ns = perf_counter_ns()
        self.link.post(batch, self.attachment)
        when_ns, answers = self.wait(AnswerBatch)
        return when_ns - began_ns, answers.answers

    def wait_open_worker(self) -> None:
        while True:
            workers = self.wait(Workers)[1].workers
            if any(worker.open for worker in workers):
                return


class RegisteredWorker(_Ends):
    """A worker without a pool: registers, and acknowledges fences."""

    def __init__(self, address: str, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.epoch = WorkerEpoch(0)
        super().__init__(address)
        self.wait(Registered)

    def _open(self, address: str) -> LinkClient:
        return LinkClient(codec.WORKERS, address, self, WORKER, "cache")

    def link_attached(self, attached: Attached, attachment: int) -> None:
        super().link_attached(attached, attachment)
        self.link.post(registration(self._num_blocks, BLOCK_SIZE), attachment)

    def link_body(self, body: Any, attachment: int) -> None:
        if isinstance(body, Registered):
            self.epoch = body.worker_epoch
        elif isinstance(body, Fence):
            self.link.post(FenceAck(body.fence_id, self.epoch), attachment)
        super().link_body(body, attachment)


def registration(num_blocks: int, block_size: int) -> Register:
    """Of a new worker with an empty pool."""
    return Register(
        worker_id=WORKER,
        worker_epoch=WorkerEpoch(0),
        address="127.0.0.1:9",
        num_blocks=num_blocks,
        block_size=block_size,
        namespace=NAMESPACE,
        model="bench",
        highest_cache_epoch=CacheEpoch(0),
        generations=bytes(8 * num_blocks),
        seals=bytes(16 * num_blocks),
        scheduler_epochs=(),
        knows_owners=True,
    )


class BareStream:
    """Bytes over one bidirectional stream."""

    def __init__(self, port: int) -> None:
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS)
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            f"/{BARE_SERVICE}/{BARE_METHOD}"
        )
        self._answers = call(self._requests())

    def _requests(self) -> Iterator[bytes]:
        while (request := self._out.get()) is not None:
            yield request

    def answer(self, request: bytes) -> bytes:
        self._out.put(request)
        return next(self._answers)

    def ask(self, request: bytes) -> int:
        """Nanoseconds until the answer is here."""
        began_ns = perf_counter_ns()
        self.answer(request)
        return perf_counter_ns() - began_ns

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._out.put(None)
        self._answers.cancel()
        self._channel.close()
