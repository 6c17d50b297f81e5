"""What a change costs those who are served: a stack of this tree beside one of another checkout, in one run.

    git worktree add ../before COMMIT
    python -m benchmarks.beside_another_tree ../before [--rounds 20] [--dead-collector] [--json]

The stacks stand side by side, each with one worker of one thread; only one of them has work at a time. A round is a
load of conversations (4 turns, 16 at once) and one of single short prompts that meet an idle stack, to one stack and
then to the other; who begins, changes. `ratio` is the median over rounds of this tree over the other one, `more_ms`
that of the differences, each with quartiles and ends of its rounds beside it. The first round warms up and is left out.
With `--dead-collector` there is a third stack, of this tree, whose services send spans to where nobody listens.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.serve_model import model_folder
from coppice.errors import CoppiceError
from coppice_bench.processor_time import tree_time_s
from coppice_bench.report import describe_run, note, print_report, warn_if_busy
from coppice_bench.serve.options import ServeOptions
from coppice_bench.serve.side_by_side import prepared, run_load, spread
from coppice_bench.stack import Stack, StackOptions, running

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("services/cache", "services/scheduler", "services/gpu-worker", "shared", "tools")
OTHER, THIS, DEAD_COLLECTOR = "other", "this", "dead_collector"
NOBODY = "http://127.0.0.1:9"  # the port of `discard`
SETTLE_S = 0.5  # after a load
Figures = dict[str, float]  # of one round


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


def loaded(stack: Stack, options: ServeOptions) -> tuple[dict[str, Any], float]:
    """What clients saw, and the processor time of all services in seconds. Raises CoppiceError when a request fails."""
    part = prepared(options)
    before_s = sum(map(tree_time_s, stack.pids.values()))
    found, _ = run_load(part)
    if found["errors"]:
        raise CoppiceError(f"the load failed: {found['errors']}")
    return found, sum(map(tree_time_s, stack.pids.values())) - before_s


def one_round(stack: Stack, conversations: int, singles: int) -> Figures:
    busy = ServeOptions(
        url=stack.url, load="multiturn", requests=conversations, concurrency=16, input_tokens=64, output_tokens=32
    )
    idle = ServeOptions(
        url=stack.url,
        load="prefix",
        requests=singles,
        concurrency=1,
        input_tokens=48,
        shared_tokens=16,
        output_tokens=2,
    )
    found, busy_s = loaded(stack, busy)
    num_tokens = found["requests"] * found["output_tokens_mean"]
    time.sleep(SETTLE_S)
    alone, _ = loaded(stack, idle)
    time.sleep(SETTLE_S)
    return {
        "output_tok_s": found["output_tok_s"],
        "processor_us_per_token": busy_s * 1e6 / num_tokens,
        "idle_ttft_ms": alone["ttft_ms"]["p50"],
    }


def measure(stacks: dict[str, Stack], rounds: int, conversations: int, singles: int) -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = {name: [] for name in stacks}
    for number in range(rounds + 1):
        note(f"round {number} of {rounds}" + ("" if number else ", which warms up"))
        for name in list(stacks) if number % 2 else reversed(list(stacks)):
            figures = one_round(stacks[name], conversations, singles)
            note(f"  {name}: " + ", ".join(f"{what} {value:.4g}" for what, value in figures.items()))
            if number:
                found[name].append(figures)
    return found


def compared(other: Sequence[Figures], this: Sequence[Figures]) -> dict[str, Any]:
    """Round by round: neighbours in time are compared, so what the machine does besides falls on both."""
    found: dict[str, Any] = {}
    for name in this[0]:
        pairs = [(a[name], b[name]) for a, b in zip(other, this, strict=True)]
        found[name] = {OTHER: median(a for a, _ in pairs), "here": median(b for _, b in pairs)}
        found[name]["ratio"] = spread([b / a for a, b in pairs])
        if name.endswith("_ms"):
            found[name]["more_ms"] = spread([b - a for a, b in pairs])
    return found


def commit_of(tree: Path) -> str:
    done = subprocess.run(["git", "-C", str(tree), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--conversations", type=int, default=32, help="of a load")
    parser.add_argument("--singles", type=int, default=40, help="prompts that meet an idle stack, of a round")
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: that of serve_model.py")
    parser.add_argument(
        "--dead-collector", action="store_true", help="a third stack: its spans go to where nobody listens"
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    warn_if_busy()
    other = arguments.other.resolve()
    starts: dict[str, tuple[Path, dict[str, str]]] = {OTHER: (other, {}), THIS: (ROOT, {})}
    if arguments.dead_collector:
        services = ("CACHE", "SCHEDULER", "WORKER")
        starts[DEAD_COLLECTOR] = ROOT, {f"COPPICE_{name}_OTLP_ENDPOINT": NOBODY for name in services}
    try:
        with ExitStack() as held:
            model = held.enter_context(model_folder(arguments.model))
            note("the stacks start")
            stacks = {
                name: held.enter_context(stack_of(tree, model, **variables))
                for name, (tree, variables) in starts.items()
            }
            found = measure(stacks, arguments.rounds, arguments.conversations, arguments.singles)
    except CoppiceError as error:
        note(error.line())
        return 1
    print_report(
        {
            "bench": "beside_another_tree",
            "trees": {OTHER: commit_of(other), THIS: commit_of(ROOT)},
            **{name: compared(found[OTHER], found[name]) for name in starts if name != OTHER},
            "rounds": arguments.rounds,
            **describe_run(),
        },
        as_json=arguments.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
