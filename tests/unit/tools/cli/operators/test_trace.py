"""`coppice trace`: a record as bars."""

from __future__ import annotations

import json
import re
from typing import Any

from typer.testing import CliRunner

from coppice.request_log.stages import Preemption, StageKind
from coppice_cli.app import app
from coppice_cli.requests.waterfall import CHUNKS_SHOWN, _said, lines_of
from coppice_up.ports import free_addresses
from tests.fakes.tools.pages import pages

RECORD: dict[str, Any] = {
    "id": "job-7",
    "tenant": "search",
    "status": 200,
    "end": "stop",
    "tokens_in": 612,
    "tokens_cached": 100,
    "tokens_out": 40,
    "ttft_ms": 600.0,
    "total_ms": 1000.0,
    "trace": "0af7651916cd43dd8448eb211c80319c",
    "stages": [
        ["front_door", 0.0, 100.0, "", 0],
        ["queued", 100.0, 200.0, "", 3],
        ["pool_full", 200.0, 500.0, "mail", 412],
        ["asked_back", 300.0, 300.0, "mail", 100],
        ["prefill", 500.0, 600.0, "worker-0", 512],
        ["decode", 600.0, 900.0, "worker-0", 0],
        ["front_door", 900.0, 1000.0, "", 0],
    ],
    "chunks": [[500.0, 550.0, 256], [550.0, 600.0, 256]],
}


def test_stages_and_chunks_lie_on_one_line_of_time() -> None:
    lines = lines_of(RECORD, 170)
    bars = [re.search(r"\|(.*)\|", line) for line in lines]
    drawn = [bar[1] for bar in bars if bar is not None]
    assert {len(bar) for bar in drawn} == {100}, "one cell is 10 ms"
    assert [(bar.index(bar.strip()[0]), len(bar.strip()), bar.strip()[0]) for bar in drawn] == [
        (0, 10, "."),
        (10, 10, "."),
        (20, 30, "."),
        (30, 1, "!"),
        (50, 10, "#"),
        (50, 5, "#"),
        (55, 5, "#"),
        (60, 30, "="),
        (90, 10, "."),
    ]
    names = [line[25:].split("|")[0].strip() for line in lines]
    assert names == [
        *("front door", "queued", "pool full", "asked back", "prefill", "chunk of 256", "chunk of 256", "decode"),
        "front door",
    ]
    assert lines[0].endswith("read, checked, tokenised")
    assert lines[-1].endswith("text, and its end to the client")
    assert lines[2].startswith("  +200.0 ms    300.0 ms  pool full ")
    assert lines[2].endswith("mail held 412 blocks")
    assert lines[3].startswith("  +300.0 ms             ")
    assert lines[3].endswith("100 blocks of mail")


def test_chunks_of_two_prefills_are_below_their_own() -> None:
    stages = [["prefill", 0.0, 10.0, "w", 8], ["preempted", 10.0, 10.0, "pool", 0], ["prefill", 20.0, 30.0, "w", 8]]
    lines = lines_of({"total_ms": 30.0, "stages": stages, "chunks": [[0.0, 10.0, 8], [20.0, 30.0, 9]]}, 120)
    assert [line.split("|")[0].split("ms")[-1].strip() for line in lines] == [
        *("prefill", "chunk of 8", "preempted", "prefill", "chunk of 9"),
    ]
    assert "no block was free" in lines[2]


def test_many_chunks_are_cut() -> None:
    chunks = [[float(at), float(at + 1), 4] for at in range(CHUNKS_SHOWN + 5)]
    lines = lines_of({"total_ms": 100.0, "stages": [["prefill", 0.0, 99.0, "w", 9]], "chunks": chunks}, 120)
    assert len([line for line in lines if "chunk of" in line]) == CHUNKS_SHOWN
    assert any("and 5 more chunks" in line for line in lines)


def test_what_has_no_stages_says_why() -> None:
    assert lines_of({"total_ms": 3.0}, 120) == ["no stages: it ended before it was queued, or its planner was lost"]


def test_every_kind_and_every_preemption_can_be_told() -> None:
    for kind in StageKind:
        assert _said(kind.value, "", 0) is not None
    for why in Preemption:
        assert _said("preempted", why.value, 0) != why.value, "in words"
    assert _said("of_a_newer_version", "mail", 7) == "mail 7"
    assert _said("slow_step", "worker-0", 12_000) == "worker-0, should have taken 12.0 ms"


def asked(url: str, *arguments: str) -> tuple[int, str]:
    ended = CliRunner().invoke(app, ["trace", "job-7", "--url", url, *arguments])
    return ended.exit_code, ended.output


def test_the_command_prints_the_record_and_its_trace() -> None:
    with pages({"/requests/job-7": json.dumps({"request": RECORD, "why": []})}) as url:
        code, printed = asked(url)
        assert code == 0
        assert printed.startswith("job-7 of search: 200 stop, 1.00 s, first token after 0.60 s; 612 tokens in (100")
        assert "trace 0af7651916cd43dd8448eb211c80319c\n" in printed
        assert "pool full" in printed
        code, printed = asked(url, "--json")
        assert json.loads(printed) == RECORD


def test_another_service_and_a_silent_one_are_told_apart() -> None:
    with pages({}) as url:
        ended = CliRunner().invoke(app, ["trace", "job-7", "--url", url])
    assert ended.exit_code == 1
    assert "is no scheduler" in str(ended.exception)
    nobody = f"http://{free_addresses(1)[0]}"
    ended = CliRunner().invoke(app, ["trace", "job-7", "--url", nobody])
    assert f"no scheduler answers at {nobody}" in str(ended.exception)
