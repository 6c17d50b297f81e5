"""Tokens of many requests on their way to their readers. Lives in one asyncio loop.

    TokenBatch of a turn --one sort--> a piece per stream  \\
    Output               ----------------------------------->  Stream: pieces, the last Output  --read()--> reader

What a reader has not read yet is joined into one, so that it is bounded by the request's own length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import numpy as np
from msgspec.structs import replace

from coppice.ids import TOKEN_BYTES
from coppice.messages.step import TokenLogprobs
from coppice_scheduler.core.state.request import (
    Finish,
    Granted,
    Output,
    OutputError,
    OutputErrorCode,
    Refused,
    RefusedReason,
    Request,
    Resumed,
    TokenBatch,
)
from coppice_scheduler.edge.base.engine import RequestRefused
from coppice_scheduler.edge.text.tokenizer import TOKEN_DTYPE

_END_OF_MOVED = {
    RefusedReason.TENANT_REMOVED: OutputErrorCode.TENANT_REMOVED,
    RefusedReason.QUARANTINED: OutputErrorCode.QUARANTINED,
    RefusedReason.NEVER_FITS: OutputErrorCode.NEVER_FITS,
}
_COUNTER_BITS = 24  # of a request's number; those above name who gave it
_COUNTER_MASK = (1 << _COUNTER_BITS) - 1


class Stream:
    """What waits for the reader of one request, and what another planner has to know to go on with it."""

    __slots__ = (
        "_changed",
        "_last",
        "_logprobs",
        "_num_cached",
        "_num_logprob_positions",
        "_refused",
        "_sent",
        "_tokens",
        "is_asked",
        "is_closed",
        "num_moves",
        "request",
        "stop_wanted",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.is_asked = False  # a planner was asked for it
        self.is_closed = False  # nobody reads it any more
        self.stop_wanted = False  # its reader has found a stop string
        self.num_moves = 0  # planners that were lost while they served it
        self._sent = bytearray()  # all its tokens so far, packed u32
        self._num_logprob_positions = 0  # of prompt and output, those before this one were reported
        self._num_cached: int | None = None  # as the first grant found
        self._changed = asyncio.Event()
        self._tokens: list[bytes] = []
        self._logprobs: list[TokenLogprobs] = []
        self._last: Output | None = None
        self._refused: Refused | None = None

    async def read(self) -> Output:
        """All that came since the last call, at least something. Raises RequestRefused."""
        await self._changed.wait()
        self._changed.clear()
        if self._refused is not None:
            raise RequestRefused(self._refused)
        tokens, self._tokens = b"".join(self._tokens), []
        logprobs, self._logprobs = tuple(self._logprobs), []
        last = self._last or Output(self.request.request_id, b"")
        return replace(last, tokens=tokens, logprobs=logprobs)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self._refused is not None or (self._last is not None and self._last.finish is not None)

    @property
    def was_taken(self) -> bool:
        """A planner served it, as far as is known here."""
        return bool(self.num_moves or self._sent or self._num_cached is not None)

    @property
    def to_ask(self) -> Request:
        """What a planner is asked for: all of it, or what is left."""
        if not self.is_asked:
            return self.request
        resumed = Resumed(bytes(self._sent), self._num_logprob_positions, self._num_cached, max(self.num_moves, 1))
        return replace(self.request, resumed=resumed)

    def put_tokens(self, tokens: bytes) -> None:
        self._sent += tokens
        self._tokens.append(tokens)
        self._changed.set()

    def granted(self, granted: Granted) -> None:
        """Nothing to its reader."""
        self._num_cached = granted.num_cached_tokens

    def put(self, output: Output) -> None:
        self._sent += output.tokens
        if output.logprobs:
            self._num_logprob_positions = output.logprobs[-1].end_position
        self._tokens.append(output.tokens)
        self._logprobs += output.logprobs
        self._last = output
        self._changed.set()

    def stop(self) -> None:
        """End it where it is, as its reader wants."""
        num_prompt, num_output = len(self.request.tokens) // TOKEN_BYTES, len(self._sent) // TOKEN_BYTES
        self.put(Output(self.request.request_id, b"", Finish.STOP, None, num_prompt, self._num_cached or 0, num_output))

    def refuse(self, refused: Refused) -> None:
        """Of one that another planner served before, that is its end: its client may have had a part of it."""
        if self.num_moves:
            code = _END_OF_MOVED.get(refused.reason, OutputErrorCode.SCHEDULER_LOST)
            error = OutputError(code, refused.message, refused.retry_after_ms)
            self.put(Output(self.request.request_id, b"", Finish.ERROR, error))
            return
        self._refused = refused
        self._changed.set()


class Streams:
    """The open streams, by request id and by number. `first_number` >> 24 names this set among others."""

    def __init__(self, first_number: int = 0) -> None:
        self._first_number = first_number
        self._counter = 0
        self._by_id: dict[str, Stream] = {}
        self._by_number: dict[int, Stream] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def at_work(self) -> list[Stream]:
        """Those that have not ended, in the order in which they were opened."""
        return [stream for stream in self._by_id.values() if not stream.has_ended]

    def find(self, request_id: str) -> Stream | None:
        return self._by_id.get(request_id)

    def open(self, request: Request) -> Stream:
        """The stream of `request`, which gets a number."""
        number = self._next_number()
        stream = Stream(replace(request, number=number))
        self._by_id[request.request_id] = self._by_number[number] = stream
        return stream

    def renumber(self, stream: Stream) -> None:
        """Tokens that come under its number of before are nobody's any more."""
        del self._by_number[stream.request.number]
        number = self._next_number()
        stream.request = replace(stream.request, number=number)
        self._by_number[number] = stream

    def close(self, stream: Stream) -> None:
        stream.is_closed = True
        del self._by_id[stream.request.request_id]
        del self._by_number[stream.request.number]

    def take(self, batches: Iterable[TokenBatch], outputs: Iterable[Output], granted: Iterable[Granted] = ()) -> None:
        """What the planner made in a turn. Of streams that are closed nothing is kept."""
        for grant in granted:
            stream = self._by_id.get(grant.request_id)
            if stream is not None:
                stream.granted(grant)
        for batch in batches:
            for number, tokens in pieces(batch):
                stream = self._by_number.get(number)
                if stream is not None:
                    stream.put_tokens(tokens)
        for output in outputs:
            stream = self._by_id.get(output.request_id)
            if stream is not None:
                stream.put(output)

    def refuse(self, request_id: str, refused: Refused) -> None:
        stream = self._by_id.get(request_id)
        if stream is not None:
            stream.refuse(refused)

    def end(self, request_id: str, error: OutputError) -> bool:
        """End one stream; whether it was there and had not ended."""
        stream = self._by_id.get(request_id)
        if stream is None or stream.has_ended:
            return False
        stream.put(Output(request_id, b"", Finish.ERROR, error))
        return True

    def end_all(self, error: OutputError) -> None:
        """End every stream that has not ended."""
        for request_id, stream in self._by_id.items():
            if not stream.has_ended:
                stream.put(Output(request_id, b"", Finish.ERROR, error))

    def _next_number(self) -> int:
        while True:
            number = self._first_number | self._counter
            self._counter = (self._counter + 1) & _COUNTER_MASK
            if number not in self._by_number:
                return number


def pieces(batch: TokenBatch) -> Iterator[tuple[int, bytes]]:
    """(number, its tokens in order) of each request of a batch."""
    numbers = np.frombuffer(batch.numbers, dtype=TOKEN_DTYPE)
    if not numbers.size:
        return
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order]
    tokens = np.frombuffer(batch.tokens, dtype=TOKEN_DTYPE)[order].tobytes()
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - np.uint32(1)))
    bounds = [*(starts * TOKEN_DTYPE.itemsize).tolist(), len(tokens)]
    for place, number in enumerate(numbers[starts].tolist()):
        yield number, tokens[bounds[place] : bounds[place + 1]]
