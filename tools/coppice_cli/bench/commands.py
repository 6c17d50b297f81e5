"""`coppice bench ...`: measurements of the cache service, the scheduler, the worker, and servers under load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from coppice.errors import UsageError
from coppice_cli.bench.serve import serve
from coppice_cli.variables import Command

Number = TypeVar("Number", int, float)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON line and nothing else.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Small sizes and few rounds: shows that it runs, measures little.")
]


def add_to(bench: typer.Typer) -> None:
    """Hang the commands up under `coppice bench`."""
    for command in (index, rpc, churn, trace, serve, split, plan, fleet, kernels, step):
        bench.command(cls=Command)(command)


def index(
    as_json: AsJson = False,
    quick: Quick = False,
    peers: Annotated[
        Path | None,
        typer.Option(help="Folder with the wheels of SGLang, vLLM, Dynamo unpacked; see benchmarks/README.md."),
    ] = None,
) -> None:
    """Measure the core alone: match, acquire, publish, evict; memory per token; pauses; beside its peers."""
    from coppice_bench.index.run import run_index
    from coppice_bench.report import print_report

    print_report(run_index(quick=quick, peers=peers), as_json=as_json)


def rpc(as_json: AsJson = False, quick: Quick = False) -> None:
    """Measure acquire over a session against an echo of the same bytes on the same kind of session."""
    from coppice_bench.report import print_report
    from coppice_bench.rpc.run import run_rpc

    print_report(run_rpc(quick=quick), as_json=as_json)


def churn(
    as_json: AsJson = False,
    quick: Quick = False,
    trace: Annotated[
        Path | None, typer.Option(help="Trace in Mooncake's format, plain or gzip. Default: a made-up one like it.")
    ] = None,
    requests: Annotated[int, typer.Option(help="How many requests of it.")] = 3_000,
    capacity_tokens: Annotated[int, typer.Option(help="Size of the worker's pool.")] = 3_000_000,
) -> None:
    """Measure how much of what is allocated a load of chats uses, by block size, and what happens near exhaustion."""
    from coppice_bench.index.churn import run_churn
    from coppice_bench.report import print_report

    report = run_churn(trace=trace, requests=requests, capacity_tokens=capacity_tokens, quick=quick)
    print_report(report, as_json=as_json)


def trace(
    trace: Annotated[list[Path] | None, typer.Option(help="Trace in Mooncake's format; may be given again.")] = None,
    capacity_blocks: Annotated[str, typer.Option(help="Sizes of the cache, in blocks.")] = "500,2000,5000,10000,20000",
    policy: Annotated[str, typer.Option(help="Of one trace: adaptive, lru, arc, s3fifo or optimum.")] = "adaptive",
    generated: Annotated[bool, typer.Option("--generated", help="Ten generated traces, too.")] = False,
    hints: Annotated[
        str, typer.Option(help="Also with hints which prompts come again, so often right: such as 0.5,0.8,1.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Measure hit rates of eviction policies on traces, beside LRU and the optimum with foresight. Of one trace and one
    size one policy; of several all of them, with the worst case and the mean of each."""
    from coppice_bench.trace.run import print_trace_report, run_trace, run_traces

    sizes = _numbers("--capacity-blocks", capacity_blocks, "500,2000")
    accuracies = _shares("--hints", hints)
    if trace and len(trace) == len(sizes) == 1 and not generated:
        report = run_trace(path=trace[0], capacity_blocks=sizes[0], policy=policy, accuracies=accuracies)
    else:
        report = run_traces(paths=trace or (), capacities=sizes, generated=generated, accuracies=accuracies)
    print_trace_report(report, as_json=as_json)


def split(
    as_json: AsJson = False,
    quick: Quick = False,
    streams: Annotated[int, typer.Option(help="Streams that decode throughout.")] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds of each length of a step, on each stack in turn.")] = 5,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (SVG) to this file.")] = None,
) -> None:
    """Measure what the split into processes costs: the services beside the same cores in one process."""
    from coppice_bench.report import print_report
    from coppice_bench.split.plot import write_split_plot
    from coppice_bench.split.run import run_split

    report = run_split(quick=quick, streams=streams, rounds=rounds)
    print_report(report, as_json=as_json)
    if plot is not None:
        write_split_plot(plot, report)


def plan(as_json: AsJson = False, quick: Quick = False) -> None:
    """Measure the processor time that a step costs the scheduler, by sequences that run."""
    from coppice_bench.plan.run import run_plan
    from coppice_bench.report import print_report

    print_report(run_plan(quick=quick), as_json=as_json)


def fleet(
    as_json: AsJson = False,
    quick: Quick = False,
    workers: Annotated[str, typer.Option(help="Numbers of workers, with commas.")] = "",
    planners: Annotated[str, typer.Option(help="Numbers of schedulers that share the workers, with commas.")] = "1",
) -> None:
    """Measure how many workers and requests schedulers and one cache service carry: real cores in virtual time."""
    from coppice_bench.fleet.run import run_fleet
    from coppice_bench.report import print_report

    sizes, numbers = _numbers("--workers", workers, "8,64"), _numbers("--planners", planners, "1,2,4")
    print_report(run_fleet(quick=quick, sizes=sizes, planners=numbers), as_json=as_json)


def _numbers(flag: str, words: str, such_as: str) -> list[int]:
    return _listed(flag, words, int, lambda number: number >= 1, of="numbers", such_as=such_as)


def _shares(flag: str, words: str) -> list[float]:
    return _listed(flag, words, float, lambda share: 0.5 <= share <= 1, of="shares from 0.5 to 1", such_as="0.5,0.8,1")


def _listed(
    flag: str, words: str, read: Callable[[str], Number], fits: Callable[[Number], bool], *, of: str, such_as: str
) -> list[Number]:
    wrong = UsageError(f"{flag} {words} is no list of {of}", hint=f"such as {such_as}")
    try:
        values = [read(word) for word in words.split(",") if word]
    except ValueError:
        raise wrong from None
    if not all(map(fits, values)):
        raise wrong
    return values


def kernels(
    as_json: AsJson = False,
    quick: Quick = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's own choice.")] = None,
) -> None:
    """Measure the worker's kernels beside the device's copy and matmul rates and beside others, on CUDA or the CPU."""
    from coppice_bench.kernels.run import run_kernels
    from coppice_bench.report import print_report

    print_report(run_kernels(quick=quick, threads=threads), as_json=as_json)


def step(
    as_json: AsJson = False,
    quick: Quick = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of torch; default: torch's own choice.")
    ] = None,
) -> None:
    """Measure whole steps of a worker, beside the floor and beside the same model without blocks."""
    from coppice_bench.report import print_report
    from coppice_bench.step.run import run_step

    print_report(run_step(quick=quick, threads=threads), as_json=as_json)
