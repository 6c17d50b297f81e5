"""Why a request took its time: the stages of its life summed up by cause, the largest first, and in words.

QUEUED POOL_FULL (ASKED_BACK) POOL_FULL ACQUIRE PREFILL DECODE (PREEMPTED) QUEUED ACQUIRE PREFILL DECODE
       '------ one cause: POOL_FULL ---'                       '------ one cause: PREEMPTED -----'
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from coppice.request_log.stages import Preemption, Stage, StageKind

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
WAITING_SHARE = 0.1  # of its life that a request may wait without that being called the cause

_WORK = (StageKind.FRONT_DOOR, StageKind.PREFILL, StageKind.DECODE)
_LOSSES = (StageKind.PREEMPTED, StageKind.RESTARTED)


@dataclass(slots=True)
class Cause:
    """What took `length_ns` of a request's life: waiting of one kind for one blocker, what a loss cost, or work."""

    kind: StageKind
    blocker: str
    amount: int  # of the longest of its stages
    stages: list[Stage] = field(default_factory=list)
    length_ns: int = 0
    longest_ns: int = -1

    def add(self, stage: Stage, *, tells_amount: bool) -> None:
        took_ns = stage.end_ns - stage.start_ns
        self.stages.append(stage)
        self.length_ns += took_ns
        if took_ns > self.longest_ns:
            self.longest_ns = took_ns
            self.amount = stage.amount if tells_amount else self.amount

    @property
    def is_work(self) -> bool:
        return self.kind in _WORK


def causes_of(stages: Iterable[Stage]) -> list[Cause]:
    """The longest first. Each moment has one cause: what follows a loss is the loss's, until the answer goes on."""
    found: dict[tuple[StageKind, str], Cause] = {}
    loss: Stage | None = None
    for stage in stages:
        if stage.kind in _LOSSES:
            loss = stage
        elif stage.kind is StageKind.DECODE:
            loss = None
        of = loss or stage
        blocker = "" if of.kind in _WORK else of.blocker
        cause = found.get((of.kind, blocker))
        if cause is None:
            cause = found[of.kind, blocker] = Cause(of.kind, blocker, of.amount)
        cause.add(stage, tells_amount=loss is None)
    return sorted(found.values(), key=lambda cause: -cause.length_ns)


def main_cause(stages: Iterable[Stage]) -> Cause | None:
    """What it waited for longest, if it waited for much of its life; else the work that took longest. None: no life."""
    causes = [cause for cause in causes_of(stages) if cause.length_ns]
    if not causes:
        return None
    whole_ns = sum(cause.length_ns for cause in causes)
    waits = [cause for cause in causes if not cause.is_work]
    if sum(cause.length_ns for cause in waits) >= WAITING_SHARE * whole_ns:
        return waits[0]
    return causes[0]


def told(stages: Sequence[Stage]) -> list[str]:
    """One sentence for each cause, the longest first, with times since the request came."""
    if not stages:
        return []
    start_ns = stages[0].start_ns
    return [sentence(cause, stages, start_ns) for cause in causes_of(stages) if cause.length_ns]


def sentence(cause: Cause, stages: Sequence[Stage], start_ns: int) -> str:
    """Such as "waited 1.8 s for blocks: search held 412; 100 of search's were asked back at +0.2 s"."""
    text = _words(cause)
    if cause.kind is StageKind.POOL_FULL:
        begun_ns, end_ns = cause.stages[0].start_ns, cause.stages[-1].end_ns
        for stage in stages:
            if stage.kind is StageKind.ASKED_BACK and begun_ns <= stage.start_ns <= end_ns:
                text += f"; {stage.amount} of {stage.blocker}'s were asked back at {_at(stage.start_ns - start_ns)}"
        text += f"; it had them at {_at(end_ns - start_ns)}"
    return text


_PREEMPTIONS = {
    Preemption.POOL.value: "no block was free for those that ran",
    Preemption.DOMAIN.value: "its domain held its maximum of blocks",
    Preemption.GUARANTEE.value: "it held borrowed blocks that a guarantee asked back",
    Preemption.SLOT.value: "its tenant held more running slots than its share",
    Preemption.ALONE.value: "it held blocks twice",
    Preemption.YIELDED.value: "its worker went to another scheduler",
}


def _words(cause: Cause) -> str:
    took, blocker, amount = _length(cause.length_ns), cause.blocker, cause.amount
    match cause.kind:
        case StageKind.QUEUED:
            ahead = f"behind {amount} of its own tenant" if amount else "while others had their turn"
            return f"queued {took} {ahead}"
        case StageKind.NO_SLOT:
            return f"waited {took} for a running slot: {blocker or 'nobody'} held {amount}"
        case StageKind.POOL_FULL:
            return f"waited {took} for blocks: {blocker} held {amount}" if blocker else f"waited {took} for blocks"
        case StageKind.DOMAIN_MAXIMUM:
            return f"waited {took}: its domain {blocker} held its maximum of blocks"
        case StageKind.DOMAIN_UNKNOWN:
            return f"waited {took}: the cache service's tenants file did not have its domain"
        case StageKind.NO_WORKER:
            return f"waited {took}: no worker took requests"
        case StageKind.NO_CACHE:
            return f"waited {took}: the cache service was away"
        case StageKind.ACQUIRE:
            return f"waited {took} for the cache service's answers"
        case StageKind.PREFIX:
            return f"waited {took} while another request computed {amount} tokens that both begin with"
        case StageKind.FORK:
            return f"waited {took} while another answer of its call computed the prompt"
        case StageKind.SLOW_STEP:
            steps, usual = _steps(len(cause.stages)), _length(amount * 1000)
            return f"lost {took} in {steps} of worker {blocker} that should have taken {usual}"
        case StageKind.PREEMPTED:
            return f"lost {took} to a preemption: {_PREEMPTIONS.get(blocker, blocker)}"
        case StageKind.RESTARTED:
            return f"lost {took} to a restart: {blocker}"
        case StageKind.MOVED:
            return f"lost {took} on its way to another planner"
        case StageKind.FRONT_DOOR:
            return f"read, checked and made text for {took}"
        case StageKind.PREFILL:
            return f"computed its prompt for {took}"
        case StageKind.DECODE:
            return f"generated for {took}"
        case _:
            return f"{cause.kind.value} {took}"


def _steps(count: int) -> str:
    return "a step" if count == 1 else f"{count} steps"


def _length(ns: int) -> str:
    if ns >= NS_PER_S:
        return f"{ns / NS_PER_S:.2f} s"
    return f"{ns / NS_PER_MS:.0f} ms" if ns >= 10 * NS_PER_MS else f"{ns / NS_PER_MS:.1f} ms"


def _at(ns: int) -> str:
    return f"+{ns / NS_PER_S:.2f} s"
