"""`coppice bench serve`: what comes of an answer that arrives at known moments, and of records, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coppice_bench.serve.load.answer import Answer
from coppice_bench.serve.load.records import Record, record_of
from coppice_bench.serve.options import ServeOptions, TenantKey
from coppice_bench.serve.plot import _ticks, panels
from coppice_bench.serve.report import jain, served_tokens, summary
from tests.fakes.api.openai_server import events_of, usage

TENANTS = (TenantKey("ann", "ka"), TenantKey("ben", "kb"))
ROLE = events_of({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
TOKEN = events_of({"choices": [{"delta": {"content": "a"}}]})
FINISH = events_of({"choices": [{"delta": {}, "finish_reason": "length"}]})


def arrive(*pieces: tuple[float, bytes]) -> Answer:
    answer = Answer()
    answer.begin(200, b"text/event-stream; charset=utf-8")
    for now_s, data in pieces:
        answer.payload(data, now_s)
        answer.end_s = now_s
    return answer


def test_the_first_token_is_the_first_text_and_the_last_one_comes_before_usage() -> None:
    end = events_of(usage(8, 3, 4), "[DONE]")
    answer = arrive((1.0, ROLE), (1.5, TOKEN), (2.0, TOKEN[:9]), (2.25, TOKEN[9:]), (2.5, TOKEN), (4.0, end))
    record = record_of(answer, sender=0, due_s=0.75, sent_s=1.0, now_s=9.0)
    assert record.is_ok
    assert record.ttft_ms == pytest.approx(500)
    assert record.tpot_ms == pytest.approx(1000 / 2)
    assert record.e2e_ms == pytest.approx(3000)
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (8, 4, 3)


def test_tokens_without_text_have_a_first_moment_too() -> None:
    answer = arrive((1.0, ROLE), (3.0, FINISH), (4.0, events_of(usage(8, 1), "[DONE]")))
    assert (answer.first_s, answer.last_s) == (1.0, 3.0)


def test_a_failure_below_http_is_kept_with_what_came_before_it() -> None:
    answer = arrive((1.5, TOKEN))
    record = record_of(answer, sender=1, due_s=1.0, sent_s=1.0, now_s=9.0, failure="timeout: not answered within 8 s")
    assert (record.outcome, record.message, record.first_s) == ("timeout", "timeout: not answered within 8 s", 1.5)


def record(sender: int, sent_s: float, ttft_s: float, gap_s: float, outcome: str = "ok") -> Record:
    """Of 11 tokens, `gap_s` apart; ended with the last one."""
    first_s = sent_s + ttft_s
    last_s = first_s + 10 * gap_s
    return Record(sender, outcome, "", sent_s, sent_s, first_s, last_s, last_s, 100, 20, 11)


def test_percentiles_rates_and_goodput_by_hand() -> None:
    records = [record(0, 10.0, ttft_s / 100, 0.1) for ttft_s in range(101)]  # first tokens after 0 to 1 s
    options = ServeOptions(url="", ttft_ms=250)
    found = summary(records, options, start_s=10.0)
    assert found["duration_s"] == pytest.approx(2.0)
    assert found["ttft_ms"] == pytest.approx({"p50": 500, "p90": 900, "p99": 990, "mean": 500})
    assert found["tpot_ms"]["p99"] == pytest.approx(100)
    assert found["e2e_ms"]["p50"] == pytest.approx(1500)
    assert found["requests_s"] == pytest.approx(101 / 2)
    assert found["input_tok_s"] == pytest.approx(10_100 / 2)
    assert found["output_tok_s"] == pytest.approx(1_111 / 2)
    assert found["cached_share"] == pytest.approx(0.2)
    assert found["goodput"]["share"] == pytest.approx(26 / 101)
    assert found["goodput"]["requests_s"] == pytest.approx(13)
    stricter = summary(records, replace(options, tpot_ms=99), start_s=10.0)
    assert stricter["goodput"]["share"] == 0


def test_failed_requests_count_as_errors_and_as_nothing_else() -> None:
    records = [record(0, 0.0, 1.0, 0.1), record(0, 0.0, 9.0, 0.9, "429"), record(1, 0.0, 9.0, 0.9, "cut")]
    found = summary(records, ServeOptions(url="", tenants=TENANTS), start_s=0.0)
    assert found["requests"] == 1
    assert found["ttft_ms"]["p99"] == pytest.approx(1000)
    assert (found["errors"]["429"], found["errors"]["cut"]) == (1, 1)
    assert found["by_tenant"]["ben"]["ttft_ms"] == {}
    assert found["by_tenant"]["ben"]["errors"]["cut"] == 1


def test_what_nobody_answered_makes_an_empty_report() -> None:
    found = summary([], ServeOptions(url="", tenants=TENANTS), start_s=5.0)
    assert (found["requests"], found["duration_s"], found["jain"]) == (0, 0.0, 0.0)


def test_shares_are_counted_while_all_have_work_and_without_what_was_cached() -> None:
    """Ann ends at 2 s; what ben gets after that is no unfairness."""
    both = [record(0, 0.0, 1.0, 0.1), record(1, 0.0, 1.0, 0.1)]
    after = [record(1, 2.0, 1.0, 0.1), record(1, 2.0, 1.0, 0.1)]
    assert served_tokens(both, 2) == [91, 91]
    assert served_tokens([*both, *after], 2) == [91, 91]
    assert served_tokens([*both, record(1, 0.0, 0.5, 0.1)], 2) == [91, 182]


@pytest.mark.parametrize(("shares", "index"), [([5, 5, 5], 1), ([9, 0, 0], 1 / 3), ([1, 3], 16 / 20), ([0, 0], 0)])
def test_jain_by_hand(shares: list[float], index: float) -> None:
    assert jain(shares) == pytest.approx(index)


def test_a_picture_counts_tokens_when_they_came() -> None:
    (*_, rates) = panels([("ann", [record(0, 0.0, 1.0, 0.1), record(0, 0.0, 1.0, 0.1)])], 0.0)
    (series,) = rates.series
    assert list(series.x) == pytest.approx([0.5, 1.5])
    assert list(series.y) == pytest.approx([0, 22]), "all between 1 s and 2 s"


@pytest.mark.parametrize(("largest", "step", "end"), [(0.9, 0.2, 1.0), (10, 2, 10), (11, 5, 15), (0, 1, 1)])
def test_ticks_are_round(largest: float, step: float, end: float) -> None:
    assert _ticks(largest) == pytest.approx((step, end))
