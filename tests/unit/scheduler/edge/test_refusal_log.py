"""A full queue is logged with its numbers, and not once for each refusal."""

from __future__ import annotations

import logging

import pytest

from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.state.request import Refused, RefusedReason
from coppice_scheduler.core.state.settings import SchedulerSettings
from coppice_scheduler.edge.planner.refusals import EVERY_NS, RefusalLog

FULL = Refused(RefusedReason.QUEUE_FULL, "no room", 100)


def test_a_full_queue_is_one_line_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    log, stats = RefusalLog(), SchedulerCore(SchedulerSettings(instance=b"instance")).stats()
    with caplog.at_level(logging.WARNING):
        log.refused("a", Refused(RefusedReason.TENANT_RATE, "slower", 100), stats, 0)
        assert not caplog.records
        for now_ns in (0, 1, EVERY_NS - 1, EVERY_NS):
            log.refused("a", FULL, stats, now_ns)
    first, second = [record.getMessage() for record in caplog.records]
    assert "tenant a: 0 requests with 0 tokens wait" in first
    assert "1 refused since" in first
    assert "3 refused since" in second
