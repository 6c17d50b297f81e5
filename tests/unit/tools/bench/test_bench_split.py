"""`coppice bench split`: a small run says what it must say, and what is compared is what was measured."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from coppice.errors import EXIT_OK, CoppiceError, UsageError
from coppice_bench.split.load import Driver, Load, Measured, Recorder, sleep_until
from coppice_bench.split.run import compare, run_split
from coppice_cli.app import app
from coppice_scheduler.core.state.request import Finish, Output, Request, TokenBatch


@pytest.mark.long  # five processes, twice
def test_split_says_ratio_and_extra_time_of_each_step(tmp_path: Path) -> None:
    plot = tmp_path / "split.svg"
    arguments = ["bench", "split", "--quick", "--json", "--streams", "4", "--plot", str(plot)]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == EXIT_OK
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert report["bench"] == "split"
    for key in ("throughput_ratio", "ttft_extra_ms", "idle_ttft_extra_ms"):
        assert list(report[key]) == list(report["against_one_sync"][key]) == ["10"]
    assert {(case["step_ms"], case["stack"]) for case in report["cases"]} == {
        (10.0, stack) for stack in ("split", "one", "one_sync")
    }
    for case in report["cases"]:
        # A step cannot take less than its sleep, nor can a first token come before a step has ended.
        assert case["took_ms"] >= 0.9 * case["step_ms"]
        assert min(case["ttft_ms"], case["idle_ttft_ms"]) >= case["step_ms"]
    assert {"date", "machine", "versions", "load_average"} <= report.keys()
    assert all(f">{stack}</text>" in plot.read_text("utf-8") for stack in ("split", "one", "one_sync"))


def test_rounds_are_compared_in_pairs() -> None:
    load = Load(10.0, 2, 1.0, 10.0, 1, seed=1)
    one = [Measured(100.0, [12.0], [20.0, 22.0], 0.0), Measured(200.0, [13.0], [24.0], 0.0)]
    split = [Measured(90.0, [13.0], [23.0, 24.0], 0.0), Measured(190.0, [15.0], [28.0], 0.0)]
    found = compare({load: {"one": one, "one_sync": split, "split": split}})
    assert found["throughput_ratio"] == {"10": pytest.approx((0.9 + 0.95) / 2)}
    assert found["ttft_extra_ms"] == {"10": pytest.approx(2.0)}
    assert found["idle_ttft_extra_ms"] == {"10": pytest.approx(1.5)}
    assert found["against_one_sync"]["throughput_ratio"] == {"10": 1.0}
    assert found["against_one_sync"]["ttft_extra_ms"] == {"10": 0.0}


@dataclass
class _Instant:
    """A stack that gives every open request one token whenever it may work."""

    recorder: Recorder
    requests: dict[int, tuple[Request, int]] = field(default_factory=dict)
    failing: bool = False

    def submit(self, request: Request) -> None:
        self.requests[request.number] = (request, 0)

    def cancel(self, request_id: str) -> None:
        del self.requests[int(request_id)]
        self.recorder.told((), (Output(request_id, b"", Finish.CANCELLED),))

    def run_until(self, due_ns: int) -> None:
        sleep_until(due_ns)
        over = []
        for number, (request, count) in self.requests.items():
            self.requests[number] = (request, count + 1)
            if count + 1 == request.max_new_tokens:
                over.append(number)
        numbers = np.array([number for number in self.requests if number not in over], "<u4").tobytes()
        finish = Finish.ERROR if self.failing else Finish.LENGTH
        ends = tuple(Output(str(number), b"\7\0\0\0", finish) for number in over)
        for number in over:
            del self.requests[number]
        self.recorder.told((TokenBatch(numbers, numbers),), ends)


def test_the_driver_counts_steady_tokens_and_times_every_arrival() -> None:
    recorder = Recorder()
    measured = Driver(_Instant(recorder), recorder).run(Load(1.0, 3, 0.05, 400.0, 2, seed=4))
    assert len(measured.idle_ttft_ms) == 2
    assert len(measured.ttft_ms) > 5
    assert all(time >= 0 for time in measured.ttft_ms + measured.idle_ttft_ms)
    # Each time that it may work, once for each arrival and once at the end, brings each steady stream one token.
    assert recorder.steady_tokens % 3 == 0
    assert recorder.steady_tokens >= 3 * len(measured.ttft_ms)
    assert measured.tokens_per_s > 0
    assert recorder.num_open == 0


def test_a_request_that_fails_is_an_error() -> None:
    recorder = Recorder()
    with pytest.raises(CoppiceError, match="failed"):
        Driver(_Instant(recorder, failing=True), recorder).run(Load(1.0, 1, 0.05, 100.0, 1, seed=1))


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(UsageError, match="--streams"):
        run_split(quick=True, streams=0, rounds=1)
    with pytest.raises(UsageError, match="--rounds"):
        run_split(quick=True, streams=8, rounds=0)
