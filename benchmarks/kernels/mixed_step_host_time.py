"""What the host does for a mixed step before anything reaches a driver: as a graph, and launched one by one.

    python -m benchmarks.kernels.mixed_step_host_time [--json]

    graph         chunks, common prefixes, filling the rows. Launching the two graphs, of the layers and of sampling,
                  two small kernels between them, and the plan of the worker's core come on top; none of it depends on
                  the number of layers
    one by one    planning, and of each of 32 layers: writing, attention, two norms, the gate. Kernels are compiled for
                  sm_90, and their launches end before the driver (`stand_in_driver`). The driver, the
                  projections by torch, embedding and sampling come on top

Of a model with 32 query heads over 8 KV heads of 128 columns, on a device with 132 multiprocessors.
Processor time of one thread.
"""

from __future__ import annotations

import argparse
import sys
import timeit
from collections.abc import Callable
from functools import partial
from statistics import median
from time import thread_time

import numpy as np
import torch

from benchmarks.kernels.stand_in_driver import stand_in_driver
from coppice_bench.report import describe_run, print_report, warn_if_busy
from coppice_worker.core.batch.plain_batch import packed_batch, rows_alike
from coppice_worker.core.batch.step_batch import StepBatch
from coppice_worker.kernels.backend import Heads, LayerAttention
from coppice_worker.kernels.pool import KvPool, KvShape
from coppice_worker.kernels.triton.backend import TritonBackend
from coppice_worker.model.device_state import DeviceState
from coppice_worker.model.graphs import MIXED_TOKENS, graph_state

HEADS, KV_HEADS, HEAD_DIM, SMS = 32, 8, 128, 132
LAYERS, HIDDEN, INTERMEDIATE = 32, 4096, 14336
BLOCK_SIZE, ROWS_MAX, TABLE_WIDTH = 16, 256, 8192
DTYPE = torch.bfloat16
NUMBER, REPEATS = 20, 9
# Of each row: new tokens and context, these included.
STEPS = {
    "64_new_beside_32_decodes": [(1, 4096)] * 32 + [(64, 4160)],
    "4_times_64_new_beside_128_decodes": [(1, 2048)] * 128 + [(64, 4160)] * 4,
    "448_new_beside_64_decodes": [(1, 4096)] * 64 + [(448, 9000)],
}


class Simulated(TritonBackend):
    """Plans for a device that is not there."""

    def __init__(self, pool: KvPool, heads: Heads) -> None:
        super().__init__(pool, heads)
        self._num_sms = SMS


def step_of(rows: list[tuple[int, int]], rng: np.random.Generator) -> StepBatch:
    new, lens = (np.array(column) for column in zip(*rows, strict=True))
    tables = rng.integers(0, 1 << 20, (len(rows), -(-int(lens.max()) // BLOCK_SIZE))).astype(np.int32)
    return packed_batch(new, lens, tables, BLOCK_SIZE, rows_alike(lens.astype(np.int64)))


def time_us(work: Callable[[], object]) -> float:
    taken_s = timeit.repeat(work, timer=thread_time, number=NUMBER, repeat=REPEATS)
    return round(median(taken_s) / NUMBER * 1e6, 1)


def graph_us(backend: TritonBackend, state: DeviceState, batch: StepBatch) -> dict[str, float]:
    """Of a step that takes the smallest graph with room for its tokens."""
    size = next(size for size in MIXED_TOKENS if size >= len(batch.token_ids))

    def plan() -> None:
        chunks = backend.chunks(batch, size)
        assert chunks is not None
        state.fill(batch, backend.common(batch, ROWS_MAX), chunks)

    return {
        "tokens_of_the_graph": size,
        "chunks_us": time_us(partial(backend.chunks, batch, size)),
        "common_us": time_us(partial(backend.common, batch, ROWS_MAX)),
        "all_us": time_us(plan),
    }


def one_by_one_us(backend: TritonBackend, batch: StepBatch) -> dict[str, float]:
    """Of launches that a stand-in takes. All but `plan_us` and `all_us` are of one layer."""
    tokens = len(batch.token_ids)
    shapes = ((tokens, HEADS + 2 * KV_HEADS, HEAD_DIM), (tokens, HIDDEN), (tokens, 2 * INTERMEDIATE))
    qkv, hidden, both = (torch.zeros(shape, dtype=DTYPE) for shape in shapes)
    weight, arithmetic = torch.ones(HIDDEN), backend.arithmetic
    angles = (torch.ones(tokens, 1, HEAD_DIM // 2, dtype=DTYPE),) * 2
    step = backend.plan(batch)
    query = step.write(0, qkv, angles)

    def norms() -> None:
        for _ in range(2):
            arithmetic.add_norm(hidden, hidden, weight, 1e-5)

    def whole() -> None:
        step = backend.plan(batch)
        for layer in range(LAYERS):
            step.attend(layer, step.write(layer, qkv, angles))
            norms()
            arithmetic.gate(both, "silu")

    return {
        "plan_us": time_us(partial(backend.plan, batch)),
        "write_us": time_us(lambda: step.write(0, qkv, angles)),
        "attend_us": time_us(lambda: step.attend(0, query)),
        "norms_us": time_us(norms),
        "gate_us": time_us(lambda: arithmetic.gate(both, "silu")),
        "all_us": time_us(whole),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    warn_if_busy()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    shape = KvShape(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    pool = KvPool(shape, num_blocks=1, block_size=BLOCK_SIZE, device=device, dtype=DTYPE, content_dtype=DTYPE)
    backend = Simulated(pool, Heads(HEADS, (LayerAttention(scale=HEAD_DIM**-0.5),) * LAYERS))
    state = graph_state(backend, ROWS_MAX, TABLE_WIDTH, device, tokens_max=MIXED_TOKENS[-1])
    found = {}
    for name, rows in STEPS.items():
        batch = step_of(rows, np.random.default_rng(0))
        with torch.inference_mode(), stand_in_driver():
            found[name] = {"graph": graph_us(backend, state, batch), "one_by_one": one_by_one_us(backend, batch)}
    report = {"bench": "mixed_step_host_time", "layers": LAYERS, **found, **describe_run()}
    print_report(report, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
