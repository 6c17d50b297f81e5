"""Several decode steps in one plan, while nobody waits for the next plan.

A plan costs the way to the worker and back, whatever it computes. Where steps are short, a plan of several saves most
of that. It is only made while nothing could use an earlier plan: nobody waits, prefills, ends or lacks a block. And it
is no longer than `decode_burst_ms`, because whoever comes meanwhile waits for its end.
"""

from __future__ import annotations

from coppice.messages.step import StepResult
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.settings import SchedulerSettings
from coppice_scheduler.core.workers import InFlight, PlanRows, Worker

US_PER_MS = 1_000
WEIGHT = 0.2  # of the newest step in the mean


def note_pace(worker: Worker, step: InFlight, result: StepResult) -> None:
    """How long a decode step of this worker takes."""
    rows = step.rows
    if not result.duration_us or not len(rows) or not (rows.num_tokens == 1).all():
        return
    step_us = result.duration_us / step.plan.num_decode_steps
    worker.decode_step_us += (step_us - worker.decode_step_us) * (WEIGHT if worker.decode_step_us else 1.0)


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
