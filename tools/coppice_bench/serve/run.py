"""`coppice bench serve`: look at the server, run the load, say what came of it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coppice.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK
from coppice_bench.report import describe_run, note, print_report
from coppice_bench.serve.fleet import Gathered, run_part
from coppice_bench.serve.load.client import Part
from coppice_bench.serve.load.rates import check_fits
from coppice_bench.serve.load.records import Record
from coppice_bench.serve.options import ServeOptions
from coppice_bench.serve.plot import write_plot
from coppice_bench.serve.preflight import look
from coppice_bench.serve.report import percentiles, summary

_PROGRESS_S = 5.0
_SALT_BITS = 62


def run_serve(options: ServeOptions, *, as_json: bool, plot: Path | None = None) -> int:
    """Measure, print, return the exit code: 1 when no request succeeded, 130 after Ctrl-C with what there was."""
    options.check()
    model = look(options)
    check_fits(options, model.context)
    salt = options.seed if options.same_prompts else secrets.randbits(_SALT_BITS)
    part = Part(options, model, salt)
    measured = _Measured(part)
    code = EXIT_OK
    try:
        measured.run()
    except KeyboardInterrupt:
        note("interrupted; this is what there is")
        code = EXIT_INTERRUPTED
    report = measured.report(interrupted=code != EXIT_OK)
    print_report(report, as_json=as_json)
    if plot is not None:
        write_plot(plot, measured.behind.records, options, measured.behind.start_s, report)
    return code or (EXIT_OK if report["requests"] else EXIT_FAILURE)


class _Measured:
    """The load, and before a flood the others alone."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._has_flood = any(sender.floods for sender in part.options.senders)
        self.alone = Gathered()
        self.behind = Gathered()

    def run(self) -> None:
        if self._has_flood:
            note("alone, without the flood")
            alone = Part(self._part.options, self._part.model, self._part.salt + 1, floods=False)
            run_part(alone, self.alone, _Progress(self._part.options))
            note("behind the flood")
        run_part(self._part, self.behind, _Progress(self._part.options))

    def report(self, *, interrupted: bool) -> dict[str, Any]:
        options, gathered = self._part.options, self.behind
        found = summary(gathered.records, options, gathered.start_s)
        report: dict[str, Any] = {
            "bench": "serve",
            "url": options.url,
            "model": self._part.model.name,
            **({"interrupted": True} if interrupted else {}),
            **found,
            **_client_cost(gathered, found["duration_s"]),
            **({"clipped": gathered.num_clipped} if gathered.num_clipped else {}),
        }
        if self._has_flood and self.alone.records:
            report["alone"] = self._alone(found)
        return {**report, "options": options.described(), **describe_run()}

    def _alone(self, behind: dict[str, Any]) -> dict[str, Any]:
        """Of each tenant that does not flood: times without the flood, and how many times longer with it."""
        found = summary(self.alone.records, self._part.options, self.alone.start_s)
        names = [sender.name for sender in self._part.options.senders if not sender.floods]
        return {name: _beside(found["by_tenant"][name], behind["by_tenant"][name]) for name in names}


def _beside(alone: dict[str, Any], behind: dict[str, Any]) -> dict[str, Any]:
    times = {key: alone[key] for key in ("requests", "output_tok_s", "ttft_ms", "tpot_ms", "e2e_ms")}
    before, after = alone["ttft_ms"].get("p99"), behind["ttft_ms"].get("p99")
    return {**times, "ttft_p99_slowdown": after / before} if before and after else times


def _client_cost(gathered: Gathered, duration_s: float) -> dict[str, Any]:
    """What measuring cost, and how late an open loop was with its requests."""
    tokens = sum(record.output_tokens for record in gathered.records)
    late = [(record.sent_s - record.due_s) * 1e3 for record in gathered.records if record.sent_s > record.due_s]
    cores = os.cpu_count() or 1
    return {
        "client_cpu_share": gathered.client_cpu_s / (duration_s * cores) if duration_s > 0 else 0.0,
        "client_cpu_us_per_token": gathered.client_cpu_s * 1e6 / tokens if tokens else 0.0,
        **({"client_late_ms": percentiles(late)} if late else {}),
    }


@dataclass(slots=True)
class _Progress:
    """A line to stderr now and then."""

    options: ServeOptions
    done: int = 0
    failed: int = 0
    tokens: int = 0
    _began_s: float = 0.0
    _told_s: float = 0.0
    write: Callable[[str], None] = note

    def __call__(self, record: Record) -> None:
        self.done += record.is_ok
        self.failed += not record.is_ok
        self.tokens += record.output_tokens
        now_s = time.monotonic()
        self._began_s = self._began_s or record.sent_s
        if now_s - (self._told_s or self._began_s) >= _PROGRESS_S:
            self._told_s = now_s
            rate = self.tokens / max(1e-3, now_s - self._began_s)
            failed = f", {self.failed} failed" if self.failed else ""
            self.write(f"{now_s - self._began_s:6.0f} s  {self.done} answered{failed}  {rate:.0f} output tok/s")
