"""When a worker that is to end has nothing left to wait for. Time is what `pause` was told to wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coppice_worker.edge.draining import AWAY_S, QUIET_S, Running, StopRequests, wait_until_quiet

LONG_S = 60.0
IDLE = Running(0, is_connected=True)
BUSY = Running(2, is_connected=True)
LEFT_ALONE = Running(2, is_connected=False)


class Clock:
    """`script` says what runs from when on."""

    def __init__(self, script: dict[float, Running], gives_up_s: float = LONG_S) -> None:
        self.now_s = 0.0
        self._script = script
        self._gives_up_s = gives_up_s

    def look(self) -> Running:
        return self._script[max(begins_s for begins_s in self._script if begins_s <= self.now_s)]

    def pause(self, seconds: float) -> bool:
        self.now_s += seconds
        return self.now_s >= self._gives_up_s


@pytest.mark.parametrize(
    ("script", "ends_s"),
    [
        pytest.param({0.0: Running(0, is_connected=False)}, 0.0, id="nobody connected, nothing runs"),
        pytest.param({0.0: IDLE}, QUIET_S, id="a grant may be on its way"),
        pytest.param({0.0: BUSY, 5.0: IDLE}, 5.0 + QUIET_S, id="sequences end"),
        pytest.param({0.0: IDLE, 0.3: BUSY, 5.0: IDLE}, 5.0 + QUIET_S, id="a grant was on its way"),
        pytest.param({0.0: BUSY, 5.0: Running(0, is_connected=False)}, 5.0, id="the scheduler left"),
        pytest.param({0.0: BUSY, 5.0: LEFT_ALONE}, 5.0 + AWAY_S, id="the scheduler died"),
        pytest.param({0.0: LEFT_ALONE, 2.0: BUSY, 3.0: LEFT_ALONE, 5.0: BUSY, 9.0: IDLE}, 9.5, id="it came back"),
    ],
)
def test_it_waits_until_nothing_runs(script: dict[float, Running], ends_s: float) -> None:
    clock = Clock(script)
    assert wait_until_quiet(clock.look, clock.pause)
    assert clock.now_s == pytest.approx(ends_s, abs=0.11)


def test_it_gives_up_when_it_is_told_to() -> None:
    clock = Clock({0.0: BUSY}, gives_up_s=7.0)
    assert not wait_until_quiet(clock.look, clock.pause)
    assert clock.now_s == pytest.approx(7.0, abs=0.11)


def ask_twice(requests: StopRequests) -> None:
    requests.ask()
    requests.ask()


@pytest.mark.parametrize(
    ("request_it", "cuts"),
    [(StopRequests.ask, False), (ask_twice, True), (StopRequests.cut, True)],
    ids=["first", "second", "failure"],
)
def test_only_a_second_request_or_a_failure_cuts(request_it: Callable[[StopRequests], None], cuts: bool) -> None:
    requests = StopRequests()
    assert not requests.asked.is_set()
    request_it(requests)
    assert requests.asked.is_set()
    assert requests.cuts_within(0.0) is cuts
