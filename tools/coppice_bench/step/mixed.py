"""Steps of a chunk beside decodes: as a graph, and launched one by one; each alone, as a worker computes them.

    launches begin | host_ms ....... | the device computes ... | tokens are on the host
                   |--------------------- step_ms -------------|

No table is there from a step before: all of them are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from coppice_bench.step.model import Sequences, StepModel, StepShape, batch_of
from coppice_bench.timing import NS_PER_MS
from coppice_worker.core.batch.step_batch import Pending
from coppice_worker.model.device_state import TokensBack
from coppice_worker.model.graphs import MIXED_TOKENS, CudaGraphs, Graphs

Launch = Callable[[], Pending]
_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class MixedShape:
    """Rows of one new token at the end of `context`, and a chunk of `new_tokens` behind as many."""

    decodes: int
    new_tokens: int
    context: int  # tokens

    @property
    def longest(self) -> StepShape:
        """What has room for it: as many rows, all as long as the chunk's."""
        return StepShape(self.decodes + 1, 1, self.context + self.new_tokens)


class Mixed(Sequences):
    """Decodes, and the chunk as the last row."""

    def __init__(self, model: StepModel, shape: MixedShape, block_size: int) -> None:
        super().__init__(model, shape.longest, block_size)
        new = np.array([1] * shape.decodes + [shape.new_tokens])
        lens = np.array([shape.context] * shape.decodes + [shape.context + shape.new_tokens])
        self.batch = batch_of(new, lens, self.batch.block_tables, block_size)


@torch.inference_mode()
def launches(model: StepModel, sequences: Sequences, graphs: Graphs | None) -> dict[str, Launch]:
    """How the step can be launched here: one by one, and as a graph, where there are graphs and one has room."""
    batch = sequences.batch
    rows = np.arange(len(batch.context_lens), dtype=np.int32)
    back = TokensBack(len(rows), model.device)

    @torch.inference_mode()
    def one_by_one() -> Pending:
        return back.fetch(model.chosen(sequences), rows)

    size = next((size for size in MIXED_TOKENS if size >= len(batch.token_ids)), None)
    if graphs is None or size is None:
        return {"eager": one_by_one}
    steps = model.step_graphs(sequences, graphs, tokens_max=size)
    steps.capture_mixed(size)
    steps.capture(len(rows))  # whose sampling follows

    @torch.inference_mode()
    def as_a_graph() -> Pending:
        pending = steps.launch(batch)
        assert pending is not None, "it was captured for as many tokens"
        return pending

    return {"eager": one_by_one, "graph": as_a_graph}


def times_ms(launches: Mapping[str, Launch], rounds: int) -> dict[str, dict[str, float]]:
    """Medians, ms: until a step is launched, and until its tokens are on the host. Contenders take turns."""
    taken: dict[str, list[tuple[int, int]]] = {name: [] for name in launches}
    for _ in range(_WARM_UPS + rounds):
        for name, launch in launches.items():
            began = perf_counter_ns()
            pending = launch()
            launched = perf_counter_ns()
            pending.wait()
            taken[name].append((launched - began, perf_counter_ns() - began))
    parts = {name: zip(*times[_WARM_UPS:], strict=True) for name, times in taken.items()}
    return {
        name: dict(zip(("host_ms", "step_ms"), (median(part) / NS_PER_MS for part in both), strict=True))
        for name, both in parts.items()
    }


def mixed_row(model: StepModel, shape: MixedShape, block_size: int, rounds: int) -> dict[str, Any]:
    """Times of one kind of step. A CPU computes in its calls: no time of the host alone."""
    sequences = Mixed(model, shape, block_size)
    on_chip = model.device.type == "cuda"
    found = times_ms(launches(model, sequences, CudaGraphs(model.device) if on_chip else None), rounds)
    if not on_chip:
        found = {name: {"step_ms": times["step_ms"]} for name, times in found.items()}
    return {**found, "rounds": rounds}
