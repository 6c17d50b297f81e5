"""Runs the trials, one after another; only the guesses of a trial of the order are sent at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from coppice_audit.core.plan import NUM_GUESSES, Arm
from coppice_audit.core.samples import Reading, Sample, Samples
from coppice_audit.facts import beside
from coppice_audit.server import Completes

_RETRIES = 3
_RETRY_S_MAX = 30.0
_FAILURES_IN_A_ROW = 8  # after which the server is taken to be gone
_FAULT = {"temperature": -1}  # that every server refuses after it has read the request


class _Failed(Exception):
    """A trial told nothing."""


class Measurement:
    """`samples` fills while `run` runs, and stays as it is when that is cancelled."""

    def __init__(
        self,
        server: Completes,
        victim_key: str,
        attacker_key: str,
        new_prompts: Iterator[str],
        seed: int,
        samples: Samples,
    ) -> None:
        self.samples = samples
        self._server = server
        self._victim_key = victim_key
        self._attacker_key = attacker_key
        self._new_prompts = new_prompts
        self._places = np.random.default_rng((seed, 2))
        self._start_s: float | None = None

    async def run(self, trials: Sequence[Arm], on_trial: Callable[[int], bool]) -> None:
        """`on_trial` hears how many trials are over, and ends the measurement when it returns true."""
        failed_in_a_row = 0
        for number, arm in enumerate(trials, 1):
            try:
                await self._trial(arm)
                failed_in_a_row = 0
            except _Failed as failure:
                self.samples.failures[str(failure)] += 1
                failed_in_a_row += 1
                if failed_in_a_row == _FAILURES_IN_A_ROW:
                    self.samples.stopped = f"the last {failed_in_a_row} trials failed: {failure}"
                    return
            if on_trial(number):
                return

    async def _trial(self, arm: Arm) -> None:
        prompt, other = next(self._new_prompts), next(self._new_prompts)  # before the first is sent, in every arm
        first = await self._complete(self._attacker_key if arm.begins_with_own else self._victim_key, prompt)
        if arm.is_order:
            return await self._order(arm, prompt)
        asked = prompt if arm.repeats else other
        if arm.is_faulty:
            reading = await self._server.complete(self._attacker_key, asked, **_FAULT)
            if not reading.facts:
                raise _Failed(reading.failure)
        else:
            reading = await self._complete(self._attacker_key, asked)
        self._start_s = reading.sent_s if self._start_s is None else self._start_s
        facts = beside(reading.facts, first.facts)
        self.samples.measured.append(Sample(arm, reading.sent_s - self._start_s, reading.ttft_ms, facts))
        return None

    async def _order(self, arm: Arm, prompt: str) -> None:
        guesses = [next(self._new_prompts) for _ in range(NUM_GUESSES)]
        right = int(self._places.integers(NUM_GUESSES))
        guesses[right] = prompt
        readings = await asyncio.gather(*(self._server.complete(self._attacker_key, guess) for guess in guesses))
        for reading in readings:
            if reading.failure:
                raise _Failed(reading.failure)
        self.samples.places[arm].append(sum(reading.first_s < readings[right].first_s for reading in readings))

    async def _complete(self, key: str, prompt: str) -> Reading:
        """Asks again when it is refused for now. Raises _Failed."""
        reading = await self._server.complete(key, prompt)
        for _ in range(_RETRIES):
            if reading.retry_s is None:
                break
            await asyncio.sleep(min(reading.retry_s, _RETRY_S_MAX))
            reading = await self._server.complete(key, prompt)
        if reading.failure:
            raise _Failed(reading.failure)
        return reading
