"""An engine as seen from outside: a PUB socket, a ROUTER for replays, and both wire shapes. It computes nothing."""

from __future__ import annotations

import threading
from typing import Any, Literal

import zmq

from coppice.edge.kv_events.frames import event_frames, read_replay_request, replay_answer, replay_end
from coppice.edge.kv_events.payloads import encode_batch
from coppice.messages.kv_events import BlockStored, KvEvent, KvEventBatch


class FakeEngine:
    """`say` publishes, `lose` only counts. kept: what a replay still has. `tells_topic`: as vLLM since mid-2026."""

    def __init__(
        self, topic: str = "", form: Literal["map", "array"] = "map", *, tells_topic: bool = True, ports: Any = (0, 0)
    ) -> None:
        self.topic, self.form, self._tells_topic = topic, form, tells_topic
        self.kept: list[tuple[int, bytes]] = []
        self._next = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._pub.bind(f"tcp://127.0.0.1:{ports[0] or '*'}")
        self._router.bind(f"tcp://127.0.0.1:{ports[1] or '*'}")
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.num_replays = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def ports(self) -> tuple[int, int]:
        return int(self.endpoint.rsplit(":", 1)[1]), int(self.replay.rsplit(":", 1)[1])

    def say(self, *events: KvEvent) -> None:
        self._send(self.encode(*events))

    def say_raw(self, payload: bytes) -> None:
        self._send(payload)

    def lose(self, *events: KvEvent) -> None:
        self.kept.append((self._next, self.encode(*events)))
        self._next += 1

    def encode(self, *events: KvEvent) -> bytes:
        return encode_batch(KvEventBatch(float(self._next), events, 0), self.form)

    def _send(self, payload: bytes) -> None:
        self.kept.append((self._next, payload))
        self._pub.send_multipart(event_frames(self.topic, self._next, payload))
        self._next += 1

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if self._router.poll(20):
                asked = read_replay_request(self._router.recv_multipart())
                self.num_replays += 1
                for sequence, payload in [kept for kept in self.kept if kept[0] >= asked.start]:
                    self._router.send_multipart(self._cut(replay_answer(asked.identity, self.topic, sequence, payload)))
                self._router.send_multipart(self._cut(replay_end(asked.identity)))

    def _cut(self, frames: list[bytes]) -> list[bytes]:
        return frames if self._tells_topic else [*frames[:2], *frames[3:]]

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._pub.close(linger=0)
        self._router.close(linger=0)
        self._context.term()


def tokens(*ids: int) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in ids)


def block(name: int, parent: int | None, *ids: int, **fields: Any) -> BlockStored:
    return BlockStored((name,), parent, tokens(*ids), len(ids), medium="GPU", **fields)
