"""A full queue is logged with its numbers, and not once for each refusal."""

from __future__ import annotations

import logging

import pytest

from coppice.ids import DomainId
from coppice.messages.step import SamplingParams
from coppice.telemetry.logs import configure_logging
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.state.request import Refused, RefusedReason, Request
from coppice_scheduler.core.state.settings import SchedulerSettings
from coppice_scheduler.edge.planner.refusals import EVERY_NS, RefusalLog

FULL = Refused(RefusedReason.QUEUE_FULL, "no room", 100)
REQUEST = Request("cmpl-job-7-0", "a", DomainId("d"), b"1234", SamplingParams(), 1)


def test_a_full_queue_is_one_line_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    log, stats = RefusalLog(), SchedulerCore(SchedulerSettings(instance=b"instance")).stats()
    with caplog.at_level(logging.WARNING):
        log.refused(REQUEST, Refused(RefusedReason.TENANT_RATE, "slower", 100), stats, 0)
        assert not caplog.records
        for now_ns in (0, 1, EVERY_NS - 1, EVERY_NS):
            log.refused(REQUEST, FULL, stats, now_ns)
    first, second = [record.getMessage() for record in caplog.records]
    assert "tenant a: 0 requests with 0 tokens wait" in first
    assert "1 refused since" in first
    assert "3 refused since" in second


def test_the_line_says_which_request_was_refused(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning")
    RefusalLog().refused(REQUEST, FULL, SchedulerCore(SchedulerSettings(instance=b"instance")).stats(), 0)
    logging.getLogger("coppice.scheduler").warning("of no request")
    refused, other = capfd.readouterr().err.splitlines()
    assert "coppice.scheduler: [request cmpl-job-7-0] the queue is full for tenant a" in refused
    assert other.endswith("coppice.scheduler: of no request")
