"""`coppice bench split`: what it costs that cache, scheduler and worker are processes of their own.

    split       the three services as they ship, over Unix sockets; the driver submits to the planner, in its process
    one         the same cores with the same settings in one process, called directly, and the driver with them
    one_sync    as `one`, but a step is planned when the one before is done, instead of one step earlier

Each round runs on all of them in turn, under the same arrivals. The worker's step is a sleep of fixed length, so only
what lies between steps differs. `throughput_ratio` is split over one (tokens per second of the steady streams) and
`ttft_extra_ms` split less one (under load; `idle_ttft_extra_ms` with nothing else at work): medians of the rounds.
Last, apart, the same on a real worker: the demo model on the CPU, where all processes share the machine's cores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from coppice.errors import UsageError
from coppice_bench.report import describe_run, note
from coppice_bench.split.load import Load, Measured
from coppice_bench.split.parts import MAX_CONTEXT, MAX_SEQUENCES
from coppice_bench.split.stacks import Stack, single_stack, split_stack
from coppice_up.checkpoint import demo_model_folder

STEP_MS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
QUICK_STEP_MS = (10.0,)
ROUNDS = 5
_ARRIVALS_PER_STEP = 1.5
_ARRIVALS_PER_S_MAX = 150.0
_STEPS_PER_ROUND = 100
_SECONDS_MIN = 2.0


Taken = dict[Load, dict[str, list[Measured]]]  # by stack; one for each round


def run_split(*, quick: bool, streams: int, rounds: int) -> dict[str, Any]:
    """Raises CoppiceError, UsageError."""
    if not 1 <= streams <= MAX_SEQUENCES // 2:
        raise UsageError(f"--streams {streams}: give 1 to {MAX_SEQUENCES // 2}")
    if rounds < 1:
        raise UsageError(f"--rounds {rounds}: give at least 1")
    rounds = 1 if quick else rounds
    sleeping = _measure(
        [_load(step_ms, streams, quick) for step_ms in (QUICK_STEP_MS if quick else STEP_MS)], rounds, MAX_CONTEXT, None
    )
    report: dict[str, Any] = {"bench": "split", "streams": streams, "rounds": rounds, **compare(sleeping)}
    report["real"] = {"left_out": "--quick"} if quick else _real(rounds)
    return {**report, **describe_run()}


def _load(step_ms: float, streams: int, quick: bool) -> Load:
    rate = min(_ARRIVALS_PER_STEP * 1e3 / step_ms, _ARRIVALS_PER_S_MAX)
    seconds = 0.5 if quick else max(_SECONDS_MIN, _STEPS_PER_ROUND * step_ms / 1e3)
    return Load(step_ms, streams, seconds, rate, idle_requests=3 if quick else 20, seed=1)


def _measure(loads: list[Load], rounds: int, max_context: int, checkpoint: Path | None) -> Taken:
    taken: Taken = {}
    with ExitStack() as running:
        stacks: Mapping[str, Stack] = {
            "one": running.enter_context(single_stack(2, checkpoint)),
            "one_sync": running.enter_context(single_stack(1, checkpoint)),
            "split": running.enter_context(split_stack(max_context, checkpoint)),
        }
        for load in loads:
            taken[load] = {name: [] for name in stacks}
            for number in range(rounds):
                note(f"step {load.step_ms:g} ms, round {number + 1}" if checkpoint is None else f"round {number + 1}")
                for name, stack in stacks.items():
                    taken[load][name].append(stack.run(replace(load, seed=load.seed + number)))
    return taken


def compare(taken: Taken) -> dict[str, Any]:
    """By length of the step."""
    cases = [_row(load, name, rounds) for load, stacks in taken.items() for name, rounds in stacks.items()]
    return {**_against("one", taken), "against_one_sync": _against("one_sync", taken), "cases": cases}


def _against(other: str, taken: Taken) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {"throughput_ratio": {}, "ttft_extra_ms": {}, "idle_ttft_extra_ms": {}}
    for load, stacks in taken.items():
        split, one, step = stacks["split"], stacks[other], f"{load.step_ms:g}"
        ratios = [mine.tokens_per_s / theirs.tokens_per_s for mine, theirs in zip(split, one, strict=True)]
        found["throughput_ratio"][step] = median(ratios)
        found["ttft_extra_ms"][step] = _ttft_ms(split) - _ttft_ms(one)
        found["idle_ttft_extra_ms"][step] = _idle_ttft_ms(split) - _idle_ttft_ms(one)
    return found


def _ttft_ms(rounds: list[Measured]) -> float:
    return median(time for each in rounds for time in each.ttft_ms)


def _idle_ttft_ms(rounds: list[Measured]) -> float:
    return median(time for each in rounds for time in each.idle_ttft_ms)


def _row(load: Load, name: str, rounds: list[Measured]) -> dict[str, Any]:
    """`took_ms` is from one token of a steady stream to the next."""
    took_ms = load.streams / median(each.tokens_per_s for each in rounds) * 1e3
    first = {"ttft_ms": _ttft_ms(rounds), "idle_ttft_ms": _idle_ttft_ms(rounds)}
    arrivals = sum(len(each.ttft_ms) for each in rounds)
    return {"step_ms": load.step_ms, "stack": name, "took_ms": took_ms, **first, "arrivals": arrivals}


def _real(rounds: int) -> dict[str, Any]:
    folder = demo_model_folder()
    if not (folder / "config.json").exists():
        return {"left_out": "this installation has no demo model"}
    max_context = int(json.loads((folder / "config.json").read_text("utf-8"))["max_position_embeddings"])
    note("the demo model on the CPU")
    prompt_tokens = 48
    load = Load(
        step_ms=0.0,
        streams=16,
        seconds=1.5,
        arrivals_per_s=20.0,
        idle_requests=10,
        seed=1,
        prompt_tokens=prompt_tokens,
        steady_tokens=max_context - prompt_tokens - 1,
    )
    taken = _measure([load], rounds, max_context, folder)
    compared = {key: found["0"] for key, found in _against("one", taken).items()}
    cases = [_row(load, name, measured) for name, measured in taken[load].items()]
    return {"model": "demo", "streams": load.streams, **compared, "cases": cases}
