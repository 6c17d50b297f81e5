"""What a change costs those who are served: a stack of this tree beside one of another checkout, in one run.

    git worktree add ../before COMMIT
    python -m benchmarks.stack.beside_another_tree ../before [../between ...] [--starts 5] [--dead-collector] [--json]

The stacks stand side by side, each with one worker of one thread; only one of them has work at a time. An idle round is
a few short prompts, twelve a second, to one stack and then to the other; a busy round is a load of conversations (4
turns, 16 at once). The order is drawn anew for each round. Each stack is compared with that of the first checkout:
`ratio` is the median over rounds of this tree over the other one, `more_ms` that of the differences, each with
quartiles and ends of its rounds beside it, and with `median_90`: the range in which the median lies nine times of ten
when as many rounds are drawn from these. First rounds warm up and are left out. Two stacks of one tree differ by some
tenths of a millisecond from start to start, so all are started `--starts` times and the rounds of all starts count.

With `--dead-collector` there are two more stacks of this tree: the services of one send spans to where nobody listens,
and one is as the first, to tell what differs by chance. Under "beside_this" both are compared with the first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np

from benchmarks.serve_model import model_folder
from coppice.errors import CoppiceError
from coppice_bench.processor_time import tree_time_s
from coppice_bench.report import describe_run, note, print_report, warn_if_busy
from coppice_bench.serve.options import ServeOptions
from coppice_bench.serve.side_by_side import prepared, run_load, spread
from coppice_bench.stack import Stack, StackOptions, running

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("services/cache", "services/scheduler", "services/gpu-worker", "shared", "tools")
OTHER, THIS, THIS_AGAIN, DEAD_COLLECTOR = "other", "this", "this_again", "dead_collector"
NOBODY = "http://127.0.0.1:9"  # the port of `discard`
SETTLE_S = 0.2  # after a load
IDLE_RATE = 12.0  # a second
DRAWS = 2_000  # of the bootstrap
SINGLES = 8  # prompts of an idle round: few, so that the stacks are compared within a second
Figures = dict[str, float]  # of one round
Rounds = dict[str, list[Figures]]  # of each stack


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def stack_of(tree: Path, model: Path, **variables: str) -> Iterator[Stack]:
    path = os.pathsep.join(str(tree / package) for package in PACKAGES)
    with ExitStack() as held:
        with environment(PYTHONPATH=path, **variables):
            stack = held.enter_context(running(StackOptions(model=model, threads=1)))
        yield stack


def loaded(options: ServeOptions) -> dict[str, Any]:
    """What clients saw. Raises CoppiceError when a request fails."""
    found, _ = run_load(prepared(options))
    if found["errors"]:
        raise CoppiceError(f"the load failed: {found['errors']}")
    return found


def busy(stack: Stack, conversations: int) -> Figures:
    """Of many at once; the processor time is that of the worker, and of all services but the worker."""
    load = ServeOptions(
        url=stack.url, load="multiturn", requests=conversations, concurrency=16, input_tokens=64, output_tokens=32
    )
    before_s = {name: tree_time_s(pid) for name, pid in stack.pids.items()}
    found = loaded(load)
    spent_us = {name: (tree_time_s(pid) - before_s[name]) * 1e6 for name, pid in stack.pids.items()}
    num_tokens = found["requests"] * found["output_tokens_mean"]
    worker_us = sum(each for name, each in spent_us.items() if "worker" in name)
    return {
        "output_tok_s": found["output_tok_s"],
        "worker_us_per_token": worker_us / num_tokens,
        "others_us_per_token": (sum(spent_us.values()) - worker_us) / num_tokens,
    }


def idle(stack: Stack) -> Figures:
    """Of prompts that mostly come alone, when what the last one left to do is done."""
    load = ServeOptions(
        url=stack.url,
        load="prefix",
        requests=SINGLES,
        rate=IDLE_RATE,
        input_tokens=48,
        shared_tokens=16,
        output_tokens=2,
    )
    found = loaded(load)
    return {"idle_ttft_ms": found["ttft_ms"]["p50"]}


def in_turn(
    stacks: dict[str, Stack], rounds: int, load: Callable[[Stack], Figures], random: Random, found: Rounds
) -> None:
    """Adds to what was found."""
    for number in range(rounds + 1):
        for name in random.sample(list(stacks), len(stacks)):
            figures = load(stacks[name])
            told = ", ".join(f"{what} {value:.4g}" for what, value in figures.items())
            note(f"round {number} of {rounds}: {name}: {told}")
            if number:
                found[name].append(figures)
            time.sleep(SETTLE_S)


def compared(first: Sequence[Figures], second: Sequence[Figures]) -> dict[str, Any]:
    """Round by round: neighbours in time are compared, so what the machine does besides falls on both."""
    found: dict[str, Any] = {}
    for name in second[0]:
        pairs = [(a[name], b[name]) for a, b in zip(first, second, strict=True)]
        found[name] = {"there": median(a for a, _ in pairs), "here": median(b for _, b in pairs)}
        found[name]["ratio"] = with_range([b / a for a, b in pairs])
        if name.endswith("_ms"):
            found[name]["more_ms"] = with_range([b - a for a, b in pairs])
    return found


def with_range(values: Sequence[float]) -> dict[str, Any]:
    """Their spread, and the bootstrap's 90 % of their median."""
    drawn = np.random.default_rng(0).choice(values, (DRAWS, len(values)))
    return {**spread(values), "median_90": [float(each) for each in np.percentile(np.median(drawn, axis=1), (5, 95))]}


def beside(first: str, many: Rounds, alone: Rounds) -> dict[str, Any]:
    """Each other stack compared with the first."""
    return {
        name: compared(many[first], many[name]) | compared(alone[first], alone[name]) for name in many if name != first
    }


@contextmanager
def all_of(trees: dict[str, tuple[Path, dict[str, str]]], model: Path, random: Random) -> Iterator[dict[str, Stack]]:
    with ExitStack() as held:
        stacks = {
            name: held.enter_context(stack_of(trees[name][0], model, **trees[name][1]))
            for name in random.sample(list(trees), len(trees))
        }
        yield stacks


def commit_of(tree: Path) -> str:
    done = subprocess.run(["git", "-C", str(tree), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("others", type=Path, nargs="+", help="folders of other checkouts")
    parser.add_argument("--starts", type=int, default=5, help="of all stacks")
    parser.add_argument("--rounds", type=int, default=5, help="of load, for each start")
    parser.add_argument("--conversations", type=int, default=32, help="of a load")
    parser.add_argument("--idle-rounds", type=int, default=40, help=f"of {SINGLES} prompts that meet an idle stack")
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: that of serve_model.py")
    parser.add_argument("--dead-collector", action="store_true", help="a stack whose spans go to where nobody listens")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    warn_if_busy()
    others = {
        f"{OTHER}_{number}" if number > 1 else OTHER: folder.resolve()
        for number, folder in enumerate(arguments.others, 1)
    }
    trees: dict[str, tuple[Path, dict[str, str]]] = {
        name: (folder, {}) for name, folder in (others | {THIS: ROOT}).items()
    }
    if arguments.dead_collector:
        services = ("CACHE", "SCHEDULER", "WORKER")
        trees[THIS_AGAIN] = ROOT, {}
        trees[DEAD_COLLECTOR] = ROOT, {f"COPPICE_{name}_OTLP_ENDPOINT": NOBODY for name in services}
    many_at_once = partial(busy, conversations=arguments.conversations)
    random = Random(1)
    alone: Rounds = {name: [] for name in trees}
    many: Rounds = {name: [] for name in trees}
    try:
        with model_folder(arguments.model) as model:
            for start in range(arguments.starts):
                note(f"the stacks start ({start + 1} of {arguments.starts})")
                with all_of(trees, model, random) as stacks:
                    in_turn(stacks, arguments.idle_rounds, idle, random, alone)
                    in_turn(stacks, arguments.rounds, many_at_once, random, many)
    except CoppiceError as error:
        note(error.line())
        return 1
    print_report(
        {
            "bench": "beside_another_tree",
            "trees": {name: commit_of(folder) for name, folder in (others | {THIS: ROOT}).items()},
            **beside(OTHER, many, alone),
            "beside_this": {name: found for name, found in beside(THIS, many, alone).items() if name not in others},
            "starts": arguments.starts,
            "rounds_of_a_start": {"busy": arguments.rounds, "idle": arguments.idle_rounds, "singles": SINGLES},
            **describe_run(),
        },
        as_json=arguments.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
