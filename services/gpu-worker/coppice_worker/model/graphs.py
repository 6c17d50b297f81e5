"""Decode steps as graphs: what a step launches, recorded once for each size of batch and launched again as one.

    sizes     1  2  4  8  16  24  32 ...        a batch of 19 rows takes the graph of 24; 5 rows are padding
    body      tokens -> embedding -> layers -> hidden states         of every decode step; one more for batches
                                                                     whose rows have something in common
    tail      hidden states -> logits -> tokens                      where nobody asks for more than a token

A launch costs more of the host's time than a small kernel of the device's, and a step has hundreds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from coppice_worker.core.batch.step_batch import Int32, Pending, StepBatch
from coppice_worker.kernels.backend import DecodeBackend
from coppice_worker.model.decoder.decoder import Decoder
from coppice_worker.model.device_state import DeviceState, TokensBack

GRAPH_ROWS_MAX = 1024  # larger steps keep a device busy without graphs
_STEPS_PER_DOUBLING = 8  # sizes between n and 2 n: padding is at most an eighth

Launch = Callable[[], None]


class Graphs(Protocol):
    """Records launches."""

    def capture(self, work: Launch) -> Launch:
        """Runs `work`, which reads and writes memory that stays where it is; returns what does its launches again."""


class CudaGraphs:
    """CUDA graphs, which share the memory that their steps need in between: one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()

    def capture(self, work: Launch) -> Launch:
        # Once without recording: nothing may be compiled, loaded or found out while a stream is recorded.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as those that watch over ranks, may go on with what they do.
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


def graph_sizes(rows_max: int) -> tuple[int, ...]:
    """Numbers of rows that graphs are made for: few, and the next one is never much larger than the batch."""
    rows_max = min(rows_max, GRAPH_ROWS_MAX)
    sizes = [1, 2, 4, 8]
    while sizes[-1] < rows_max:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(8, octave // _STEPS_PER_DOUBLING))
    return (*(size for size in sizes if size < rows_max), rows_max)


@dataclass(frozen=True, slots=True)
class _Graph:
    num_rows: int
    body: Launch
    body_with_common: Launch
    tail: Launch


class DecodeGraphs:
    """The graphs of one decoder over one pool. Not thread-safe."""

    def __init__(
        self, graphs: Graphs, state: DeviceState, decoder: Decoder, backend: DecodeBackend, dtype: torch.dtype
    ) -> None:
        self._graphs, self._state, self._decoder, self._backend = graphs, state, decoder, backend
        self._hidden = torch.zeros((state.rows_max, decoder.config.hidden_size), dtype=dtype, device=state.device)
        self._tokens = torch.zeros(state.rows_max, dtype=torch.int64, device=state.device)
        self._back = TokensBack(state.rows_max, state.device)
        self._captured: list[_Graph] = []  # by size
        self._common: Int32 | None = None  # of the last batch

    def capture(self, num_rows: int) -> None:
        """Begin with the largest: the others then find room in its memory."""
        state, decoder = self._state, self._decoder
        hidden, tokens = self._hidden[:num_rows], self._tokens[:num_rows]

        def body(*, with_common: bool) -> None:
            step = self._backend.plan_decodes(state.rows(num_rows, with_common=with_common))
            hidden.copy_(decoder.forward(state.token_ids(num_rows), state.positions(num_rows), step))

        def tail() -> None:
            tokens.copy_(self._backend.choose_decodes(decoder.logits(hidden), state.choices(num_rows)))

        capture = self._graphs.capture
        alone, together = capture(partial(body, with_common=False)), capture(partial(body, with_common=True))
        graph = _Graph(num_rows, alone, together, capture(tail))
        self._captured = sorted([*self._captured, graph], key=lambda graph: graph.num_rows)

    def takes(self, batch: StepBatch) -> bool:
        """One new token a row, and a graph with room for them."""
        return self._state.takes(batch) and bool(self._captured)

    def forget_tables(self) -> None:
        """A batch was computed elsewhere."""
        self._state.forget_tables()

    def hidden(self, batch: StepBatch) -> torch.Tensor:
        """Computes the step; hidden states [S, hidden] before the final norm, until the next step."""
        self._compute(batch)
        return self._hidden[: len(batch.token_ids)]

    def launch(self, batch: StepBatch) -> Pending:
        """Begins the step of a batch that `is_plain`."""
        self._compute(batch).tail()
        return self._back.fetch(self._tokens[: len(batch.token_ids)], batch.sample.rows)

    def _compute(self, batch: StepBatch) -> _Graph:
        """Fills the state and launches the body."""
        num_rows, state = len(batch.token_ids), self._state
        if not state.holds(batch):
            self._common = self._backend.common(batch, state.rows_max)
        state.fill(batch, self._common)
        if batch.follows:
            state.token_ids(num_rows).copy_(self._tokens[:num_rows])
        graph = next(graph for graph in self._captured if graph.num_rows >= num_rows)
        (graph.body if self._common is None else graph.body_with_common)()
        return graph


def is_plain(batch: StepBatch) -> bool:
    """Nothing is asked for but tokens."""
    sample = batch.sample
    asked_for = (sample.changes, sample.num_logprobs, sample.guided, batch.prompt)
    return len(sample.rows) > 0 and all(more is None for more in asked_for)
