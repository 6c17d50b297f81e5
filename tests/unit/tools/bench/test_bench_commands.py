"""`coppice bench index | plan | rpc | churn`: small runs say what they must say, and wrong input is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coppice.errors import EXIT_OK, UsageError
from coppice_bench.arrivals import TRACE_BLOCK_TOKENS, Arrival, make_arrivals, read_arrivals
from coppice_bench.fleet.run import at_full
from coppice_bench.index.churn import BLOCK_SIZES, run_churn
from coppice_bench.index.churn_world import ChurnWorld
from coppice_bench.index.run import run_index
from coppice_bench.index.shape import BLOCK_SIZE, Shape
from coppice_bench.timing import time_in_turns
from coppice_cli.app import app

REQUEST = {"timestamp": 5, "input_length": 600, "output_length": 9, "hash_ids": [3, 4]}


def run(*arguments: str) -> dict[str, Any]:
    """The one line that the command prints."""
    done = CliRunner().invoke(app, ["bench", *arguments, "--quick", "--json"], catch_exceptions=False)
    assert done.exit_code == EXIT_OK
    (line,) = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    assert found["bench"] == arguments[0]
    assert {"date", "machine", "versions", "load_average"} <= found.keys()
    return found


@pytest.mark.wide
def test_index_says_times_memory_and_pauses() -> None:
    report = run("index")
    for key in ("match_us", "acquire_us", "acquire_cold_us", "publish_us"):
        assert set(report[key]) == {"512", "4096"}
        assert all(time > 0 for time in report[key].values()), key
    assert set(report["evict_us"]) == {"100", "1000"}
    assert all(4 < size < 500 for size in report["bytes_per_token"].values()), "4 bytes are the tokens themselves"
    assert set(report["bytes_per_token"]) == {"sequences", "leaves"}
    assert {"longest", "op", "gc", "tick", "snapshot", "audit"} <= report["pause_ms"].keys()
    assert report["vs"] == {}
    assert "--peers" in report["vs_left_out"]


def test_plan_says_what_a_step_costs_by_sequences() -> None:
    report = run("plan")
    assert set(report["plan_ms"]) == set(report["step_cpu_ms"]) == {"1", "16"}
    assert all(report["step_cpu_ms"][size] > spent > 0 for size, spent in report["plan_ms"].items())
    assert report["steps"] == 20


def test_fleet_says_what_a_cell_costs_its_two_services() -> None:
    fleets = run("fleet", "--workers", "1,3")["fleets"]
    assert set(fleets) == {"1", "3"}
    for size, found in fleets.items():
        loads = {name: found[f"{name}_load"] for name in ("scheduler", "cache")}
        assert found["full_first"] == max(loads, key=lambda name: loads[name])
        assert min(loads.values()) > 0
        assert found["requests_per_s_at_full"] == pytest.approx(found["requests_per_s"] / max(loads.values()), rel=0.05)
        full = int(size) * 64 / 0.02
        assert 0.7 * full < found["tokens_per_s"] <= 1.1 * full, "its workers have what to do"


def test_fleet_of_several_schedulers_shares_workers_and_requests_evenly() -> None:
    report = run("fleet", "--workers", "1,4", "--planners", "1,2")
    assert set(report["fleets"]) == {"1", "4"}
    assert set(report["cells"]["2"]) == {"4"}, "a cell has no fewer workers than schedulers"
    one, two = report["fleets"]["4"], report["cells"]["2"]["4"]
    assert [planner["workers"] for planner in two["planners"]] == [2, 2]
    assert all(0.3 < planner["requests_share"] < 0.7 for planner in two["planners"])
    assert two["scheduler_load"] == max(planner["load"] for planner in two["planners"])
    assert min(one["utilisation"], two["utilisation"]) > 0.9
    assert two["cached_share"] > one["cached_share"] - 0.1 > 0.3
    assert one["match_us_per_request"] == 0 < two["match_us_per_request"] < two["cache_us_per_request"]


def test_where_a_cell_is_full_lies_between_two_sizes() -> None:
    found = {size: {"scheduler_load": size / 40, "cache_load": size / 80} for size in (8, 32, 64)}
    assert at_full(found) == pytest.approx(40)
    assert at_full({8: found[8], 32: found[32]}) is None


def test_fleet_refuses_what_is_no_number() -> None:
    for flag in ("--workers", "--planners"):
        for words in ("8,x", "0"):
            with pytest.raises(UsageError, match=flag):
                run("fleet", flag, words)


def test_index_refuses_a_folder_of_peers_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        run_index(quick=True, peers=tmp_path / "nowhere")


@pytest.mark.wide
def test_rpc_says_the_ratio_of_each_case() -> None:
    report = run("rpc")
    cases = {(case["tokens"], case["cache"]): case for case in report["cases"]}
    assert set(cases) == {(tokens, cache) for tokens in (512, 4_096, 32_768) for cache in ("cold", "warm")}
    for case in cases.values():
        assert case["ratio"] == pytest.approx(case["acquire_us"] / case["echo_us"], rel=0.01)
        assert case["bare_us"] > 0
    assert report["ratio"] == max(case["ratio"] for (tokens, _), case in cases.items() if tokens <= 4_096)
    links = {(row["link"], row["pause_ms"]): row for row in report["links"]}
    assert set(links) == {(link, pause) for link in ("tcp", "tls", "unix", "grpc") for pause in (0, 1, 10, 100)}
    assert all(row["us"] > 0 and row["cpu_us"] > 0 for row in links.values())


def test_churn_says_what_is_in_use_by_block_size() -> None:
    report = run("churn")
    for key in ("slot_use", "slack", "peak_blocks", "match_us", "acquire_us"):
        assert list(report[key]) == [str(size) for size in BLOCK_SIZES]
        assert all(value > 0 for value in report[key].values()), key
    assert all(use <= 1 for use in report["slot_use"].values())
    assert report["slot_use"]["16"] > report["slot_use"]["128"], "bigger blocks leave more of the last one empty"
    for size in BLOCK_SIZES:
        assert report["ended"][str(size)] == report["requests"] + report["forked"][str(size)]
        assert report["exhaustion"][str(size)]["refused_share"] > 0


def test_a_pool_that_is_too_small_preempts_and_still_ends_everything() -> None:
    arrivals = make_arrivals(30, seed=2)
    longest = max(arrival.input_tokens + arrival.output_tokens for arrival in arrivals)
    found = ChurnWorld(longest // BLOCK_SIZE + 2, BLOCK_SIZE, seed=2).run(arrivals)
    assert found["ended"] == len(arrivals) + found["forked"]
    assert found["refused_share"] > 0
    assert found["preempted"] > 0
    assert found["evictions_per_grant"] > 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hash_ids": [3]}, "1 hash_ids for 600 tokens"),
        ({"hash_ids": [3, -1]}, "outside"),
        ({"output_length": 0}, "positive"),
        ({"timestamp": "soon"}, "not a request"),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused_by_line(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(REQUEST) + "\n" + json.dumps(REQUEST | changes) + "\n")
    with pytest.raises(UsageError, match=f"trace.jsonl:2: .*{named}"):
        read_arrivals(path, 10)
    assert len(read_arrivals(path, 1)) == 1


def test_a_trace_may_be_packed_and_must_not_be_empty(tmp_path: Path) -> None:
    packed, empty = tmp_path / "trace.jsonl.gz", tmp_path / "trace.jsonl"
    packed.write_bytes(gzip.compress(json.dumps(REQUEST).encode()))
    empty.write_text("")
    (arrival,) = read_arrivals(packed, 5)
    assert (arrival.input_tokens, arrival.hash_ids) == (600, (3, 4))
    with pytest.raises(UsageError, match="no requests"):
        read_arrivals(empty, 5)
    with pytest.raises(UsageError, match="cannot be read"):
        read_arrivals(tmp_path / "nowhere.jsonl", 5)


def test_churn_refuses_sizes_that_cannot_work() -> None:
    with pytest.raises(UsageError, match="--requests"):
        run_churn(trace=None, requests=0, capacity_tokens=3_000_000, quick=True)
    with pytest.raises(UsageError, match="--capacity-tokens"):
        run_churn(trace=None, requests=5, capacity_tokens=100, quick=True)


def test_prompts_are_equal_as_far_as_their_hash_ids_are() -> None:
    first = Arrival(0, 1_200, 5, (7, 8, 9)).prompt()
    second = Arrival(0, 1_200, 5, (7, 3, 9)).prompt()
    run_bytes = TRACE_BLOCK_TOKENS * 4
    assert len(first) == len(second) == 4_800
    assert first[:run_bytes] == second[:run_bytes]
    assert first[run_bytes : run_bytes + 64] != second[run_bytes : run_bytes + 64]
    lengths = [arrival.input_tokens for arrival in make_arrivals(2_000, seed=1)]
    assert 4_000 < sorted(lengths)[1_000] < 11_000, "about the trace's median"


def test_sequences_share_their_prefixes() -> None:
    shape = Shape(5, num_prefixes=2, prefix_tokens=32, sequence_tokens=64)
    sequences = shape.sequences()
    assert [len(sequence) for sequence in sequences] == [256] * 5
    assert sequences[0][:128] == sequences[2][:128] != sequences[1][:128]
    assert len({sequence[128:] for sequence in sequences}) == 5


def test_contenders_take_turns() -> None:
    heard: list[tuple[str, int]] = []
    contenders = {name: lambda number, name=name: heard.append((name, number)) for name in "ab"}
    times = time_in_turns(contenders, rounds=3, turn=2)
    assert heard == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("a", 2), ("b", 2)]
    assert set(times) == {"a", "b"}
