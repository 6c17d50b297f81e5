"""`coppice index ingest` over real sockets: both wire shapes, replays, restarts, bad messages; wrong input; Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from coppice.edge.kv_events.payloads import MAX_PAYLOAD_BYTES
from coppice.errors import CoppiceError, UnavailableError, UsageError
from coppice.messages.kv_events import AllBlocksCleared, BlockRemoved, KvEvent
from coppice_cache.edge.api.body_limit import BODY_BYTES_MAX
from coppice_cache.engine_index.http import build_ingest_app
from coppice_cache.engine_index.ingest import FeedSpec, Ingest
from coppice_cache.engine_index.process import IngestOptions, feed_specs, run_ingest
from coppice_cli.app import app
from tests.fakes.cache.kv_engine import FakeEngine, block
from tests.fakes.ports import free_port
from tests.fakes.waiting import wait_for

Keep = Callable[[Any], Any]
START_S = 60


@pytest.fixture
def keep() -> Iterator[Keep]:
    """Takes something that is to be stopped or closed at the end."""
    kept: list[Any] = []

    def take(thing: Any) -> Any:
        kept.append(thing)
        return thing

    yield take
    for thing in reversed(kept):
        (thing.stop if hasattr(thing, "stop") else thing.close)()


class Reader:
    """An ingest that is running, asked over its REST API."""

    def __init__(self, *specs: FeedSpec, topic: str = "") -> None:
        self.ingest = Ingest(specs, topic=topic)
        self.ingest.start()
        self.http = TestClient(build_ingest_app(self.ingest))

    def stop(self) -> None:
        self.ingest.stop()

    def match(self, *ids: int, **fields: Any) -> dict[str, int]:
        answer = self.http.post("/v1/match", json={"tokens": list(ids), **fields})
        assert answer.status_code == 200, answer.text
        return {hit["source"]: hit["matched_tokens"] for hit in answer.json()["matches"]}

    def sources(self) -> list[dict[str, Any]]:
        return list(self.http.get("/v1/sources").json()["sources"])

    def follows(self) -> Reader:
        wait_for(lambda: self.http.get("/readyz").json()["status"] == "ready", "all feeds are connected and trusted")
        return self


def follow(keep: Keep, engine: FakeEngine, *, replay: bool = True) -> Reader:
    spec = FeedSpec("w", engine.endpoint, engine.replay if replay else "")
    reader: Reader = keep(Reader(spec)).follows()
    if not replay:  # a subscription reaches the publisher at some time after the handshake
        warm_up(reader, engine)
    return reader


def warm_up(reader: Reader, engine: FakeEngine) -> None:
    def hears() -> bool:
        engine.say(AllBlocksCleared())
        return bool(reader.sources())

    wait_for(hears, "the first message")


def hears(reader: Reader, engine: FakeEngine, expected: int, *ids: int, say: KvEvent | None = None) -> None:
    def look() -> bool:
        return reader.match(*ids) == {"w": expected}

    if say is not None:
        engine.say(say)
    wait_for(look, f"{expected} tokens of {ids}")


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("tells_topic", [True, False])
@pytest.mark.parametrize("replay", [True, False])
def test_stores_and_removals_of_either_shape(keep: Keep, form: Any, tells_topic: bool, replay: bool) -> None:
    engine = keep(FakeEngine(form=form, tells_topic=tells_topic))
    reader = follow(keep, engine, replay=replay)
    hears(reader, engine, 2, 1, 2, 3, 4, say=block(1, None, 1, 2))
    hears(reader, engine, 4, 1, 2, 3, 4, say=block(-7, 1, 3, 4))
    hears(reader, engine, 2, 1, 2, 3, 4, say=BlockRemoved((-7,), "GPU"))
    hears(reader, engine, 0, 1, 2, 3, 4, say=AllBlocksCleared())


def test_what_was_cached_before_we_came_is_asked_for(keep: Keep) -> None:
    engine = keep(FakeEngine(tells_topic=False))
    engine.say(block(1, None, 1, 2), block(2, 1, 3, 4))
    reader = follow(keep, engine)
    assert reader.match(1, 2, 3, 4) == {"w": 4}
    assert engine.num_replays >= 1


def test_a_gap_is_filled_by_a_replay(keep: Keep) -> None:
    engine = keep(FakeEngine())
    reader = follow(keep, engine)
    hears(reader, engine, 2, 1, 2, say=block(1, None, 1, 2))
    engine.lose(BlockRemoved((1,), "GPU"), block(5, None, 5, 6))
    engine.say(block(6, 5, 7, 8))
    wait_for(lambda: reader.match(5, 6, 7, 8) == {"w": 4}, "the lost block and its child")
    assert reader.match(1, 2) == {"w": 0}


def test_a_gap_without_a_replay_costs_the_state(keep: Keep) -> None:
    engine = keep(FakeEngine())
    reader = follow(keep, engine, replay=False)
    hears(reader, engine, 2, 1, 2, say=block(1, None, 1, 2))
    engine.lose(BlockRemoved((1,), "GPU"))
    engine.say(block(3, None, 3, 4))
    wait_for(lambda: reader.match(3, 4) == {"w": 2}, "the block after the gap")
    assert reader.match(1, 2) == {"w": 0}
    assert reader.sources()[0]["counts"]["gaps"] >= 1


@pytest.mark.parametrize("replay", [True, False])
def test_an_engine_that_restarts_in_place_loses_its_old_blocks(keep: Keep, replay: bool) -> None:
    engine = FakeEngine(ports=(free_port(), free_port()))  # nobody else gets them in between
    reader = follow(keep, engine, replay=replay)
    hears(reader, engine, 2, 1, 2, say=block(1, None, 1, 2))
    number = reader.sources()[0]["next_sequence"]
    engine.close()
    wait_for(lambda: reader.match(1, 2) in ({}, {"w": 0}), "nothing is answered for an engine that is gone")
    successor = keep(FakeEngine(ports=engine.ports))
    for _ in range(number):  # it stands where its predecessor stood before anybody hears it
        successor.lose(AllBlocksCleared())

    def says() -> bool:
        successor.say(block(3, None, 3, 4))
        return reader.match(3, 4) == {"w": 2}

    wait_for(says, "the successor's block")
    assert reader.match(1, 2) == {"w": 0}


def test_a_message_that_cannot_be_read_kills_nothing(keep: Keep, caplog: pytest.LogCaptureFixture) -> None:
    engine = keep(FakeEngine())
    reader = follow(keep, engine)
    hears(reader, engine, 2, 1, 2, say=block(1, None, 1, 2))
    engine.say_raw(b"\xc1 no msgpack")
    engine.say_raw(bytes(MAX_PAYLOAD_BYTES + 1))
    wait_for(lambda: reader.sources()[0]["counts"]["unreadable"] >= 2, "both are counted")
    hears(reader, engine, 2, 3, 4, say=block(3, None, 3, 4))
    assert reader.match(1, 2) == {"w": 0}, "what they said may have been its removal"
    said = [record.message for record in caplog.records if "cannot be read" in record.message]
    assert len(said) == 1
    assert "message 1 cannot be read" in said[0]
    assert reader.http.get("/healthz").status_code == 200


def test_topics_name_sources_and_are_chosen_from(keep: Keep) -> None:
    engines = [keep(FakeEngine(f"kv@pod-{n}@llama")) for n in (1, 2)] + [keep(FakeEngine("load"))]
    specs = [FeedSpec(str(index), engine.endpoint, engine.replay) for index, engine in enumerate(engines)]
    reader: Reader = keep(Reader(*specs, topic="kv@"))
    reader.follows()
    for name, engine in enumerate(engines):
        engine.say(block(name, None, name, name))

    def named() -> set[tuple[str, str]]:
        return {(source["source"], source["model"]) for source in reader.sources()}

    wait_for(lambda: named() == {("pod-1", "llama"), ("pod-2", "llama"), ("2", "")}, "two pods and a silent feed")
    wait_for(lambda: reader.match(1, 1) == {"pod-2": 2, "pod-1": 0}, "pod-2 has the block")
    assert reader.match(1, 1, sources=["pod-1"]) == {"pod-1": 0}


def test_an_adapter_and_a_salt_of_one_name_do_not_meet(keep: Keep) -> None:
    engine = keep(FakeEngine())
    reader = follow(keep, engine)
    engine.say(block(1, None, 1, 2, lora_name="X", extra_keys=(("X",),)))
    wait_for(lambda: reader.match(1, 2, lora_name="X") == {"w": 2}, "the adapter's block")
    assert reader.match(1, 2, cache_salt="X") == {"w": 0}
    assert reader.match(1, 2) == {"w": 0}


WRONG_BODIES: dict[str, tuple[Any, int, str]] = {
    "no JSON": (b"{", 400, "no JSON"),
    "nested without an end": (b"[" * 100_000, 400, "no JSON"),
    "no object": (b"[1]", 400, "must be an object"),
    "no tokens": (b"{}", 400, "tokens: missing"),
    "tokens that are text": (b'{"tokens": "1"}', 400, "tokens: must be of type list"),
    "a token below zero": (b'{"tokens": [-1]}', 400, "unsigned 32-bit"),
    "a token that is text": (b'{"tokens": ["a"]}', 400, "unsigned 32-bit"),
    "a token that is true": (b'{"tokens": [true]}', 400, "unsigned 32-bit"),
    "a field that is none": (b'{"tokens": [], "lora": "X"}', 400, "lora: unknown; known are tokens"),
    "a source that is none": (b'{"tokens": [], "sources": ["y"]}', 400, "'y' is unknown"),
    "a source of another type": (b'{"tokens": [], "sources": [[]]}', 400, "is unknown"),
    "too long": (b" " * (BODY_BYTES_MAX + 1), 413, "more than"),
}


@pytest.mark.parametrize(("body", "status", "says"), WRONG_BODIES.values(), ids=WRONG_BODIES)
def test_wrong_questions_are_named(keep: Keep, body: bytes, status: int, says: str) -> None:
    engine = keep(FakeEngine())
    reader = keep(Reader(FeedSpec("w", engine.endpoint)))
    answer = reader.http.post("/v1/match", content=body)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


def test_pages_and_metrics(keep: Keep) -> None:
    engine = keep(FakeEngine("kv@<b>pod</b>@m"))
    reader = follow(keep, engine)
    engine.say(block(1, None, 1, 2))
    wait_for(lambda: reader.sources()[0]["blocks"]["blocks"] == 1, "the block")
    page = reader.http.get("/").text
    assert "&lt;b&gt;pod" in page
    assert "<b>pod" not in page
    metrics = reader.http.get("/metrics").text
    assert 'coppice_ingest_blocks{dp_rank="0",source="<b>pod</b>"} 1.0' in metrics
    assert "coppice_ingest_gaps_total" in metrics
    assert reader.http.get("/nothing").json()["error"]["message"] == "GET /nothing: Not Found"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (IngestOptions([]), "--zmq is missing"),
        (IngestOptions(["tcp://h:1"], replay=["tcp://h:2", "tcp://h:3"]), "--replay is given 2 times"),
        (IngestOptions(["tcp://h:1"], name=["a", "b"]), "--name is given 2 times"),
        (IngestOptions(["tcp://h:1", "tcp://h:1"]), "two feeds are called tcp://h:1"),
        (IngestOptions(["tcp://h:1"], port=70_000), "--port is 70000"),
        (IngestOptions(["nonsense"], host="0.0.0.0", port=0), r"--host 0\.0\.0\.0 can be reached from other machines"),
        (IngestOptions(["nonsense"], host="0.0.0.0", port=0, insecure_network=True), "nonsense"),
        (IngestOptions(["tcp://h:1"], blocks_per_source_max=0), "--blocks is 0"),
        (IngestOptions(["tcp://h:1"], log_level="loud"), "log level 'loud'"),
    ],
)
def test_wrong_options_are_named(options: IngestOptions, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(UsageError, match=says.replace("(", r"\(")):
        run_ingest(options)


def test_the_command_line_takes_a_word_for_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    command = ["index", "ingest", "--zmq=nonsense", "--host=0.0.0.0", "--port=0"]

    def refusal(*flags: str, **environ: str) -> str:
        return str(CliRunner().invoke(app, [*command, *flags], env=environ).exception)

    assert "--host 0.0.0.0 can be reached" in refusal()
    assert "nonsense" in refusal("--insecure-network")
    assert "nonsense" in refusal(COPPICE_INSECURE_NETWORK="1")


def test_feeds_are_paired_in_order() -> None:
    assert feed_specs(IngestOptions(["tcp://a:1", "tcp://b:1"], replay=["-", "tcp://b:2"], name=["x"])) == [
        FeedSpec("x", "tcp://a:1", ""),
        FeedSpec("tcp://b:1", "tcp://b:1", "tcp://b:2"),
    ]


@pytest.mark.parametrize(
    "endpoint", ["nonsense", "tcp://127.0.0.1", "udp://x:1", "tcp://127.0.0.1:99999", "tcp://h:0", ""]
)
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(UsageError, match="is no endpoint"):
        Ingest([FeedSpec("w", endpoint)])
    with pytest.raises(CoppiceError, match="--replay"):
        Ingest([FeedSpec("w", "tcp://127.0.0.1:1", endpoint or "x")])


def test_a_port_to_be_connected_to_that_is_taken() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken, pytest.raises(UnavailableError, match="cannot listen"):
        Ingest([FeedSpec("w", f"tcp://*:{taken.getsockname()[1]}")])


def command(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "coppice_cli", "index", "ingest", *flags],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_interrupted(keep: Keep, number: signal.Signals) -> None:
    engine = keep(FakeEngine())
    process = command("--zmq", engine.endpoint, "--replay", engine.replay, "--port", "0")
    try:
        assert process.stderr is not None
        assert "following 1 feed(s); REST on 127.0.0.1:" in process.stderr.readline()
        process.send_signal(number)
        _, rest = process.communicate(timeout=START_S)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in rest


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--zmq", "nonsense"], 2, "'nonsense' is no endpoint"),
        ([], 2, "--zmq is missing"),
        (["--zmq", "tcp://127.0.0.1:1", "--port", "TAKEN"], 1, "choose another --port"),
    ],
)
def test_the_command_names_what_is_wrong(flags: list[str], code: int, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = [str(taken.getsockname()[1]) if flag == "TAKEN" else flag for flag in flags]
        process = command(*flags)
        _, err = process.communicate(timeout=START_S)
    assert process.returncode == code
    assert says in err
    assert len(err.strip().splitlines()) == 1, json.dumps(err)
