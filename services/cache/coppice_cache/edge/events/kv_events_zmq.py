"""KV events over ZMQ, as vLLM publishes them: a PUB socket, and a ROUTER socket that sends kept messages again.

A subscriber that is slower than its socket's high-water mark loses messages, sees a gap in the sequence and asks for a
replay. A replay never holds up the stream: it goes on by as many messages as its reader takes, between the others, and
skips what is not kept any more.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass

import zmq

from coppice.edge.kv_events.frames import event_frames, read_replay_request, replay_answer, replay_end
from coppice.edge.kv_events.payloads import MalformedEvents
from coppice.errors import UnavailableError

_log = logging.getLogger("coppice.cache")
KEPT_MESSAGES = 10_000
KEPT_BYTES = 128 << 20
HIGH_WATER_MESSAGES = 4_096  # per subscriber
REPLAYS_MAX = 16
REPLAY_TURN_MESSAGES = 512
REPLAY_STALL_S = 10.0


@dataclass(frozen=True, slots=True)
class _Message:
    topic: str
    sequence: int
    payload: bytes


@dataclass(slots=True)
class _Replay:
    """One asker: what it gets next, and when it last took something."""

    identity: bytes
    next_sequence: int
    end_sequence: int
    moved_s: float


class ZmqOut:
    """Binds both sockets when it is made. Raises UnavailableError when an endpoint cannot be had."""

    name = "kv events over ZMQ"

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        *,
        kept_messages: int = KEPT_MESSAGES,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self.keeps_messages = kept_messages
        self.keeps_bytes = kept_bytes
        self._kept: deque[_Message] = deque()
        self._num_bytes = 0
        self.next_sequence = 0  # of the next message
        self._replays: dict[bytes, _Replay] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER) if replay_endpoint else None
        try:
            self._publisher.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
            self.endpoint = _bind(self._publisher, endpoint, "--kv-events-zmq")
            self.replay_endpoint = ""
            if self._router is not None and replay_endpoint:
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reader that is full or gone is an error, no loss
                self.replay_endpoint = _bind(self._router, replay_endpoint, "--kv-events-replay")
        except UnavailableError:
            self.close()
            raise

    def send(self, messages: list[tuple[str, bytes]]) -> None:
        for topic, payload in messages:
            message = _Message(topic, self.next_sequence, payload)
            self.next_sequence += 1
            self._keep(message)
            self._publisher.send_multipart(event_frames(message.topic, message.sequence, message.payload))

    def serve(self) -> None:
        if self._router is None:
            return
        self._take_requests(self._router)
        for replay in list(self._replays.values()):
            if self._go_on(self._router, replay):
                del self._replays[replay.identity]

    def close(self) -> None:
        self._publisher.close(linger=0)
        if self._router is not None:
            self._router.close(linger=0)
        self._context.term()

    def _keep(self, message: _Message) -> None:
        self._kept.append(message)
        self._num_bytes += len(message.payload)
        while len(self._kept) > self.keeps_messages or (self._num_bytes > self.keeps_bytes and len(self._kept) > 1):
            self._num_bytes -= len(self._kept.popleft().payload)

    # ---- replays ----

    def _take_requests(self, router: zmq.Socket[bytes]) -> None:
        for _ in range(REPLAYS_MAX):
            try:
                frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                request = read_replay_request(frames)
            except MalformedEvents as error:
                _log.warning("a replay request was ignored: %s", error)
                continue
            if len(self._replays) >= REPLAYS_MAX and request.identity not in self._replays:
                _log.warning("a replay request was ignored: %d replays are running", REPLAYS_MAX)
                continue
            # A second request of the same reader takes the place of its first one.
            self._replays[request.identity] = _Replay(
                request.identity, request.start, self.next_sequence, time.monotonic()
            )

    def _go_on(self, router: zmq.Socket[bytes], replay: _Replay) -> bool:
        """Send as much as the reader takes in one turn. Whether the replay is over."""
        now_s = time.monotonic()
        oldest = self.next_sequence - len(self._kept)
        try:
            for _ in range(REPLAY_TURN_MESSAGES):
                sequence = max(replay.next_sequence, oldest)
                if sequence >= replay.end_sequence:
                    router.send_multipart(replay_end(replay.identity), zmq.NOBLOCK)
                    return True
                message = self._kept[sequence - oldest]
                frames = replay_answer(replay.identity, message.topic, message.sequence, message.payload)
                router.send_multipart(frames, zmq.NOBLOCK)
                replay.next_sequence = sequence + 1
                replay.moved_s = now_s
        except zmq.Again:
            return now_s - replay.moved_s > REPLAY_STALL_S
        except zmq.ZMQError as error:
            _log.info("a replay ended early: %s", error)
            return True
        return False


def _bind(socket: zmq.Socket[bytes], endpoint: str, flag: str) -> str:
    """The endpoint as it became, with the port in place of a wildcard. Raises UnavailableError."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise UnavailableError(f"{flag}: cannot listen on {endpoint}: {error}", hint="choose another one") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
