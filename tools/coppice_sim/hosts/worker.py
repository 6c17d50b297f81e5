"""A worker as a process: the worker core, the honest executor, and one queue of steps and fences."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from coppice.ids import SchedulerEpoch
from coppice.messages.registration import CopiesDone, CopyOrders, Draining, Fence, FenceAck, Owner, Registered
from coppice.messages.step import StepPlan
from coppice.session.frames import Hello, Reject
from coppice.session.link import Attached, ClientLink, ServerLink, ServerLinks
from coppice.session.versions import SPOKEN, Versions
from coppice_sim.base.environment import Environment
from coppice_sim.base.links import ClientEnd, ServerEnd
from coppice_sim.base.names import CACHE_FOR_WORKERS, LIAR
from coppice_sim.base.process import Process
from coppice_sim.base.timeline import MS
from coppice_sim.hosts.disk_files import DiskFiles
from coppice_sim.hosts.kv_honest import KvHonest
from coppice_sim.hosts.lower_tiers import LowerTiers
from coppice_sim.hosts.monitor import Monitor
from coppice_worker.core.batch.run import prepare_blocks
from coppice_worker.core.batch.step_batch import NO_OUTPUT, UInt64
from coppice_worker.core.batch.steps import Applied, MalformedPlanError, Replayed, SchedulerAccepted, WorkerCoreSettings
from coppice_worker.core.worker import WorkerCore


class WorkerHost(Process):
    """`step_ms` and `copy_ms`: how long a step and a copy take about. `disk_faults`: see `LowerTiers`; `files` are
    those that processes of this name left."""

    def __init__(
        self,
        env: Environment,
        settings: WorkerCoreSettings,
        step_ms: float,
        copy_ms: float,
        disk_faults: float,
        files: DiskFiles,
        monitor: Monitor,
        speaks: Versions = SPOKEN,
    ) -> None:
        super().__init__(settings.worker_id, env.timeline, env.rng, speaks)
        self.env = env
        self._sometimes = env.record.sometimes
        self._step_ms = step_ms
        self._monitor = monitor
        self.core = WorkerCore(settings)
        self.executor = KvHonest(settings.pool, env.vocabulary)
        self.tiers = LowerTiers(self, settings, copy_ms, disk_faults, files)
        self.outstanding: Applied | None = None
        self._began_ns = 0  # when the device began the outstanding plan
        self._attachment = 0  # what was meant for an earlier one is not sent
        self.reported = 0  # the attachment under which the core was last reported
        self._queue: deque[Callable[[], None]] = deque()
        self._links: dict[int, ServerLink[Any]] = {}
        self.schedulers = ServerEnd(self, _Schedulers(self))
        env.network.listen(settings.worker_id, self.schedulers)
        monitor.workers[settings.worker_id] = self.core
        link: ClientLink[Any] = ClientLink(env.rng.randbytes(16), settings.worker_id, speaks=speaks)
        self._cache = ClientEnd(self, env.network, link, CACHE_FOR_WORKERS, self)

    # -- the session to the cache service

    def link_attached(self, attached: Attached) -> None:
        if attached.fresh:
            # In its turn, so that it reports what is true after all earlier steps.
            self._attachment = attachment = self._attachment + 1
            self.enqueue(lambda: self._register(attachment))

    def _register(self, attachment: int) -> None:
        if attachment == self._attachment:
            self.reported = attachment
            self._cache.post(self.core.registration())

    def link_body(self, body: Any) -> None:
        attachment = self._attachment
        if isinstance(body, Registered):
            self.enqueue(lambda: self._registered(body, attachment))
        elif isinstance(body, Owner):
            self.enqueue(lambda: self._owned(body))
        elif isinstance(body, CopyOrders):
            self._order(body, attachment)
        else:
            assert isinstance(body, Fence)
            self.enqueue(lambda: self._fence(body, attachment))

    def _order(self, message: CopyOrders, attachment: int) -> None:
        """Beside the queue: no step is waited for."""
        self.tiers.order(message, attachment)
        if self.rng.random() < self.env.doubled_bodies:
            delay_ns = int(self.rng.expovariate(1.0) * 10 * MS)
            self.after(delay_ns, lambda: self._order_again(message, attachment))

    def _order_again(self, message: CopyOrders, attachment: int) -> None:
        if attachment == self._attachment:
            self.tiers.order(message, attachment)

    def answer_cache(self, message: CopiesDone | FenceAck | Draining, attachment: int) -> None:
        if attachment == self._attachment:
            self._cache.post(message)

    def link_lost(self) -> None:
        pass

    def link_rejected(self, reject: Reject) -> None:
        """The link goes on trying."""

    def drain(self) -> None:
        self.enqueue(lambda: self.answer_cache(self.core.drain(), self._attachment))

    def undrain(self) -> None:
        def register() -> None:
            self.core.is_draining = False
            self._register(self._attachment)

        self.enqueue(register)

    @property
    def is_quiet(self) -> bool:
        """Nothing runs here."""
        return not len(self.core.sequences)

    def _registered(self, message: Registered, attachment: int) -> None:
        if message.worker_epoch != self.core.worker_epoch:
            self.tiers.begin(message)
        if self.core.registered(message):
            self.executor.zero_blocks(np.arange(self.core.settings.pool.num_blocks, dtype=np.int32))
            self._links.clear()
            self._monitor.pool_is_new(self.core.settings.worker_id)
            self.schedulers.replace(ServerLinks(message.worker_epoch, message.worker_epoch))
        self.drop_others()
        if (draining := self.core.said_again()) is not None:
            self._sometimes["drain said again"] += 1
            self.answer_cache(draining, attachment)

    def _owned(self, message: Owner) -> None:
        self.core.owned(message)
        self.drop_others()

    def _fence(self, fence: Fence, attachment: int) -> None:
        self._sometimes["fenced"] += 1
        acknowledgement = self.core.fence(fence)
        self.drop_others()
        if acknowledgement is not None:
            self.answer_cache(acknowledgement, attachment)

    # -- the queue: one thing at a time, in order of arrival

    def enqueue(self, item: Callable[[], None]) -> None:
        self._queue.append(item)
        self._work()

    def _work(self) -> None:
        while self._queue and self.outstanding is None and self.is_alive:
            self._queue.popleft()()
            self.env.record.touched.add(self)

    def plan(self, link: ServerLink[Any], plan: StepPlan, *, again: bool) -> None:
        if link.is_ended:
            return
        epoch = SchedulerEpoch(link.epoch)
        try:
            outcome = self.core.apply(epoch, plan)
        except MalformedPlanError as error:
            self.env.record.fail("malformed plan", str(error))
        if isinstance(outcome, Applied):
            for refusal in outcome.refusals:
                self._sometimes[f"refused: {refusal.code.value}"] += 1
            self._began_ns = self.now_ns
            self._launch(link, outcome, self._salts(outcome))
        elif isinstance(outcome, Replayed):
            self._sometimes["plan replayed"] += 1
            self._answer(link, outcome.result)
        elif not again:
            self.env.record.fail("rule 1", f"{self.name} expects step {outcome.expected} of {epoch}, got {plan.step}")

    def _launch(self, link: ServerLink[Any], applied: Applied, salts: UInt64) -> None:
        self.outstanding = applied
        self._monitor.launched(self.core, self.executor, applied)
        rows = int(applied.rows.num_tokens.sum())
        # The device works on it from now until then; what it writes is there in the end.
        duration_ms = 0.05 if applied.batch is None else self._step_ms * (1 + 0.05 * rows)
        self.after(int(duration_ms * (0.5 + self.rng.random()) * MS) + 1, lambda: self._complete(link, applied, salts))

    def _salts(self, applied: Applied) -> UInt64:
        leases = self.core.sequences.leases
        return np.array(
            [self._monitor.salt_of_lease(lease) for lease in (leases[slot] for slot in applied.rows.slots) if lease],
            dtype=np.uint64,
        )

    def _complete(self, link: ServerLink[Any], applied: Applied, salts: UInt64) -> None:
        output = NO_OUTPUT
        prepare_blocks(self.executor, applied)
        if applied.batch is not None:
            self.executor.row_salts = salts
            output = self.executor.execute(applied.batch)
        if (following := self.core.advance(applied, output)) is not None:
            self._launch(link, following, salts)
            self.env.record.touched.add(self)
            return
        self._sometimes["result of a session that is over"] += link.is_ended
        self._sometimes["several decode steps in a plan"] += applied.num_steps > 1
        duration_us = (self.now_ns - self._began_ns) * 1_000 // MS
        result = self.core.complete(applied, output, duration_us)
        self.outstanding = None
        self._answer(link, result)
        self._work()
        self.env.record.touched.add(self)

    def _answer(self, link: ServerLink[Any], result: Any) -> None:
        if self._links.get(link.epoch) is link:
            self.schedulers.post(link, result)

    # -- sessions of schedulers

    def drop_others(self) -> None:
        planning = self.core.planning
        for epoch, link in list(self._links.items()):
            if epoch != planning:
                del self._links[epoch]
                self.schedulers.end(link)

    def end_earlier(self, epoch: int) -> None:
        """A scheduler that opens a second session under its epoch has given up the first."""
        earlier = self._links.pop(epoch, None)
        if earlier is not None:
            self._sometimes["second session of an epoch"] += 1
            self.schedulers.end(earlier)

    def connected(self, link: ServerLink[Any]) -> None:
        self._links[link.epoch] = link
        self.drop_others()


class _Schedulers:
    def __init__(self, host: WorkerHost) -> None:
        self._host = host

    def session_opening(self, hello: Hello) -> int | Reject:
        host, epoch = self._host, SchedulerEpoch(hello.epoch)
        if (untrusted := host.core.why_not_trust(epoch, hello.voucher)) is not None:
            host.env.record.sometimes[f"scheduler refused: {untrusted.reason.name.lower()}"] += 1
            return Reject(untrusted.reason.reject_code, untrusted.reason.value)
        host.end_earlier(hello.epoch)
        answer = host.core.attach_scheduler(epoch)
        host.env.record.touched.add(host)
        if not isinstance(answer, SchedulerAccepted):
            host.env.record.sometimes[f"scheduler refused: {answer.reason.name.lower()}"] += 1
            return Reject(answer.reason.reject_code, answer.reason.value)
        if hello.name == LIAR:
            host.env.record.fail("rule 1", f"{hello} was believed")
        host.env.record.sometimes["takeover"] += answer.took_over
        return hello.epoch

    def session_connected(self, link: ServerLink[Any], is_new: bool) -> None:
        self._host.connected(link)

    def session_heard(self, link: ServerLink[Any]) -> None:
        pass

    def session_body(self, link: ServerLink[Any], body: Any) -> None:
        host = self._host
        host.enqueue(lambda: host.plan(link, body, again=False))
        if host.rng.random() < host.env.doubled_bodies:
            # A copy that was under way for long: any number of other plans may have come between.
            delay_ns = int(host.rng.expovariate(1.0) * 10 * MS)
            host.after(delay_ns, lambda: host.enqueue(lambda: host.plan(link, body, again=True)))
