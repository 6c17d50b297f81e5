"""What a second planner costs where one would do: throughput, the first token, and what is found in the cache.

    python -m benchmarks.stack.several_planners [--rounds 7] [--conversations 48] [--model FOLDER] [--json]

Two stacks stand side by side, each with two workers of one thread: one planner, and two. Only one of them has work at a
time. A round is a load of conversations (4 turns, a common beginning of 192 tokens, 16 at once) and one of prompts with
one of 8 common beginnings (32 at once), to one stack and then to the other; who begins, changes. `ratio` is the median
over rounds of two planners over one, with quartiles and ends of its rounds beside it; `points` is the difference of the
shares of prompt tokens that were cached. The first round warms up and is left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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

ONE, TWO = "one", "two"
SETTLE_S = 1.0  # after a load
Figures = dict[str, float]  # of one load


def conversations(stack: Stack, count: int) -> ServeOptions:
    return ServeOptions(
        url=stack.url, load="multiturn", requests=count, concurrency=16, input_tokens=64, output_tokens=32
    )


def common_beginnings(stack: Stack, count: int) -> ServeOptions:
    return ServeOptions(
        url=stack.url, load="prefix", prefixes=8, requests=4 * count, concurrency=32, input_tokens=256, output_tokens=32
    )


LOADS: dict[str, Callable[[Stack, int], ServeOptions]] = {
    "conversations": conversations,
    "common_beginnings": common_beginnings,
}


def under_load(stack: Stack, options: ServeOptions) -> Figures:
    """Raises CoppiceError when a request fails."""
    part = prepared(options)
    before_s = tree_time_s(stack.pids["scheduler"])
    found, _ = run_load(part)
    scheduler_s = tree_time_s(stack.pids["scheduler"]) - before_s
    if found["errors"]:
        raise CoppiceError(f"the load failed: {found['errors']}")
    num_tokens = found["requests"] * found["output_tokens_mean"]
    return {
        "output_tok_s": found["output_tok_s"],
        "ttft_p50_ms": found["ttft_ms"]["p50"],
        "ttft_p99_ms": found["ttft_ms"]["p99"],
        "cached_share": found["cached_share"],
        "scheduler_us_per_token": scheduler_s * 1e6 / num_tokens,
    }


def measure(stacks: dict[str, Stack], rounds: int, count: int) -> dict[str, dict[str, list[Figures]]]:
    """By load, then by stack, one of each round."""
    found: dict[str, dict[str, list[Figures]]] = {load: {name: [] for name in stacks} for load in LOADS}
    for number in range(rounds + 1):
        note(f"round {number} of {rounds}" + ("" if number else ", which warms up"))
        for load, options in LOADS.items():
            for name in list(stacks) if number % 2 else reversed(list(stacks)):
                figures = under_load(stacks[name], options(stacks[name], count))
                time.sleep(SETTLE_S)
                if number:
                    found[load][name].append(figures)
    return found


def compared(one: Sequence[Figures], two: Sequence[Figures]) -> dict[str, Any]:
    """Round by round: neighbours in time are compared, so what the machine does besides falls on both."""
    found: dict[str, Any] = {}
    for name in one[0]:
        pairs = [(a[name], b[name]) for a, b in zip(one, two, strict=True)]
        middle = {ONE: median(a for a, _ in pairs), TWO: median(b for _, b in pairs)}
        if name == "cached_share":
            found[name] = {**middle, "points": spread([100 * (b - a) for a, b in pairs])}
        else:
            found[name] = {**middle, "ratio": spread([b / a for a, b in pairs])}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--conversations", type=int, default=48, help="of a load; four times as many single prompts")
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: that of serve_model.py")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    warn_if_busy()
    try:
        with ExitStack() as held:
            model = held.enter_context(model_folder(arguments.model))
            note("the stacks start")
            stacks = {
                name: held.enter_context(running(StackOptions(model=model, workers=2, planners=count, threads=1)))
                for name, count in ((ONE, 1), (TWO, 2))
            }
            found = measure(stacks, arguments.rounds, arguments.conversations)
    except CoppiceError as error:
        note(error.line())
        return 1
    loads = {load: compared(of_load[ONE], of_load[TWO]) for load, of_load in found.items()}
    sizes = {"rounds": arguments.rounds, "num_conversations": arguments.conversations}
    print_report({"bench": "several_planners", **loads, **sizes, **describe_run()}, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
