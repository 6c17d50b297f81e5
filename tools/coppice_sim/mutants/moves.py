"""What may go wrong where a request goes on after its worker; see `registry.py`."""

from __future__ import annotations

from typing import Any

from coppice_scheduler.core import engine
from coppice_scheduler.core.kv_client import attachment
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_sim.mutants.registry import Mutant, Patches
from coppice_sim.nemesis import FaultProfile


def _tokens_drawn_twice() -> Patches:
    """It starts over from its prompt, and sends what comes."""

    def retry(self: Lifecycle, request: Any, error: Any, now_ns: int) -> None:
        original(self, request, error, now_ns)
        if request.sequence is None:
            request.output.clear()
            request.sent_before = request.num_prompt_tokens

    original = Lifecycle.retry
    return [(Lifecycle, "retry", retry)]


def _gone_means_dead() -> Patches:
    """What nobody listens for has ended: its blocks need no fence."""

    def worker_gone(life: Lifecycle, worker: Any, now_ns: int) -> None:
        if worker.attached and not worker.connected:
            attachment._epoch_over(life, worker, now_ns)

    return [(engine, "worker_gone", worker_gone)]


MOVES = (
    Mutant("tokens drawn twice", "I16: what was sent is sent again", _tokens_drawn_twice, FaultProfile.restarts()),
    Mutant("gone means dead", "I9: it computes on behind a partition", _gone_means_dead, FaultProfile.absences()),
)
