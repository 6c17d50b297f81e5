"""Sends the jobs of some lanes and keeps a record of each request."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from coppice_bench.serve.load.answer import Answer
from coppice_bench.serve.load.http import HttpClient
from coppice_bench.serve.load.prompts import Bodies, Message
from coppice_bench.serve.load.rates import Job, Lane
from coppice_bench.serve.load.records import Record, record_of
from coppice_bench.serve.options import TenantKey

OnRecord = Callable[[Record], None]
FLOOD_LEAD_S = 0.5  # in which a flood gets all its requests out before the others begin
_REFUSED_PAUSE_S = 1.0  # of a flooder's place, so that a server that refuses is not hammered


class Driver:
    """One client process's part of a load."""

    def __init__(
        self,
        client: HttpClient,
        bodies: Bodies,
        senders: Sequence[TenantKey],
        on_record: OnRecord,
        *,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._bodies = bodies
        self._senders = senders
        self._on_record = on_record
        self._timeout_s = timeout_s
        self._start_s = 0.0

    def prepare(self, lane: Lane) -> Iterator[tuple[Job, bytes]]:
        """Requests are written before the clock starts; of a flood, which has no end, the first ones."""
        written = ((job, self._request(job)) for job in lane.jobs)
        if lane.is_flood:
            return itertools.chain(list(itertools.islice(written, lane.concurrency)), written)
        return iter(list(written))

    async def run(self, prepared: Sequence[tuple[Lane, Iterator[tuple[Job, bytes]]]]) -> None:
        """Until all lanes but the floods have ended; what a flood has in flight then is let go.

        With a flood the others begin FLOOD_LEAD_S later than it.
        """
        floods = [asyncio.create_task(self._lane(lane, jobs)) for lane, jobs in prepared if lane.is_flood]
        try:
            if floods:
                await asyncio.sleep(FLOOD_LEAD_S)
            self._start_s = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for lane, jobs in prepared:
                    if not lane.is_flood:
                        group.create_task(self._lane(lane, jobs))
        finally:
            for task in floods:
                task.cancel()
            await asyncio.gather(*floods, return_exceptions=True)
            self._client.close()

    def _request(self, job: Job) -> bytes:
        body = self._bodies.single(job.turns[0].run, job.turns[0].max_tokens)
        return self._with_head(job.sender, body)

    def _with_head(self, sender: int, body: bytes) -> bytes:
        return self._client.endpoint.request("POST", self._bodies.path, body, self._senders[sender].api_key)

    async def _lane(self, lane: Lane, jobs: Iterator[tuple[Job, bytes]]) -> None:
        async with asyncio.TaskGroup() as group:
            if lane.concurrency:
                for _ in range(lane.concurrency):
                    group.create_task(self._one_after_another(jobs, _REFUSED_PAUSE_S if lane.is_flood else 0.0))
                return
            for job, request in jobs:
                await asyncio.sleep(max(0.0, self._start_s + job.at_s - time.monotonic()))
                group.create_task(self._job(job, request, self._start_s + job.at_s))

    async def _one_after_another(self, jobs: Iterator[tuple[Job, bytes]], refused_pause_s: float) -> None:
        for job, request in jobs:
            if not await self._job(job, request, 0.0) and refused_pause_s:
                await asyncio.sleep(refused_pause_s)

    async def _job(self, job: Job, request: bytes, due_s: float) -> bool:
        if len(job.turns) == 1:
            return await self._send(job.sender, request, due_s, Answer())
        told: tuple[Message, ...] = ()
        for turn in job.turns:
            told = (*told, Message("user", turn.run.text))
            body = self._bodies.conversation(told, turn.max_tokens)
            answer = Answer(keeps_text=True)
            if not await self._send(job.sender, self._with_head(job.sender, body), due_s, answer):
                return False  # the rest of a conversation has nothing to go on from
            told, due_s = (*told, Message("assistant", answer.text())), 0.0
        return True

    async def _send(self, sender: int, request: bytes, due_s: float, answer: Answer) -> bool:
        sent_s = time.monotonic()
        failure = ""
        try:
            await self._client.send(request, answer, self._timeout_s)
        except TimeoutError:
            failure = f"timeout: not answered within {self._timeout_s:g} s"
        except OSError as error:
            failure = f"unreachable: {error}"
        record = record_of(
            answer, sender=sender, due_s=due_s or sent_s, sent_s=sent_s, now_s=time.monotonic(), failure=failure
        )
        self._on_record(record)
        return record.is_ok
