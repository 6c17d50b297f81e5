"""`coppice bench serve` against a fake server: what is sent, what is counted, what is said when something is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from coppice.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, CoppiceError, UnavailableError, UsageError
from coppice_cli.app import app
from coppice_up.ports import free_addresses
from tests.fakes.api.openai_server import MODEL, OpenAIServer, Say, events_of, openai_server, refusal, usage


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with openai_server(OpenAIServer()) as serving:
        yield serving


def run(server: OpenAIServer, *arguments: str, code: int = EXIT_OK) -> dict[str, Any]:
    command = ["bench", "serve", "--url", server.url, "--json", *arguments]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


SMALL = ("--requests", "6", "--concurrency", "2", "--input-tokens", "40", "--output-tokens", "5")


def test_every_request_is_sent_and_counted(server: OpenAIServer) -> None:
    report = run(server, *SMALL)
    assert (report["bench"], report["model"], report["requests"], report["errors"]) == ("serve", MODEL, 6, {})
    assert (report["input_tokens_mean"], report["output_tokens_mean"], report["cached_share"]) == (40, 5, 0.5)
    seconds = report["duration_s"]
    assert report["input_tok_s"] == pytest.approx(6 * 40 / seconds, rel=0.02)
    assert report["output_tok_s"] == pytest.approx(6 * 5 / seconds, rel=0.02)
    assert report["client_cpu_us_per_token"] > 0
    assert {"date", "machine", "versions", "load_average", "client_cpu_share"} <= report.keys()
    assert all(request["max_tokens"] == 5 and request["ignore_eos"] for request in server.asked)
    assert server.num_connections <= 4, "a look, and a connection for each of two at once, used again"


def test_random_prompts_share_no_beginning_and_those_of_a_prefix_do(server: OpenAIServer) -> None:
    run(server, *SMALL)
    assert len({tuple(request["prompt"][:16]) for request in server.asked}) == 6
    server.asked.clear()
    run(server, *SMALL, "--load", "prefix", "--shared-tokens", "32", "--prefixes", "2")
    assert Counter(tuple(request["prompt"][:32]) for request in server.asked).most_common(2)[1][1] == 3
    assert len({tuple(request["prompt"][32:]) for request in server.asked}) == 6


def test_prompts_are_new_in_each_run_unless_the_same_are_wanted(server: OpenAIServer) -> None:
    def prompts(*more: str) -> set[tuple[int, ...]]:
        server.asked.clear()
        run(server, *SMALL, *more)
        return {tuple(request["prompt"]) for request in server.asked}

    assert not prompts() & prompts()
    assert prompts("--same-prompts") == prompts("--same-prompts")
    assert prompts("--same-prompts") != prompts("--same-prompts", "--seed", "1")


def test_conversations_grow_by_the_servers_answers(server: OpenAIServer) -> None:
    sizes = ("--requests", "2", "--concurrency", "1", "--turns", "3", "--input-tokens", "8", "--output-tokens", "2")
    report = run(server, "--load", "multiturn", "--api", "chat", "--shared-tokens", "20", *sizes)
    assert report["requests"] == 6
    asked = server.asked[2:]  # the first two measure how long a word is
    assert [len(request["messages"]) for request in asked] == [1, 3, 5] * 2
    assert asked[1]["messages"][0] == asked[0]["messages"][0]
    assert asked[1]["messages"][1] == {"role": "assistant", "content": "so so "}
    first, other = asked[0]["messages"][0]["content"].split(), asked[3]["messages"][0]["content"].split()
    assert first[:20] == other[:20]
    assert first[20:] != other[20:]
    assert len(first) == 28
    assert {request["path"] for request in asked} == {"/v1/chat/completions"}


def write_mooncake(path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 700, "output_length": 64, "hash_ids": [1, 2]},
        {"timestamp": 40, "input_length": 1000, "output_length": 32, "hash_ids": [1, 3]},
        {"timestamp": 60, "input_length": 9000, "output_length": 32, "hash_ids": list(range(18))},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_trace_of_mooncake_keeps_lengths_and_shared_blocks(server: OpenAIServer, tmp_path: Path) -> None:
    write_mooncake(tmp_path / "trace.jsonl")
    report = run(server, "--load", "trace", "--trace", str(tmp_path / "trace.jsonl"))
    by_length = {len(request["prompt"]): request["prompt"] for request in server.asked}
    assert set(by_length) == {700, 1000, 4064}, "the last one is cut to the model's context"
    assert by_length[700][:512] == by_length[1000][:512]
    assert by_length[700][512:] != by_length[1000][512:700]
    assert report["clipped"] == 1
    assert report["client_late_ms"]["p99"] >= 0


def test_a_trace_may_be_shrunk(server: OpenAIServer, tmp_path: Path) -> None:
    write_mooncake(tmp_path / "trace.jsonl")
    path = str(tmp_path / "trace.jsonl")
    run(server, "--load", "trace", "--trace", path, "--shrink", "16", "--limit", "2", "--speed", "10")
    prompts = sorted((request["prompt"] for request in server.asked), key=len)
    assert [len(prompt) for prompt in prompts] == [43, 62]
    assert prompts[0][:32] == prompts[1][:32]
    assert sorted(request["max_tokens"] for request in server.asked) == [2, 4]


def test_azures_table_gives_lengths(server: OpenAIServer, tmp_path: Path) -> None:
    path = tmp_path / "code.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n2023-11-16 18:17:04.0319600,31,8\n"
    )
    run(server, "--load", "trace", "--trace", str(path))
    assert {(len(request["prompt"]), request["max_tokens"]) for request in server.asked} == {(48, 10), (31, 8)}
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,many,10\n")
    with pytest.raises(UsageError, match=r"code.csv:2: not a request"):
        run(server, "--load", "trace", "--trace", str(path))


def test_tenants_send_with_their_keys_and_are_told_apart() -> None:
    with openai_server(OpenAIServer(keys=frozenset({"ka", "kb"}))) as server:
        report = run(server, "--load", "tenants", "--tenant", "ann:ka", "--tenant", "ben:kb", *SMALL)
    assert Counter(request["key"] for request in server.asked) == {"ka": 6, "kb": 6}
    assert {name: part["requests"] for name, part in report["by_tenant"].items()} == {"ann": 6, "ben": 6}
    assert 0 < report["jain"] <= 1
    assert "ka" not in json.dumps(report["options"])


def test_a_flood_lasts_as_long_as_the_others_and_they_are_measured_alone_before() -> None:
    with openai_server(OpenAIServer(keys=frozenset({"ka", "kb"}))) as server:
        flags = ("--tenant", "ann:ka", "--tenant", "mob:kb:flood", "--flood", "7", *SMALL)
        report = run(server, "--load", "tenants", *flags)
    keys = [request["key"] for request in server.asked]
    assert keys[:6] == ["ka"] * 6, "alone"
    assert keys[6:13] == ["kb"] * 7, "the flood is there first"
    assert keys.count("ka") == 12
    assert report["alone"]["ann"]["requests"] == report["by_tenant"]["ann"]["requests"] == 6
    assert report["alone"]["ann"]["ttft_p99_slowdown"] > 0
    prompts = {tuple(request["prompt"]) for request in server.asked}
    assert len(prompts) == len(keys), "neither the flood nor the second phase finds its prompts cached"


def test_open_loop_sends_all(server: OpenAIServer) -> None:
    report = run(server, *SMALL, "--rate", "200")
    assert report["requests"] == 6
    assert report["client_late_ms"]["p50"] >= 0


def test_several_processes_send_each_request_once(server: OpenAIServer) -> None:
    report = run(server, *SMALL, "--processes", "2", "--same-prompts")
    assert report["requests"] == 6
    in_two = {tuple(request["prompt"]) for request in server.asked}
    assert len(in_two) == len(server.asked) == 6
    server.asked.clear()
    run(server, *SMALL, "--same-prompts")
    assert {tuple(request["prompt"]) for request in server.asked} == in_two
    assert report["client_cpu_us_per_token"] > 0


STREAM = events_of({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]})
END = events_of(usage(40, 2), "[DONE]")


@pytest.mark.parametrize(
    ("say", "outcome", "words"),
    [
        (refusal(429, "Too many requests wait."), "429", "Too many requests wait."),
        (refusal(500, "The server failed."), "500", "The server failed."),
        (Say([STREAM], is_cut=True), "cut", "in the middle of an answer"),
        (Say([STREAM]), "cut", "without [DONE]"),
        (Say([STREAM, events_of({"error": {"message": "worker gone"}})]), "stream error", "worker gone"),
        (Say([STREAM, events_of("[DONE]")]), "no answer", "no usage"),
        (Say([b"{}"], content_type="application/json"), "no answer", "no event stream"),
    ],
)
def test_what_fails_is_counted_by_kind(server: OpenAIServer, say: Say, outcome: str, words: str) -> None:
    server.answers[3] = say
    report = run(server, *SMALL, "--ttft-ms", "100000", "--tpot-ms", "100000")
    assert report["requests"] == 5
    assert report["errors"][outcome] == 1
    (example,) = report["errors"]["examples"]
    assert words in example
    assert report["goodput"]["share"] == pytest.approx(5 / 6, rel=0.01)
    assert report["output_tokens_mean"] == 5, "of those that were answered whole"


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_bodies_may_be_framed_in_each_way_and_lines_end_in_both(server: OpenAIServer, framing: str) -> None:
    text = (b": keep-alive\n\n" + STREAM + END).replace(b"\n", b"\r\n")
    for number in range(6):
        server.answers[number] = Say([text[start : start + 11] for start in range(0, len(text), 11)], framing=framing)
    report = run(server, *SMALL)
    assert (report["requests"], report["output_tokens_mean"], report["errors"]) == (6, 2, {})


def test_if_nothing_succeeds_the_exit_code_says_so(server: OpenAIServer) -> None:
    for number in range(6):
        server.answers[number] = refusal(503, "Not ready.")
    report = run(server, *SMALL, code=EXIT_FAILURE)
    assert (report["requests"], report["errors"]["503"]) == (0, 6)


def test_a_server_that_is_not_there_a_wrong_key_and_a_wrong_model_are_told() -> None:
    nowhere = OpenAIServer(url=f"http://{free_addresses(1)[0]}")
    with pytest.raises(UnavailableError, match=f"no answer from {nowhere.url}"):
        run(nowhere)
    with openai_server(OpenAIServer(keys=frozenset({"k"}))) as server:
        with pytest.raises(UsageError, match="asks for a key: The API key is not known"):
            run(server)
        with pytest.raises(UsageError, match="does not take the key of --tenant ann"):
            run(server, "--tenant", "ann:wrong")
        with pytest.raises(UsageError, match="--model other is not served there") as raised:
            run(server, "--api-key", "k", "--model", "other")
        assert raised.value.hint == f"it has {MODEL}"


def test_something_else_that_listens_is_told(server: OpenAIServer) -> None:
    server.answer = lambda path, key, body: Say([b"hello"], content_type="text/plain")  # type: ignore[method-assign]
    with pytest.raises(CoppiceError, match="is no server of the OpenAI API"):
        run(server)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--url", "localhost:8000"), "is no address of a server"),
        (("--load", "rain"), "--load rain is not known"),
        (("--load", "trace"), "--trace FILE go together"),
        (("--load", "tenants", "--tenant", "a:k:flood"), "does not flood"),
        (("--tenant", "a:k:flood"), "has no flood"),
        (("--tenant", "a"), "has no name or no key"),
        (("--tenant", "a:k", "--tenant", "a:l"), "given twice"),
        (("--requests", "0"), "--requests 0 must be above 0"),
        (("--rate", "-1"), "must not be negative"),
        (("--load", "prefix", "--shared-tokens", "300"), "leaves nothing"),
        (("--processes", "20"), "--processes 20 is more than 16"),
        (("--api", "chat", "--prompts", "tokens"), "token ids"),
        (("--input-tokens", "5000"), "more than the model's context of 4096"),
    ],
)
def test_what_makes_no_sense_is_refused(server: OpenAIServer, arguments: tuple[str, ...], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        run(server, *arguments)
    assert not server.asked


def test_the_picture_has_a_line_and_a_name_for_each_tenant(server: OpenAIServer, tmp_path: Path) -> None:
    path = tmp_path / "run.svg"
    run(server, "--load", "tenants", "--tenant", "ann:ka", "--tenant", "b<n:kb", *SMALL, "--plot", str(path))
    root = ElementTree.parse(path).getroot()
    named = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert named.count("ann") == named.count("b<n") == 3
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 12
    with pytest.raises(UsageError, match="cannot be written"):
        run(server, *SMALL, "--plot", str(tmp_path / "nowhere" / "run.svg"))


@pytest.mark.parametrize("processes", ["1", "2"])
def test_ctrl_c_prints_what_there_is(server: OpenAIServer, processes: str) -> None:
    """The server leaves the fourth request and all after it without an end."""
    interrupted = threading.Event()

    class Patient(OpenAIServer):
        def answer(self, path: str, key: str, body: dict[str, Any]) -> Say:
            if path.endswith("completions") and len(self.asked) >= 3:
                if not interrupted.is_set():  # twice would mean: at once, without a report
                    interrupted.set()
                    os.kill(client.pid, signal.SIGINT) if processes == "1" else os.killpg(client.pid, signal.SIGINT)
                raise ConnectionError
            return super().answer(path, key, body)

    with openai_server(Patient()) as patient:
        command = [sys.executable, "-m", "coppice_cli", "bench", "serve", "--url", patient.url, "--json", *SMALL]
        client = subprocess.Popen(
            [*command, "--processes", processes], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        printed, said = client.communicate(timeout=60)
    assert client.returncode == EXIT_INTERRUPTED, said.decode()
    report = json.loads(printed)
    assert report["interrupted"]
    assert 1 <= report["requests"] <= 3
    assert b"Traceback" not in said
