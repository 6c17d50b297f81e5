"""Audits of the running core: a slice at a time, under the service's lock, with everything else going on in between.

    operator   one after another, with pauses as long as the slices: done soon
    ticker     one slice a tick, every `interval_s`: hardly to be noticed

One audit runs at a time. An operator's takes the place of the ticker's. What an audit finds is logged and stays a
`problem`, which readiness shows, until another audit finds nothing; nothing is ended because of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from coppice_cache.core.base.errors import InvariantBroken
from coppice_cache.core.index import IndexCore
from coppice_cache.core.inspection.audit import Looked

_log = logging.getLogger("coppice.cache")
SLICE_NS = 2_000_000  # steps are taken until so much time is over; the last one may take longer
PAUSE_S = 0.002


class AuditRunning(Exception):
    """Another operator's audit is not over yet."""


class AuditStopped(Exception):
    """The service is stopping."""


class Auditable(Protocol):
    def looking(self) -> AbstractContextManager[IndexCore]:
        """The core, while nobody else has it. What is raised inside leaves it as it is."""
        ...


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Whether all invariants held, otherwise which one broke and the evidence; and what was looked at."""

    holds: bool
    invariant: str
    evidence: str
    blocks: int
    nodes: int
    leases: int
    duration_ms: int
    longest_slice_us: int
    slices: int


class _Run:
    """One audit. An incarnation of the core that is replaced meanwhile makes it start over."""

    def __init__(self, service: Auditable, clock_ns: Callable[[], int]) -> None:
        self._service = service
        self._clock_ns = clock_ns
        self._core: IndexCore | None = None
        self._steps: Iterator[None] = iter(())
        self._longest_ns = self._slices = 0
        self.started_ns = clock_ns()
        self.looked = Looked()

    def slice(self) -> AuditReport | None:
        """None: there is more to be done."""
        with self._service.looking() as core:
            started_ns = self._clock_ns()
            if core is not self._core:
                self._core, self.looked = core, Looked()
                self._steps = core.audit(self.looked)
            found = self._step_until(started_ns + SLICE_NS)
            self._longest_ns = max(self._longest_ns, self._clock_ns() - started_ns)
            self._slices += 1
        return self._report(*found) if found is not None else None

    def _step_until(self, deadline_ns: int) -> tuple[str, str] | None:
        try:
            while self._clock_ns() < deadline_ns:
                next(self._steps)
        except StopIteration:
            return "", ""
        except InvariantBroken as broken:
            return broken.name, str(broken)
        except Exception as error:
            # A state that is broken badly enough makes the audit itself fail; that is a finding, not our end.
            _log.exception("the audit failed")
            return "audit", f"the audit failed in {self.looked.stage}: {error!r}"
        return None

    def _report(self, invariant: str, evidence: str) -> AuditReport:
        return AuditReport(
            holds=not invariant,
            invariant=invariant,
            evidence=evidence,
            blocks=self.looked.blocks,
            nodes=self.looked.nodes,
            leases=self.looked.leases,
            duration_ms=(self._clock_ns() - self.started_ns) // 1_000_000,
            longest_slice_us=self._longest_ns // 1_000,
            slices=self._slices,
        )


class Auditor:
    """`tick` is for the service's ticker, everything else for any thread. An interval of 0 means: only when asked."""

    def __init__(
        self,
        service: Auditable,
        *,
        interval_s: float = 0.0,
        pause_s: float = PAUSE_S,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._service = service
        self._interval_ns = int(interval_s * 1e9)
        self._pause_s = pause_s
        self._clock_ns = clock_ns
        self._turn = threading.Lock()  # whose slice it is
        self._stopping = threading.Event()
        self._asked: _Run | None = None
        self._ticked: _Run | None = None
        self._ended_ns = clock_ns()
        self.last: AuditReport | None = None
        self.num_ended = {True: 0, False: 0}  # by whether all held

    @property
    def problem(self) -> str:
        """What the last audit found; empty when all was well."""
        return "" if self.last is None or self.last.holds else f"an audit found {self.last.evidence}"

    def run(self) -> AuditReport:
        """From beginning to end. Raises AuditRunning, AuditStopped."""
        run = _Run(self._service, self._clock_ns)
        with self._turn:
            if self._asked is not None:
                raise AuditRunning(f"an audit is running already, {self._progress(self._asked)}")
            self._asked, self._ticked = run, None
        try:
            while (report := run.slice()) is None:
                if self._stopping.wait(self._pause_s):
                    raise AuditStopped("the service is stopping")
        finally:
            with self._turn:
                self._asked = None
        self._ended(report)
        return report

    def tick(self) -> None:
        with self._turn:
            if self._asked is not None or not self._interval_ns:
                return
            if self._ticked is None:
                if self._clock_ns() - self._ended_ns < self._interval_ns:
                    return
                self._ticked = _Run(self._service, self._clock_ns)
            report = self._ticked.slice()
            if report is not None:
                self._ticked = None
                self._ended(report)

    def stop(self) -> None:
        self._stopping.set()

    def status(self) -> dict[str, Any]:
        """What is running, and how the last one ended."""
        run = self._asked or self._ticked
        running = None if run is None else {**asdict(run.looked), "for_ms": self._age_ms(run)}
        return {"running": running, "last": asdict(self.last) if self.last is not None else None}

    def _progress(self, run: _Run) -> str:
        return f"for {self._age_ms(run)} ms; {run.looked.nodes} nodes were looked at"

    def _age_ms(self, run: _Run) -> int:
        return (self._clock_ns() - run.started_ns) // 1_000_000

    def _ended(self, report: AuditReport) -> None:
        self.last, self._ended_ns = report, self._clock_ns()
        self.num_ended[report.holds] += 1
        if not report.holds:
            _log.error("audit: %s", report.evidence)
