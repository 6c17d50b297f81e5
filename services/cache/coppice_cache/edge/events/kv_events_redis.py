"""KV events over a Redis stream: one entry for each message, with the fields publisher, topic, sequence and payload.

The payload is the same as over ZMQ; the sequence is decimal and counts from 0 for each `publisher`, which is another
random name each time that the service starts. The stream is trimmed to about STREAM_ENTRIES. Redis 7.0 commands only.
"""

from __future__ import annotations

import secrets
from typing import Any

import redis

from coppice_cache.edge.events.kv_events_out import OutFailed

STREAM_ENTRIES = 10_000
STREAM_BYTES = 128 << 20  # when to say a snapshot again; Redis trims by entries alone


class RedisOut:
    name = "kv events over Redis"
    keeps_messages = STREAM_ENTRIES
    keeps_bytes = STREAM_BYTES

    def __init__(self, client: redis.Redis, stream: str) -> None:
        self._client = client
        self._stream = stream
        self._publisher = secrets.token_hex(8)
        self._sequence = 0
        self._has_begun = False

    def send(self, messages: list[tuple[str, bytes]]) -> None:
        """All or none of them, in one transaction. Raises OutFailed; their sequence numbers are not used again."""
        if not messages:
            return
        pipeline = self._client.pipeline(transaction=True)
        for topic, payload in messages:
            entry: dict[Any, Any] = {
                "publisher": self._publisher,
                "topic": topic,
                "sequence": self._sequence,
                "payload": payload,
            }
            self._sequence += 1
            # A stream that somebody deleted must not go on with half a story: only what starts over may make it.
            pipeline.xadd(
                self._stream,
                entry,
                maxlen=STREAM_ENTRIES,
                approximate=True,
                nomkstream=self._has_begun,
            )
        try:
            ids = pipeline.execute()
        except (redis.RedisError, OSError) as error:
            raise OutFailed(f"Redis did not take the events: {error}") from error
        if ids[0] is None:
            self._has_begun = False
            raise OutFailed(f"the stream {self._stream!r} is gone")
        self._has_begun = True

    def serve(self) -> None:
        """Nobody asks here: readers go back in the stream by themselves."""

    def close(self) -> None:
        self._client.close()
