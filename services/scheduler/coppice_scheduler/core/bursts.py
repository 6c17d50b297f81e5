"""Several decode steps in one plan, while nobody waits for the next plan.

A plan costs the way to the worker and back, whatever it computes. Where steps are short, a plan of several saves most
of that. It is only made while nothing could use an earlier plan: nobody waits, prefills, ends or lacks a block. And it
is no longer than `decode_burst_ms`, because whoever comes meanwhile waits for its end.

Where steps are long it is the other way round: a plan that is sent ahead saves next to nothing, and whoever comes
waits for all of it. Then the next plan leaves with the result of the last one.
"""

from __future__ import annotations

from coppice.messages.step import StepResult
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.settings import SchedulerSettings
from coppice_scheduler.core.workers import InFlight, PlanRows, Worker

US_PER_MS = 1_000
WEIGHT = 0.2  # of the newest step in the mean
LONG_STEP_US = 100_000  # fifty times and more of what a plan takes to the worker and back


def note_pace(worker: Worker, step: InFlight, result: StepResult) -> None:
    """How long a plan of this worker takes, and how long a decode step."""
    rows = step.rows
    if not result.duration_us or not len(rows):
        return
    worker.plan_us = _mean(worker.plan_us, result.duration_us)
    if rows.is_decode:
        worker.decode_step_us = _mean(worker.decode_step_us, result.duration_us / step.plan.num_decode_steps)


def _mean(before: float, newest: float) -> float:
    return before + (newest - before) * (WEIGHT if before else 1.0)


def plans_ahead(worker: Worker, settings: SchedulerSettings) -> int:
    """How many plans may be on their way or at work."""
    return 1 if worker.plan_us >= LONG_STEP_US else settings.max_steps_in_flight


def steps_wanted(worker: Worker, settings: SchedulerSettings) -> int:
    """As many as take `decode_burst_ms`; one as long as nobody knows how long one takes."""
    if settings.max_decode_steps == 1 or not worker.decode_step_us:
        return 1
    fitting = int(settings.decode_burst_ms * US_PER_MS / worker.decode_step_us)
    return max(1, min(settings.max_decode_steps, fitting))


def choose_steps(life: Lifecycle, worker: Worker, rows: PlanRows) -> int:
    """For rows that all decode: cut to what the first of them to end, or to run out of blocks, has left."""
    wanted = steps_wanted(worker, life.settings)
    # A burst in flight uses up what is owned for it; the next needs as much, before an answer can come.
    worker.table.burst_ahead = 2 * wanted if wanted > 1 else 0
    if wanted == 1 or not len(rows) or life.counts.waiting or worker.to_detach:
        return 1
    table, slots = worker.table, rows.slots
    left = table.num_max[slots] - table.num_known[slots] - table.num_pending[slots]
    room = table.num_reserved[slots] - table.num_planned[slots]
    return min(wanted, int(left.min()), int(room.min()))
