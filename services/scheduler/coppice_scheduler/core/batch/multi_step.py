"""When the next plan leaves, and several decode steps in one plan while nobody waits for the next.

A plan costs the way to the worker and back, whatever it computes. Where steps are short, a plan of several saves most
of that. It is only made while nothing could use an earlier plan: nobody waits, prefills, ends or lacks a block. And it
is no longer than `decode_burst_ms`, because whoever comes meanwhile waits for its end.

A plan leaves before the one that computes has ended, so that the worker never waits for it; but not long before,
because whoever comes after it has left waits for all of it:

    plan n   |======== computes, as long as its like took lately ========|
    plan n+1                                         | leaves |-- lead ->|
"""

from __future__ import annotations

from coppice.messages.step import StepResult
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.state.settings import SchedulerSettings
from coppice_scheduler.core.state.workers import InFlight, PlanRows, Worker

US_PER_MS = 1_000
NS_PER_US = 1_000
WEIGHT = 0.2  # of the newest step in the mean
LEAD_SHARE = 0.25  # of what is in flight: steps are not all as long as their like
LEAD_MIN_NS = 3_000_000  # a plan takes a third of it to the worker
LEAD_MAX_NS = 10_000_000


def note_pace(worker: Worker, step: InFlight, result: StepResult) -> None:
    """How long a decode step of this worker takes, and a token of a step with chunks."""
    rows = step.rows
    if not result.duration_us or not len(rows):
        return
    if rows.is_decode:
        worker.decode_step_us = _mean(worker.decode_step_us, result.duration_us / step.plan.num_decode_steps)
    else:
        worker.chunk_token_us = _mean(worker.chunk_token_us, result.duration_us / int(rows.num_tokens.sum()))


def _mean(before: float, newest: float) -> float:
    return before + (newest - before) * (WEIGHT if before else 1.0)


def plan_due_ns(worker: Worker, settings: SchedulerSettings) -> int | None:
    """When the next plan may leave; None: when a result has come. What is not known to take long holds nothing up."""
    if not worker.in_flight:
        return 0
    if len(worker.in_flight) >= settings.max_steps_in_flight:
        return None
    begun_ns = max(worker.in_flight[0].planned_ns, worker.result_ns)
    length_ns = sum(expected_length_ns(worker, step) for step in worker.in_flight)
    lead_ns = min(max(LEAD_MIN_NS, int(length_ns * LEAD_SHARE)), LEAD_MAX_NS)
    return begun_ns + max(0, length_ns - lead_ns)


def expected_length_ns(worker: Worker, step: InFlight) -> int:
    """How long a step of its size takes, by those before it; 0: none was there yet."""
    if step.rows.is_decode:
        return int(worker.decode_step_us * step.plan.num_decode_steps) * NS_PER_US
    return int(max(worker.decode_step_us, worker.chunk_token_us * int(step.rows.num_tokens.sum()))) * NS_PER_US


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
