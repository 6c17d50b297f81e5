"""A tenant that asks by a script of its own: the same requests at the same times, whoever else is there.

Rounds are far enough apart that each has ended before the next. A round is one prompt, new or one of before with
something after it, or several new ones at once, more than may wait. What each of them is told is written down, and
whether it had to wait for a place; not how long, since the time of a step is shared with others.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from random import Random

import numpy as np

from coppice.ids import DomainId
from coppice.messages.step import SamplingParams
from coppice.request_log.stages import WAITING, StageKind
from coppice_scheduler.core.state.request import Output, Refused, Request
from coppice_sim.base.timeline import MS, Timeline
from coppice_sim.hosts.cluster import Cluster
from coppice_sim.hosts.kv_honest import VOCABULARY, reference, salt_of_domain
from coppice_sim.traffic.observer import Observer
from coppice_sim.traffic.workload import Ask, Workload

ROUND_MS = 500
BURST = 9
BURST_EVERY = 3  # rounds
PROMPT_TOKENS = 12
OUTPUT_TOKENS = 3

_IN_QUEUE = WAITING - {StageKind.ACQUIRE}


class Visitor(Observer):
    """`told`: by request, what became of it."""

    def __init__(self, tenant: str, seed: int) -> None:
        super().__init__(tenant, disguises_others=False)
        self._rng = Random(f"visits of {seed}")
        self._prompts: list[list[int]] = []
        self._num_sent = 0
        self.told: dict[str, tuple[object, ...]] = {}

    def visit(self, timeline: Timeline, cluster: Cluster, workload: Workload, num_rounds: int) -> None:
        for number in range(1, num_rounds + 1):
            timeline.after(number * ROUND_MS * MS, partial(self._send, cluster, workload, self._a_round(number)))

    def _a_round(self, number: int) -> list[list[int]]:
        rng = self._rng
        if number % BURST_EVERY == 0:
            return [self._new() for _ in range(BURST)]
        if self._prompts and rng.random() < 0.7:
            return [[*rng.choice(self._prompts), *self._some(rng.randrange(4))]]
        self._prompts.append(self._new())
        return [self._prompts[-1]]

    def _new(self) -> list[int]:
        return self._some(PROMPT_TOKENS)

    def _some(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(count)]

    def _send(self, cluster: Cluster, workload: Workload, prompts: list[list[int]]) -> None:
        """All of them to each scheduler."""
        for host, tokens in product(list(cluster.schedulers.values()), prompts):
            packed = np.array(tokens, "<u4").tobytes()
            self._num_sent += 1
            request = Request(
                request_id=f"visit {self._num_sent}",
                tenant=self.tenant,
                domain=DomainId(self.tenant),
                tokens=packed,
                sampling=SamplingParams(temperature=0.0, seed=self._num_sent),
                max_new_tokens=OUTPUT_TOKENS,
                arrived_ns=host.now_ns,
                number=len(workload.asks),
                streams=False,
            )
            salt, vocabulary = salt_of_domain(self.tenant), cluster.env.vocabulary
            expected = reference(packed, OUTPUT_TOKENS, seed=self._num_sent, salt=salt, vocabulary=vocabulary)
            self.told[request.request_id] = ("nothing",)
            workload.enter(Ask(request, host, expected, tokens + expected, len(tokens)))

    def hear(self, what: tuple[object, ...]) -> None:
        _, request_id, said, _ = what
        if isinstance(said, Refused):
            self.told[str(request_id)] = (said,)
        elif isinstance(said, Output):
            usage = said.num_prompt_tokens, said.num_cached_tokens, said.num_output_tokens, said.num_written_tokens
            waited = any(stage.kind in _IN_QUEUE and stage.length_ns for stage in said.stages)
            self.told[str(request_id)] = (said.finish, said.error, said.tokens, waited, *usage)
