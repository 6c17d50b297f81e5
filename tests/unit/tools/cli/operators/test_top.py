"""`coppice top`: what services say, as rows; and what is shown when one says nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from coppice.errors import EXIT_INTERRUPTED, CoppiceError, UnavailableError
from coppice_cli.app import app
from coppice_cli.top.rates import WINDOW_S, frame_of, kept
from coppice_cli.top.samples import CacheNow, Sample, SchedulerNow, TenantNow, cache_of, look, scheduler_of, steps_of
from coppice_up.ports import free_addresses
from tests.fakes.tools.pages import pages

METRICS = """
vllm:prompt_tokens_total{model_name="m",tenant="search"} 700.0
vllm:generation_tokens_total{model_name="m",tenant="search"} 90.0
vllm:num_preemptions_total{model_name="m"} 3.0
coppice_scheduler_reclaims_total{model_name="m"} 5.0
coppice_scheduler_steps_total{model_name="m"} 400.0
coppice_scheduler_tenant_requests{model_name="m",state="running",tenant="search"} 2.0
coppice_scheduler_tenant_requests{model_name="m",state="waiting",tenant="search"} 4.0
coppice_scheduler_tenant_requests{model_name="m",state="running",tenant="mail"} 0.0
"""
RECORDS = [
    {"tenant": "search", "ttft_ms": 10.0, "cause": "pool_full"},
    {"tenant": "search", "ttft_ms": 30.0, "cause": "pool_full"},
    {"tenant": "search", "ttft_ms": 20.0, "cause": "decode"},
    {"tenant": "", "status": 401},
]


def domain(name: str, worker: str = "w", **counts: int) -> dict[str, Any]:
    names = ("leased_blocks", "cached_blocks", "guarantee_blocks", "query_tokens", "hit_tokens", "evicted_blocks")
    return {"domain": name, "worker_id": worker, **dict.fromkeys(names, 0), **counts}


def worker(name: str, *domains: dict[str, Any], **more: Any) -> dict[str, Any]:
    counts = {"free_blocks": 60, "leased_blocks": 10, "cached_blocks": 30, "draining_blocks": 0, "num_blocks": 100}
    return {"worker_id": name, "open": True, "draining": False, "leases": 2, **counts, "domains": domains, **more}


STATS = {
    "workers": [
        worker("w", domain("tenant/search", leased_blocks=10, cached_blocks=20, guarantee_blocks=8, query_tokens=100)),
        worker(
            "v", domain("tenant/search", "v", cached_blocks=5, hit_tokens=40), domain("group/docs", "v"), open=False
        ),
    ]
}


def test_blocks_of_a_domain_are_summed_up_over_workers() -> None:
    now = cache_of(STATS)
    of = now.domains["tenant/search"]
    assert (of.held, of.guarantee, of.query_tokens, of.hit_tokens) == (35, 8, 100, 40)
    assert {name: one.state for name, one in now.workers.items()} == {"w": "open", "v": "recovering"}


def test_a_tenant_has_its_counts_and_what_took_its_newest_requests_longest() -> None:
    now = scheduler_of(METRICS, RECORDS)
    assert now.tenants["search"] == TenantNow(2, 4, 700.0, 90.0, ttft_ms=20.0, cause="pool_full")
    assert now.tenants["mail"] == TenantNow()
    assert set(now.tenants) == {"search", "mail"}, "who is unknown is no tenant"
    assert (now.steps, now.preemptions, now.reclaims) == (400.0, 3.0, 5.0)


def sample(at_s: float, tokens_out: float, query_tokens: int, hit_tokens: int, steps: float = 0.0) -> Sample:
    stats = {"workers": [worker("w", domain("tenant/search", query_tokens=query_tokens, hit_tokens=hit_tokens))]}
    scheduler = SchedulerNow({"search": TenantNow(1, 0, 0.0, tokens_out)}, steps, 0.0, 0.0)
    return Sample(at_s, cache_of(stats), scheduler, {"w": steps})


def test_rates_and_shares_are_of_the_window() -> None:
    frame = frame_of([sample(10.0, 100.0, 1000, 900, 50.0), sample(14.0, 180.0, 1200, 950, 70.0)])
    (row,) = frame.tenants
    assert (row.out_per_s, row.hit_share) == (20.0, 0.25)
    assert row.hit_share_ever == pytest.approx(950 / 1200)
    assert frame.workers is not None
    assert (frame.steps_per_s, frame.workers[0].steps_per_s) == (5.0, 5.0)
    assert frame.window_s == 4.0


def test_one_look_has_no_rates_and_no_share_without_a_look_up() -> None:
    frame = frame_of([sample(10.0, 100.0, 0, 0)])
    (row,) = frame.tenants
    assert (row.out_per_s, row.hit_share, row.hit_share_ever, frame.steps_per_s) == (None,) * 4


def test_a_count_that_began_anew_has_no_rate() -> None:
    frame = frame_of([sample(10.0, 100.0, 1000, 900, 50.0), sample(14.0, 5.0, 10, 0, 1.0)])
    (row,) = frame.tenants
    assert (row.out_per_s, row.hit_share, frame.steps_per_s) == (None, None, None)


def test_samples_older_than_the_window_go() -> None:
    samples = [sample(at_s, 0.0, 0, 0) for at_s in (0.0, 1.0, WINDOW_S, WINDOW_S + 1.0)]
    assert [each.at_s for each in kept(samples)] == [1.0, WINDOW_S, WINDOW_S + 1.0]


def test_share_groups_are_rows_of_their_own_and_the_busiest_come_first() -> None:
    now = Sample(0.0, cache_of(STATS), scheduler_of(METRICS, RECORDS))
    names = [row.name for row in frame_of([now]).tenants]
    assert names == ["search", "group/docs", "mail"]
    group = frame_of([now]).tenants[1]
    assert group.now is None
    assert group.domain is not None


class Silent:
    def stats(self) -> Any:
        raise UnavailableError("no cache service answers", hint="is it running?")

    def requests(self, limit: int, tenant: str) -> Any:
        return {"requests": RECORDS}

    def metrics(self) -> str:
        return METRICS


def test_a_silent_service_is_named_and_the_others_are_shown() -> None:
    found = look(Silent(), Silent(), {"w": Silent()})
    assert found.cache is None
    assert found.scheduler is not None
    assert found.faults == (
        "no cache service answers (is it running?)",
        "what answers at a --worker address is no worker (coppice up prints their metrics)",
    )
    frame = frame_of([found, replace(found, at_s=found.at_s + 1.0)])
    assert frame.workers is None
    assert [row.domain for row in frame.tenants] == [None, None]
    back = frame_of([found, Sample(found.at_s + 1.0, CacheNow({}, {}), None)])
    assert back.workers == ()
    assert not back.tenants


def test_metrics_of_another_kind_are_a_fault() -> None:
    with pytest.raises(CoppiceError, match="cannot be read"):
        steps_of("<html>")


def test_once_prints_a_frame() -> None:
    scheduler = {"/metrics": METRICS, "/requests": json.dumps({"requests": RECORDS})}
    steps = {"/metrics": "coppice_worker_steps_total 7.0\n"}
    with pages({"/v1/stats": json.dumps(STATS)}) as cache, pages(scheduler) as served, pages(steps) as worker_url:
        arguments = ["top", "--once", "--interval", "0.2", "--cache-url", cache, "--scheduler-url", served]
        ended = CliRunner().invoke(app, [*arguments, "--worker", f"w={worker_url}"])
    assert ended.exit_code == 0, ended.output
    lines = ended.output.splitlines()
    (search,) = (line.split() for line in lines if line.startswith("search"))
    assert search == ["search", "2", "4", "0", "0", "-", "40%", "35", "8", "0", "20", "ms", "pool_full"]
    (busy,) = (line.split() for line in lines if line.startswith("w "))
    assert busy[:4] == ["w", "open", "100", "###========............."]
    assert busy[-1] == "0"
    assert "!" not in ended.output


def test_once_says_who_does_not_answer_and_fails() -> None:
    nobody = f"http://{free_addresses(1)[0]}"
    with pages({"/v1/stats": json.dumps(STATS)}) as cache:
        arguments = ["top", "--once", "--interval", "0.2", "--cache-url", cache, "--scheduler-url", nobody]
        ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 1
    assert f"! no scheduler answers at {nobody}" in ended.output
    assert "give it as --scheduler-url" in " ".join(ended.output.split())
    assert "search" in ended.output
    assert "recovering" in ended.output


def test_without_a_terminal_frames_follow_one_another_until_ctrl_c() -> None:
    nobody = f"http://{free_addresses(1)[0]}"
    arguments = ["top", "--interval", "0.2", "--cache-url", nobody, "--scheduler-url", nobody]
    with subprocess.Popen(
        [sys.executable, "-m", "coppice_cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        frames = (line for line in running.stdout if line.startswith("coppice top: "))
        assert next(frames)
        assert next(frames)
        running.send_signal(signal.SIGINT)
        _, complaints = running.communicate(timeout=60)
    assert running.returncode == EXIT_INTERRUPTED
    assert not complaints
