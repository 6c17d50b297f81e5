"""SIGTERM or kill -9 to one of two workers while it computes streams: they end whole."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coppice_rpc.v1 import worker_pb2, worker_pb2_grpc
from tests.e2e.stack import STOP_S, Stack
from tests.fakes.oracle import Oracle
from tests.fakes.waiting import wait_for

STREAMS_MAX = 10  # more than it takes until each worker has some
NUM_TOKENS = 1900


class Stream(threading.Thread):
    """A client that reads one answer to its end. Every other one is sampled, with a seed."""

    def __init__(self, port: int, number: int) -> None:
        super().__init__(daemon=True)
        self.prompt = [number * 20 + position for position in range(40)]
        self.answer = b""
        self.seed = number if number % 2 else None
        self._port, self._number = port, number
        self.start()

    def again(self) -> Stream:
        return Stream(self._port, self._number)

    def run(self) -> None:
        body = {"model": "tiny", "prompt": self.prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True,
                "temperature": 0.9 if self.seed else 0, "seed": self.seed, "return_token_ids": True}  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        self.answer = connection.getresponse().read()
        connection.close()

    def events(self) -> list[Any]:
        """Without the last one, which says that the stream is whole."""
        self.join(STOP_S)
        lines = [line for line in self.answer.decode().splitlines() if line.startswith("data: ")]
        assert lines[-1:] == ["data: [DONE]"], lines[-1:]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def tokens(self) -> list[int]:
        choices = [event["choices"][0] for event in self.events()]
        assert choices[-1]["finish_reason"] == "length"
        return [token for choice in choices for token in choice["token_ids"] or ()]


@pytest.fixture
def pair(checkpoint: Path, tmp_path: Path) -> Iterator[Stack]:
    with Stack(checkpoint, tmp_path, num_blocks=1024, num_workers=2) as stack:
        stack.restore()  # ready means that one worker is
        yield stack


def sequences(stack: Stack, index: int) -> int:
    with grpc.insecure_channel(f"127.0.0.1:{stack.worker_grpc[index]}") as channel:
        stats = worker_pb2_grpc.WorkerStub(channel).Stats(worker_pb2.WorkerStatsRequest(), timeout=60)
    return int(stats.sequences)


def streams_on_both(pair: Stack) -> list[Stream]:
    streams: list[Stream] = []

    def both_compute() -> bool:
        if len(streams) < STREAMS_MAX:
            streams.append(Stream(pair.port, len(streams)))
        return all(sequences(pair, index) for index in (0, 1))

    wait_for(both_compute, "each worker to compute")
    return streams


def check_whole(streams: list[Stream], oracle: Oracle) -> None:
    """Greedy ones are the oracle's, those with a seed what the same call says undisturbed."""
    for one in streams:
        assert len(one.tokens()) == NUM_TOKENS
        if one.seed is None:
            oracle.check(one.prompt, one.tokens())
    seeded = [one for one in streams if one.seed is not None]
    assert seeded
    for one, undisturbed in zip(seeded, [one.again() for one in seeded], strict=True):
        assert one.tokens() == undisturbed.tokens()


@pytest.mark.wide
@pytest.mark.parametrize("comes_back", [False, True])
def test_streams_go_on_when_their_worker_is_killed(pair: Stack, oracle: Oracle, comes_back: bool) -> None:
    streams = streams_on_both(pair)
    pair.services["worker-1"].kill()
    if comes_back:
        pair.services["worker-1"].start()
    check_whole(streams, oracle)
    assert "lost worker worker-1" in pair.services["scheduler"].log.read_text()
    if comes_back:
        pair.restore()  # it may still be starting
    pair.wait_at_rest()


def test_a_worker_that_gets_sigterm_ends_its_streams_first(pair: Stack, oracle: Oracle) -> None:
    streams = streams_on_both(pair)
    leaving = pair.services["worker-1"]
    leaving.signal(signal.SIGTERM)
    check_whole(streams, oracle)
    assert leaving.process is not None
    assert leaving.process.wait(STOP_S) == 0
    assert "running sequences get 30 s to end" in leaving.log.read_text()
    assert "are cut" not in leaving.log.read_text()
    assert pair.complete([1, 2, 3], 2)["choices"], "the other one serves"
