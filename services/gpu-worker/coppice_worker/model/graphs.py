"""Steps as graphs: what a step launches, recorded once for each size and launched again as one.

    decodes   1  2  4  8  16  24  32 ...  rows     a batch of 19 takes the graph of 24; 5 rows are padding
    mixed     16  32  64  96 ... 512  tokens       chunks, beside decodes or without; 70 tokens take the graph of 96
    body      tokens -> embedding -> layers -> hidden states     of each of these; one more for batches whose decodes
                                                                 have something in common
    tail      hidden states -> logits -> tokens                  of so many rows, of which nobody asks for more

A launch costs more of the host's time than a small kernel of the device's, and a step has hundreds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from coppice_worker.core.batch.step_batch import Int32, Pending, StepBatch
from coppice_worker.kernels.backend import GraphBackend, StepRows
from coppice_worker.model.decoder.decoder import Decoder
from coppice_worker.model.device_state import DeviceState, TokensBack

GRAPH_ROWS_MAX = 1024  # larger steps keep a device busy without graphs
MIXED_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512)  # with more, the device is busy for longer than the host is
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


def mixed_sizes(tokens_max: int) -> tuple[int, ...]:
    """Numbers of tokens that graphs of mixed steps are made for."""
    return tuple(size for size in MIXED_TOKENS if size <= tokens_max)


def graph_state(
    backend: GraphBackend, rows_max: int, table_width: int, device: torch.device, *, tokens_max: int = 0
) -> DeviceState:
    """What graphs of decodes of that many rows, and of mixed steps of that many tokens, read."""
    sizes = mixed_sizes(tokens_max)
    chunks = backend.chunks_size(sizes[-1]) if sizes else 0
    common = backend.common_size(rows_max)
    return DeviceState(rows_max, table_width, common, device, tokens_max=max(sizes, default=0), chunks_size=chunks)


@dataclass(frozen=True, slots=True)
class _Bodies:
    alone: Launch
    with_common: Launch


@dataclass(frozen=True, slots=True)
class _Decodes:
    num_rows: int
    bodies: _Bodies
    tail: Launch


class StepGraphs:
    """The graphs of one decoder over one pool. Not thread-safe."""

    def __init__(
        self, graphs: Graphs, state: DeviceState, decoder: Decoder, backend: GraphBackend, dtype: torch.dtype
    ) -> None:
        self._graphs, self._state, self._decoder, self._backend = graphs, state, decoder, backend
        self._hidden = torch.zeros((state.tokens_max, decoder.config.hidden_size), dtype=dtype, device=state.device)
        self._tokens = torch.zeros(state.rows_max, dtype=torch.int64, device=state.device)
        self._back = TokensBack(state.rows_max, state.device)
        self._decodes: list[_Decodes] = []  # by size
        self._mixed: dict[int, _Bodies] = {}
        self._common: Int32 | None = None  # of the last batch
        self._common_holds = False  # for a batch that goes on

    def capture(self, num_rows: int) -> None:
        """Decodes. Begin with the largest: the others then find room in its memory."""
        state, decoder = self._state, self._decoder
        hidden, tokens = self._hidden[:num_rows], self._tokens[:num_rows]

        def tail() -> None:
            tokens.copy_(self._backend.choose_decodes(decoder.logits(hidden), state.choices(num_rows)))

        bodies = self._bodies(num_rows, partial(state.rows, num_rows))
        graph = _Decodes(num_rows, bodies, self._graphs.capture(tail))
        self._decodes = sorted([*self._decodes, graph], key=lambda graph: graph.num_rows)

    def capture_mixed(self, num_tokens: int) -> None:
        """Chunks and decodes; the largest first."""
        chunks_size = self._backend.chunks_size(num_tokens)
        bodies = self._bodies(num_tokens, partial(self._state.mixed_rows, num_tokens, chunks_size))
        self._mixed = dict(sorted({**self._mixed, num_tokens: bodies}.items()))

    def _bodies(self, num_tokens: int, rows: Callable[..., StepRows]) -> _Bodies:
        state, hidden = self._state, self._hidden[:num_tokens]

        def body(*, with_common: bool) -> None:
            step = self._backend.plan_rows(rows(with_common=with_common))
            hidden.copy_(self._decoder.forward(state.token_ids(num_tokens), state.positions(num_tokens), step))

        capture = self._graphs.capture
        return _Bodies(capture(partial(body, with_common=False)), capture(partial(body, with_common=True)))

    def takes_decodes(self, batch: StepBatch) -> bool:
        """One new token a row, and a graph with room for them."""
        is_decodes = len(batch.token_ids) == len(batch.context_lens)
        return is_decodes and bool(self._decodes) and self._state.has_room_for(batch)

    def hidden(self, batch: StepBatch) -> torch.Tensor | None:
        """Computes the step; hidden states [T, hidden] before the final norm, until the next step. None where no graph
        has room for it: then it is computed elsewhere."""
        if self.takes_decodes(batch):
            self._decode(batch)
        elif not self._mix(batch):
            self._state.forget_tables()
            return None
        return self._hidden[: len(batch.token_ids)]

    def launch(self, batch: StepBatch) -> Pending | None:
        """Begins the step of a batch that `is_plain`; None where no graph has room for it."""
        if self.takes_decodes(batch):
            self._decode(batch).tail()
            return self._back.fetch(self._tokens[: len(batch.token_ids)], batch.sample.rows)
        if self.hidden(batch) is None:
            return None
        rows = np.arange(len(batch.sample.rows), dtype=np.int32)
        graph = self._decodes_of(len(rows))
        hidden = self._hidden.index_select(0, self._state.sampled(graph.num_rows))
        self._hidden[: graph.num_rows].copy_(hidden)
        graph.tail()
        return self._back.fetch(self._tokens[: len(rows)], rows)

    def _decodes_of(self, num_rows: int) -> _Decodes:
        return next(graph for graph in self._decodes if graph.num_rows >= num_rows)

    def _decode(self, batch: StepBatch) -> _Decodes:
        """Fills the state and launches the body."""
        num_rows, state = len(batch.token_ids), self._state
        if not (self._common_holds and state.holds(batch)):
            self._common = self._backend.common(batch, state.rows_max)
        self._common_holds = True
        state.fill(batch, self._common)
        if batch.follows:
            state.token_ids(num_rows).copy_(self._tokens[:num_rows])
        graph = self._decodes_of(num_rows)
        self._launch(graph.bodies)
        return graph

    def _mix(self, batch: StepBatch) -> bool:
        """Likewise; False where no graph has room."""
        sizes = [size for size in self._mixed if size >= len(batch.token_ids)]
        if not self._state.has_room_for(batch):
            return False
        for size in sizes:  # many short chunks have more tiles than as many tokens of a long one
            if (chunks := self._backend.chunks(batch, size)) is not None:
                break
        else:
            return False
        self._common = self._backend.common(batch, self._state.rows_max)
        self._common_holds = False  # its chunks may be decodes in the next step
        self._state.fill(batch, self._common, chunks)
        self._launch(self._mixed[size])
        return True

    def _launch(self, bodies: _Bodies) -> None:
        (bodies.alone if self._common is None else bodies.with_common)()


def is_plain(batch: StepBatch) -> bool:
    """Nothing is asked for but tokens."""
    sample = batch.sample
    asked_for = (sample.changes, sample.num_logprobs, sample.guided, batch.prompt)
    return len(sample.rows) > 0 and all(more is None for more in asked_for)
