"""Runs requests on a `LocalEngine` to their end: the loop behind `LLM.generate` and `LLM.stream`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from msgspec.structs import replace

from coppice_offline.engine import LocalEngine, Told
from coppice_offline.interface.errors import EngineBroken, RequestFailed
from coppice_offline.interrupts import interrupts_wait
from coppice_offline.progress import Reporter
from coppice_scheduler.core.state.request import Finish, Output, Request
from coppice_scheduler.edge.text.streams import pieces

_CUT_OFF = "a step was cut off in the middle"


class RequestReader(Protocol):
    """One request, and who reads what comes of it."""

    @property
    def request(self) -> Request: ...

    def take(self, output: Output) -> bool:
        """True: nothing after it counts, and the request can be cancelled."""
        ...


class Runner:
    """Keeps at most `window` requests in the engine, so that a long list costs no more a step than a short one."""

    def __init__(self, engine: LocalEngine, window: int) -> None:
        self._engine = engine
        self._window = window
        self._num_requests = 0
        self._broken = ""
        self._is_running = False
        self._open: dict[int, RequestReader] = {}  # by request number
        self._waiting: deque[RequestReader] = deque()
        self._failure = ""

    def new_number(self) -> int:
        """The number of the next request; its id is the same in digits."""
        self._num_requests = (self._num_requests + 1) % (1 << 32)
        return self._num_requests

    @property
    def is_running(self) -> bool:
        return self._is_running

    def run(self, streams: Sequence[RequestReader], reporter: Reporter) -> None:
        """Until each stream has its last output.

        Raises RequestFailed, and KeyboardInterrupt after Ctrl-C, when nothing is at work any more; EngineBroken.
        """
        self.run_rounds([streams], reporter)

    def run_rounds(self, rounds: Iterable[Sequence[RequestReader]], reporter: Reporter) -> None:
        """As `run`, one round after the other. A round is asked for when the one before has its last outputs."""
        with self._alone(), interrupts_wait() as interrupted:
            for streams in rounds:
                self._waiting.extend(streams)
                while self._is_at_work:
                    if interrupted.is_set:
                        self._give_up()
                    self._go_on()
                    reporter.report()
                if interrupted.is_set or self._failure:
                    break
        if interrupted.is_set:
            raise KeyboardInterrupt
        self._raise_failure()

    def follow(self, streams: Sequence[RequestReader]) -> Generator[None, None, None]:
        """As `run`, one step with each value. Closing it before its end cancels what is at work.

        Ctrl-C waits for the end of a step; between two steps it is the caller's.
        """
        with self._alone():
            self._waiting.extend(streams)
            try:
                while self._is_at_work:
                    with interrupts_wait() as interrupted:
                        self._go_on()
                    if interrupted.is_set:
                        raise KeyboardInterrupt
                    yield
            finally:
                self._drain()
        self._raise_failure()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._broken:
            raise EngineBroken(self._broken)
        if self._is_running:
            raise RequestFailed(
                "another call of this LLM is at work",
                hint="an LLM serves one call at a time; read a stream to its end, or close it",
            )
        self._is_running, self._failure = True, ""
        try:
            yield
        finally:
            self._is_running = False

    @property
    def _is_at_work(self) -> bool:
        return bool(self._waiting or self._open) or not self._engine.is_idle

    def _go_on(self) -> None:
        if self._failure:
            self._give_up()
        self._fill()
        self._turn()

    def _drain(self) -> None:
        """End what is at work, and give back what it holds."""
        with interrupts_wait() as interrupted:
            while self._is_at_work and not self._broken:
                self._give_up()
                self._turn()
        if interrupted.is_set:
            raise KeyboardInterrupt

    def _raise_failure(self) -> None:
        if self._failure:
            raise RequestFailed(self._failure)

    def _give_up(self) -> None:
        self._waiting.clear()
        for stream in self._open.values():
            self._engine.cancel(stream.request.request_id)

    def _fill(self) -> None:
        while self._waiting and len(self._open) < self._window:
            stream = self._waiting.popleft()
            request = stream.request
            if request.fork_of is not None and int(request.fork_of) not in self._open:
                request = replace(request, fork_of=None)  # there is nobody left to fork from
            self._open[request.number] = stream
            refused = self._engine.submit(request)
            if refused is not None:
                del self._open[request.number]
                self._failure = refused.message
                return

    def _turn(self) -> None:
        """One step and what came of the one before."""
        self._broken = _CUT_OFF
        try:
            told = self._engine.advance()
            if not self._engine.step():
                time.sleep(self._engine.wait_ns() / 1e9)
        except Exception as error:
            self._broken = f"a step failed with {type(error).__name__}: {error}"
            raise EngineBroken(self._broken) from error
        self._broken = ""
        self._take(told)

    def _take(self, told: Told) -> None:
        # Requests that are read as they come stream; the others' tokens come with their last output.
        for batch in told.tokens:
            for number, tokens in pieces(batch):
                self._take_output(Output(str(number), tokens))
        for output in told.outputs:
            self._take_output(output)

    def _take_output(self, output: Output) -> None:
        number = int(output.request_id)
        stream = self._open[number]
        if stream.take(output) and output.finish is None:
            self._engine.cancel(output.request_id, Finish.STOP)
        if output.finish is not None:
            del self._open[number]
        if output.finish is Finish.ERROR and output.error is not None:
            self._failure = self._failure or output.error.message
