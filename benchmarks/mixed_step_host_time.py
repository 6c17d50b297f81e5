"""What the host does for a mixed step that is a graph, without a device: the time until it would be launched.

    python -m benchmarks.mixed_step_host_time [--json]

Of a model with 32 query heads over 8 KV heads of 128 columns, on a device with 132 multiprocessors. Launching the
two graphs, of the layers and of sampling, two small kernels between them, and the plan of the worker's core come on
top; none of it depends on the number of layers.
"""

from __future__ import annotations

import argparse
import sys
import timeit
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch

from coppice_bench.report import describe_run, print_report, warn_if_busy
from coppice_worker.core.batch.plain_batch import packed_batch, rows_alike
from coppice_worker.core.batch.step_batch import StepBatch
from coppice_worker.kernels.backend import Heads, LayerAttention
from coppice_worker.kernels.pool import KvPool, KvShape
from coppice_worker.kernels.triton.backend import TritonBackend
from coppice_worker.model.graphs import MIXED_TOKENS, graph_state

HEADS, KV_HEADS, HEAD_DIM, SMS = 32, 8, 128, 132
BLOCK_SIZE, ROWS_MAX, TABLE_WIDTH = 16, 256, 8192
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
    return round(median(timeit.repeat(work, number=NUMBER, repeat=REPEATS)) / NUMBER * 1e6, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    warn_if_busy()
    torch.set_num_threads(1)
    device, dtype = torch.device("cpu"), torch.bfloat16
    shape = KvShape(num_layers=1, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    pool = KvPool(shape, num_blocks=1, block_size=BLOCK_SIZE, device=device, dtype=dtype, content_dtype=dtype)
    backend = Simulated(pool, Heads(HEADS, (LayerAttention(scale=HEAD_DIM**-0.5),)))
    state = graph_state(backend, ROWS_MAX, TABLE_WIDTH, device, tokens_max=MIXED_TOKENS[-1])
    found = {}
    for name, rows in STEPS.items():
        batch = step_of(rows, np.random.default_rng(0))
        size = next(size for size in MIXED_TOKENS if size >= len(batch.token_ids))

        def plan(batch: StepBatch = batch, size: int = size) -> None:
            chunks = backend.chunks(batch, size)
            assert chunks is not None
            state.fill(batch, backend.common(batch, ROWS_MAX), chunks)

        parts = {
            "chunks_us": time_us(partial(backend.chunks, batch, size)),
            "common_us": time_us(partial(backend.common, batch, ROWS_MAX)),
            "all_us": time_us(plan),
        }
        found[name] = {"tokens_of_the_graph": size, **parts}
    print_report({"bench": "mixed_step_host_time", **found, **describe_run()}, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
