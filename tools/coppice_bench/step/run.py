"""`coppice bench step`: whole steps of a worker, beside their floor and beside the same model without blocks.

    step_ms          plan, forward pass, logits, likeliest tokens; KV in blocks that lie in no order. Decodes on a GPU
                     are launched one step ahead, as a worker does
    contiguous_ms    the same with each sequence's KV in one stretch and attention by torch
    floor_ms         what the step cannot be quicker than, measured in the same run: on a CPU its matrix products alone,
                     by torch's or by our own projections, whichever is quicker; on a GPU its bytes at the rate of a
                     copy, or its FLOPs at the rate of a large product, whichever takes longer

Contenders take turns; medians. One thread of a CPU is timed by its own processor time, which others on the machine
disturb little; all else by the clock. A CPU computes a Llama of 40M parameters, a GPU one of the shape of Llama 3.1 8B;
both have random weights, made in memory. `fraction_of_floor` is floor / step, `vs_contiguous` contiguous / step.

A mixed step, of a chunk beside decodes, is computed alone: on a GPU as a graph and launched one by one, on a CPU, which
has no graphs, one by one. `host_ms`, on a GPU, is the host's time until it is launched (`mixed.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter_ns, thread_time_ns
from typing import Any

import torch

from coppice_bench.kernels.ceilings import Ceilings, measure_ceilings
from coppice_bench.kernels.clocks import clock_for
from coppice_bench.report import describe_run, note, warn_if_busy
from coppice_bench.step.floor import Products, floor_ms, num_projected
from coppice_bench.step.mixed import MixedShape, mixed_row
from coppice_bench.step.model import Contiguous, Sequences, StepModel, StepShape, config_of
from coppice_bench.timing import Operation, time_in_turns, time_one
from coppice_worker.model.config.config import ModelConfig
from coppice_worker.model.decoder.linear import Projections

_US_PER_MS = 1_000
_MS_PER_S = 1_000
_ROUNDS = range(5, 101)
_TURN = 4
_CEILING_ROUNDS = 20
_SPARE_BYTES = 4 << 30  # of a GPU, for activations


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is measured on one kind of device."""

    config: ModelConfig
    dtypes: tuple[str, ...]
    batches: tuple[int, ...]
    context: int  # of decodes, tokens
    prefills: tuple[int, ...]  # tokens
    mixed: tuple[tuple[int, int], ...]  # decodes, and tokens of a chunk beside them
    block_size: int
    budget_ms: float  # for each contender in each row
    mixed_rounds: int = 30


def run_step(*, quick: bool, threads: int | None = None) -> dict[str, Any]:
    warn_if_busy()
    if threads is not None:
        torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = _quick() if quick else _for_gpu() if device.type == "cuda" else _for_cpu()
    ceilings = None
    if device.type == "cuda":
        dtypes = [getattr(torch, name) for name in plan.dtypes]
        ceilings = measure_ceilings(device, dtypes, clock_for(device, _CEILING_ROUNDS), quick=quick)
    decode: list[dict[str, Any]] = []
    prefill: list[dict[str, Any]] = []
    mixed: list[dict[str, Any]] = []
    for name in plan.dtypes:
        model = StepModel(plan.config, device, getattr(torch, name))
        bench = _Bench(model, plan, ceilings)
        for batch in plan.batches:
            decode.append({"dtype": name, "batch": batch, **bench.row(StepShape(batch, 1, plan.context))})
        for tokens in plan.prefills:
            prefill.append({"dtype": name, "tokens": tokens, **bench.row(StepShape(1, tokens, tokens))})
        for decodes, tokens in plan.mixed:
            row = bench.mixed_row(MixedShape(decodes, tokens, plan.context))
            mixed.append({"dtype": name, "new_tokens": tokens, "decodes": decodes, **row})
    return {
        "bench": "step",
        "decode": decode,
        "prefill": prefill,
        "mixed": mixed,
        "decode_context": plan.context,
        "block_size": plan.block_size,
        "model": _describe_model(plan.config),
        "device": _describe_device(device, ceilings),
        **describe_run(),
    }


class _Bench:
    """Rows of one model in one dtype."""

    def __init__(self, model: StepModel, plan: _Plan, ceilings: Ceilings | None) -> None:
        self._model, self._plan, self._ceilings = model, plan, ceilings
        # The bare product is what counts for the floor.
        bare = Projections(lambda both, activation: both.chunk(2, dim=-1)[0])
        self._by_torch = model.random_weights(bare) if ceilings is None else None

    def row(self, shape: StepShape) -> dict[str, Any]:
        if not self._fits(shape):
            return {"skipped": "this device has not enough memory"}
        model = self._model
        blocks = Sequences(model, shape, self._plan.block_size)
        steps = model.launched(blocks)
        contenders: dict[str, Operation] = {"step": lambda _: steps.compute()}
        counts = {"step": steps.count}
        if self._fits(shape):
            contiguous = Contiguous(model, shape, blocks)
            contiguous_steps = model.launched(contiguous)
            contenders["contiguous"] = lambda _: contiguous_steps.compute()
            counts["contiguous"] = contiguous_steps.count
        contenders.update(self._products(shape))
        for operation in contenders.values():
            operation(0)
        rounds = self._rounds(contenders)
        note(f"{model.dtype}, {shape}: {rounds} rounds")
        clock = thread_time_ns if _is_one_thread(model.device) else perf_counter_ns
        taken_us = time_in_turns(contenders, rounds, _TURN, clock)
        taken = {name: taken / _US_PER_MS / counts.get(name, 1) for name, taken in taken_us.items()}
        floors = [taken[name] for name in ("torch_matmul", "matmul") if name in taken]
        floor = min(floors) if self._ceilings is None else floor_ms(self._ceilings, model, shape)
        return _as_row(shape, taken, floor, rounds)

    def mixed_row(self, shape: MixedShape) -> dict[str, Any]:
        if not self._fits(shape.longest):
            return {"skipped": "this device has not enough memory"}
        note(f"{self._model.dtype}, {shape}: {self._plan.mixed_rounds} rounds")
        return mixed_row(self._model, shape, self._plan.block_size, self._plan.mixed_rounds)

    def _products(self, shape: StepShape) -> Mapping[str, Operation]:
        if self._by_torch is None:
            return {}
        ours, by_torch = (Products(self._model, some, shape) for some in (self._model.weights, self._by_torch))
        return {"matmul": lambda _: ours.compute(), "torch_matmul": lambda _: by_torch.compute()}

    def _rounds(self, contenders: Mapping[str, Operation]) -> int:
        slowest_ms = max(time_one(operation, 2) for operation in contenders.values()) / _US_PER_MS
        return min(max(int(self._plan.budget_ms / slowest_ms), _ROUNDS.start), _ROUNDS.stop - 1)

    def _fits(self, shape: StepShape) -> bool:
        """Whether this device has room for such sequences, beside what it holds already."""
        if self._model.device.type != "cuda":
            return True
        gc.collect()  # graphs and what they launch hold each other
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._model.device)
        return shape.batch * self._model.kv_bytes(shape.context) + _SPARE_BYTES < free


def _as_row(shape: StepShape, taken_ms: Mapping[str, float], floor_ms: float, rounds: int) -> dict[str, Any]:
    step_ms, contiguous_ms = taken_ms["step"], taken_ms.get("contiguous")
    return {
        "step_ms": step_ms,
        "floor_ms": floor_ms,
        "fraction_of_floor": floor_ms / step_ms,
        "contiguous_ms": contiguous_ms,
        "vs_contiguous": None if contiguous_ms is None else contiguous_ms / step_ms,
        "tokens_per_s": shape.batch * shape.new_tokens * _MS_PER_S / step_ms,
        **{f"{name}_ms": taken_ms[name] for name in ("matmul", "torch_matmul") if name in taken_ms},
        "rounds": rounds,
    }


def _for_cpu() -> _Plan:
    config = config_of(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=32_000, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    return _Plan(
        config, ("float32", "bfloat16"), (1, 8, 32), 512, (512, 2048), ((8, 64),), block_size=16, budget_ms=1_000
    )


def _for_gpu() -> _Plan:
    config = config_of(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128_256, max_position_embeddings=131_072, rope_theta=500_000.0,
    )  # fmt: skip
    batches, mixed = (1, 8, 32, 64, 128, 256), ((32, 64), (128, 256))
    return _Plan(config, ("bfloat16",), batches, 4096, (512, 2048), mixed, block_size=16, budget_ms=2_000)


def _quick() -> _Plan:
    config = config_of(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1000, max_position_embeddings=256, head_dim=64,
    )  # fmt: skip
    return _Plan(config, ("float32", "bfloat16"), (1, 4), 64, (64,), ((3, 8),), 16, budget_ms=20, mixed_rounds=4)


def _describe_model(config: ModelConfig) -> dict[str, Any]:
    return {
        "projected_parameters": num_projected(config),
        "layers": config.num_layers,
        "hidden": config.hidden_size,
        "heads": [config.num_heads, config.num_kv_heads, config.head_dim],
        "vocab": config.vocab_size,
    }


def _is_one_thread(device: torch.device) -> bool:
    return device.type == "cpu" and torch.get_num_threads() == 1


def _describe_device(device: torch.device, ceilings: Ceilings | None) -> dict[str, Any]:
    if ceilings is None:
        clock = "processor time" if _is_one_thread(device) else "wall"
        return {"kind": "cpu", "threads": torch.get_num_threads(), "clock": clock}
    return {
        "kind": torch.cuda.get_device_name(device),
        "copy_tb_per_s": ceilings.copy_bytes_per_s / 1e12,
        "matmul_tflops": {str(dtype): rate / 1e12 for dtype, rate in ceilings.flops_per_s.items()},
    }
