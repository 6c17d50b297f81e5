"""`coppice bench trace`: what it prints, and how it refuses wrong input."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coppice.errors import EXIT_OK, EXIT_USAGE, UsageError
from coppice_bench.arrivals import make_arrivals
from coppice_bench.trace import generated, run
from coppice_bench.trace.file import read_trace
from coppice_bench.trace.policies import arc, lru, optimum, s3fifo
from coppice_bench.trace.run import POLICY_NAMES, run_trace
from coppice_cli.app import app


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up conversations in the format of the real trace."""
    path = tmp_path_factory.mktemp("trace") / "made.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for arrival in make_arrivals(300, seed=3):
            fields = {
                "timestamp": arrival.at_ms,
                "input_length": arrival.input_tokens,
                "output_length": arrival.output_tokens,
                "hash_ids": arrival.hash_ids,
            }
            file.write(json.dumps(fields) + "\n")
    return path


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_it_prints_rates_and_the_gap(path: Path, policy: str) -> None:
    arguments = ["bench", "trace", "--trace", str(path), "--capacity-blocks", "900", "--policy", policy, "--json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == EXIT_OK
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert {"bench", "date", "machine", "requests", "blocks", "trace"} <= report.keys()
    assert (report["policy"], report["capacity_blocks"], report["block_size"]) == (policy, 900, 512)
    assert 0 < report["lru"] < report["optimum"] < 1
    gap = report["optimum"] - report["lru"]
    assert report["gap_closed"] == pytest.approx((report["hit_rate"] - report["lru"]) / gap, abs=0.002)
    assert ("us_per_block_operation" in report) == (policy in ("adaptive", "lru"))
    assert {"lru": 0.0, "optimum": 1.0}.get(policy, report["gap_closed"]) == report["gap_closed"]


def test_the_policy_is_chosen(path: Path) -> None:
    rates = {policy: run_trace(path=path, capacity_blocks=900, policy=policy)["hit_rate"] for policy in POLICY_NAMES}
    assert len(set(rates.values())) == len(POLICY_NAMES)


def test_without_a_gap_there_is_nothing_to_close(path: Path) -> None:
    assert run_trace(path=path, capacity_blocks=1_000_000, policy="adaptive")["gap_closed"] is None


@pytest.mark.parametrize("policy", [lru, arc, s3fifo, optimum])
def test_block_by_block_what_fits_is_hit_and_nothing_beyond_the_optimum(path: Path, policy: object) -> None:
    assert callable(policy)
    assert policy([(1, 2, 3), (1, 2, 3, 4), (1, 2)], 10) == 5
    assert policy([(1, 2, 3, 4, 5)] * 3, 3) <= 6
    assert policy([(1, 2), (3, 4), (1, 2)], 4) == 2
    assert policy([(1, 2), (1, 3), (4, 2)], 9) == 1, "a block counts only after what stands before it"
    prompts = [request.hash_ids for request in read_trace(path).requests]
    assert 0 < policy(prompts, 500) <= optimum(prompts, 500)


GOOD = '{"timestamp": 1, "input_length": 600, "output_length": 9, "hash_ids": [3, 4]}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        (GOOD.replace("3, 4", "") + "\n", "has no requests"),
        (GOOD + "\n{cut", "trace.jsonl:2: not JSON"),
        (GOOD + '\n{"timestamp": 1}', "trace.jsonl:2: no list of hash_ids"),
        (GOOD + "\n[1, 2]", "trace.jsonl:2: no list of hash_ids"),
        (GOOD.replace("3, 4", '3, "x"'), "trace.jsonl:1: a hash id"),
        (GOOD.replace("3, 4", "3, -4"), "trace.jsonl:1: a hash id"),
        (GOOD.replace('"timestamp": 1', '"timestamp": "noon"'), "trace.jsonl:1: timestamp"),
        (GOOD.replace("600", "-600"), "trace.jsonl:1: timestamp or input_length"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        read_trace(path)
    assert caught.value.exit_code == EXIT_USAGE


def test_a_file_that_is_missing_or_not_gzip_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.jsonl cannot be read"):
        read_trace(tmp_path / "nowhere.jsonl")
    path = tmp_path / "trace.jsonl.gz"
    path.write_text(GOOD)
    with pytest.raises(UsageError, match=r"trace.jsonl.gz cannot be read"):
        read_trace(path)
    whole = gzip.compress(GOOD.encode())
    path.write_bytes(whole[:20] + b"\xff" * 20 + whole[40:])
    with pytest.raises(UsageError, match=r"trace.jsonl.gz cannot be read"):
        read_trace(path)
    path.write_bytes(whole[:-12])
    with pytest.raises(UsageError, match=r"trace.jsonl.gz cannot be read"):
        read_trace(path)


def test_wrong_flags_are_refused(path: Path) -> None:
    with pytest.raises(UsageError, match="--capacity-blocks 0 must be at least 1"):
        run_trace(path=path, capacity_blocks=0, policy="lru")
    with pytest.raises(UsageError, match="--policy 'fifo' is not known"):
        run_trace(path=path, capacity_blocks=5, policy="fifo")


def test_lines_without_lengths_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [1, 2]}\n\n{"hash_ids": [1, 2, 3]}\n')
    trace = read_trace(path)
    assert (len(trace.requests), trace.num_blocks, trace.block_size) == (2, 5, 0)
    assert not any(trace.ends_in_part(request) for request in trace.requests)


def test_several_traces_have_a_worst_case_and_a_mean(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {name: generated.GENERATED[name] for name in ("agents", "twice")}
    monkeypatch.setattr(run, "GENERATED", kinds)
    monkeypatch.setattr(run, "_GENERATED_REQUESTS", 800)
    arguments = ["bench", "trace", "--trace", str(path), "--generated", "--capacity-blocks", "300,900", "--json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == EXIT_OK, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["traces"].keys() == {path.name, "agents", "twice"}
    assert all(sizes.keys() == {"300", "900"} for sizes in report["traces"].values())
    points = {
        f"{name}, {size} blocks": 100 * (rates["adaptive"] - rates["lru"])
        for name, sizes in report["traces"].items()
        for size, rates in sizes.items()
    }
    ours = report["policies"]["adaptive"]
    assert ours["worst"] == pytest.approx(min(points.values()), abs=0.01)
    assert points[ours["worst_at"]] == min(points.values())
    assert ours["mean"] == pytest.approx(sum(points.values()) / len(points), abs=0.01)
    assert (report["policies"]["lru"]["mean"], report["policies"]["optimum"]["gap_closed"]) == (0, 1)


@pytest.mark.parametrize("name", generated.GENERATED)
def test_equal_seeds_give_equal_traces(name: str) -> None:
    make = generated.GENERATED[name]
    first = make(1, 200)
    assert len(first.requests) >= 200
    assert first == make(1, 200) != make(2, 200)


def test_no_trace_at_all_is_refused() -> None:
    with pytest.raises(UsageError) as refused:
        run.run_traces(paths=(), capacities=[5], generated=False)
    assert "--generated" in refused.value.hint


def test_hints_and_kinds_are_told_beside_what_is_not_told(path: Path) -> None:
    arguments = ["bench", "trace", "--trace", str(path), "--capacity-blocks", "900", "--hints", "0.5,1", "--json"]
    report = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)
    assert report["adaptive_hints_1"]["hit_rate"] > report["hit_rate"]
    assert report["adaptive_hints_1"]["gap_closed"] > report["adaptive_hints_0.5"]["gap_closed"]
    both = run.run_traces(paths=[path], capacities=[900], generated=False, accuracies=[1.0])
    assert both["traces"][path.name][900]["adaptive_hints_1"] == report["adaptive_hints_1"]["hit_rate"]
    assert both["policies"]["adaptive_hints_1"]["mean"] > both["policies"]["adaptive"]["mean"]
    with pytest.raises(UsageError, match="ignores them"):
        run_trace(path=path, capacity_blocks=900, policy="lru", accuracies=[0.8])
    refused = CliRunner().invoke(app, ["bench", "trace", "--trace", str(path), "--hints", "80"])
    assert isinstance(refused.exception, UsageError)
