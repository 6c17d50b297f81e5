"""`coppice audit isolation` against a fake server: verdicts and exit codes, files, and one line for what is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import Result
from typer.testing import CliRunner

from coppice.errors import EXIT_INTERRUPTED, EXIT_OK, CoppiceError, UnavailableError, UsageError
from coppice_audit.core.judge import Verdict
from coppice_audit.core.plan import plan_trials
from coppice_audit.core.samples import Samples
from coppice_audit.options import KEY_VARIABLES, AuditOptions
from coppice_audit.preflight import Target
from coppice_audit.run import EXIT_INCONCLUSIVE, EXIT_LEAK, conclude, measure
from coppice_cli.app import app
from coppice_up.ports import free_addresses
from tests.fakes.api.openai_server import CONTEXT, MODEL, Say, openai_server, refusal
from tests.fakes.tools.audited import ATTACKER, VICTIM, AuditedServer, Tenants

EXITS = {"isolated": EXIT_OK, "leak": EXIT_LEAK, "inconclusive": EXIT_INCONCLUSIVE}


@pytest.fixture
def server() -> Iterator[Tenants]:
    serving = Tenants()
    with openai_server(serving):
        yield serving


def keys(folder: Path, victim: str = VICTIM, attacker: str = ATTACKER) -> list[str]:
    (folder / "victim").write_text(victim + "\n")
    (folder / "attacker").write_text(attacker)
    return ["--victim-key-file", str(folder / "victim"), "--attacker-key-file", str(folder / "attacker")]


def audit(url: str, *arguments: str) -> Result:
    command = ["audit", "isolation", "--base-url", url, "--samples", "40", "--prompt-tokens", "32"]
    return CliRunner().invoke(app, [*command, *arguments], catch_exceptions=False)


def test_a_cache_for_all_is_a_leak(tmp_path: Path) -> None:
    with openai_server(Tenants(shares=True)) as server:
        done = audit(server.url, *keys(tmp_path), "--json", str(tmp_path / "found.json"))
    assert done.exit_code == EXIT_LEAK
    assert "40 of 40 of the victim's prompts were reported as cached" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("leak: the attacker can tell")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["verdict"] == "leak"


def test_a_cache_for_each_tells_nothing(server: Tenants, tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "found.json"), "--plot", str(tmp_path / "found.svg"), "--seed", "5"]
    done = audit(server.url + "/v1", *keys(tmp_path), *files)
    found = json.loads((tmp_path / "found.json").read_text())
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["answers"]["verdict"] == checks["errors"]["verdict"] == "isolated"
    assert "status" in checks["errors"]["numbers"]["facts"]
    assert checks["positive control"]["numbers"]["reported_cached_share"] == 1.0
    assert done.exit_code == EXITS[found["verdict"]], "the times are those of this machine, and decide"
    assert (found["seed"], found["model"], found["prompt_tokens"]) == (5, MODEL, 32)
    trials = [arm for arm in plan_trials(40, 5) if not arm.is_order]
    assert [sample["arm"] for sample in found["samples"]] == [arm.name.lower() for arm in trials]
    assert {sample["prompt_tokens"] for sample in found["samples"] if "prompt_tokens" in sample} == {32}
    ElementTree.parse(tmp_path / "found.svg")


def test_neither_key_nor_prompt_is_written(server: Tenants, tmp_path: Path) -> None:
    done = audit(server.url, *keys(tmp_path), "--json", str(tmp_path / "j"), "--plot", str(tmp_path / "p"))
    written = done.stdout + done.stderr + (tmp_path / "j").read_text() + (tmp_path / "p").read_text()
    assert not [key for key in (VICTIM, ATTACKER) if key in written]
    assert not [request["prompt"] for request in server.asked if request["prompt"][:11] in written]


def test_keys_may_come_by_variable_and_a_mistyped_one_is_refused(
    server: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLES["victim"], VICTIM)
    monkeypatch.setenv(KEY_VARIABLES["attacker"], ATTACKER)
    assert audit(server.url).exit_code in EXITS.values()
    assert {request["key"] for request in server.asked} == {VICTIM, ATTACKER}
    monkeypatch.setenv("COPPICE_AUDIT_ISOLATION_VICTIM_KEYS", "x")
    with pytest.raises(UsageError, match="COPPICE_AUDIT_ISOLATION_VICTIM_KEYS"):
        audit(server.url)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_a_url_that_is_none(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--base-url .* is no address"):
        audit(url, *keys(tmp_path))


def test_nobody_listens(tmp_path: Path) -> None:
    (address,) = free_addresses(1)
    with pytest.raises(UnavailableError, match=f"no answer from http://{address}") as error:
        audit(f"http://{address}", *keys(tmp_path))
    assert "--base-url" in error.value.hint


@pytest.mark.parametrize("tenant", ["victim", "attacker"])
def test_a_key_that_the_server_does_not_know(server: Tenants, tmp_path: Path, tenant: str) -> None:
    with pytest.raises(UsageError, match=f"does not take the {tenant}'s key: The API key is not known") as error:
        audit(server.url, *keys(tmp_path, **{tenant: "another"}))
    assert f"--{tenant}-key-file" in error.value.hint


def test_one_key_for_both(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the same key"):
        audit("http://127.0.0.1:1", *keys(tmp_path, attacker=VICTIM))


def test_no_key_and_files_that_hold_none(tmp_path: Path) -> None:
    given = keys(tmp_path)
    with pytest.raises(UsageError, match="no key of the attacker") as error:
        audit("http://127.0.0.1:1", *given[:2])
    assert "--attacker-key-file FILE, or set COPPICE_AUDIT_ISOLATION_ATTACKER_KEY" in error.value.hint
    for content in ("", "two words", "one\nper line", "schlüssel"):
        with pytest.raises(UsageError, match="holds no key"):
            audit("http://127.0.0.1:1", *keys(tmp_path, victim=content))
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        audit("http://127.0.0.1:1", "--victim-key-file", str(tmp_path / "nowhere"), *given[2:])


def test_a_server_that_does_not_stream(tmp_path: Path) -> None:
    class Whole(Tenants):
        def completion(self, body: dict[str, Any]) -> Say:
            return Say([b'{"choices": [{"text": "so"}]}'], content_type="application/json", framing="length")

    with openai_server(Whole()) as server, pytest.raises(CoppiceError, match="does not stream"):
        audit(server.url, *keys(tmp_path))


@pytest.mark.parametrize(
    ("say", "told"),
    [
        (refusal(404, "nothing here"), "/v1/models answered 404: nothing here"),
        (Say([b"<html>"], content_type="text/html", framing="length"), "is no server of the OpenAI API"),
        (Say([b'{"data": []}'], content_type="application/json", framing="length"), "no model is served to both"),
    ],
)
def test_a_server_of_something_else(say: Say, told: str, tmp_path: Path) -> None:
    class Other(Tenants):
        def answer(self, path: str, key: str, body: dict[str, Any]) -> Say:
            return say

    with openai_server(Other()) as server, pytest.raises(CoppiceError, match=told):
        audit(server.url, *keys(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "another"], f"--model another is not served to both tenants .*there is {MODEL}"),
        (["--prompt-tokens", str(CONTEXT)], f"--prompt-tokens {CONTEXT} does not fit fake"),
        (["--samples", "0"], "--samples 0 must be above 0"),
        (["--prompt-tokens", "-1"], "--prompt-tokens -1 must be above 0"),
        (["--timeout-s", "nan"], "--timeout-s nan must be above 0"),
        (["--json", "nowhere/at/all.json"], "--json nowhere/at/all.json: there is no folder"),
        (["--plot", "nowhere/at/all.svg"], "--plot nowhere/at/all.svg: there is no folder"),
    ],
)
def test_wrong_flags(server: Tenants, tmp_path: Path, arguments: list[str], told: str) -> None:
    with pytest.raises(UsageError) as error:
        audit(server.url, *keys(tmp_path), *arguments)
    assert re.search(told, error.value.line())


def test_ctrl_c_gives_what_there_is(tmp_path: Path) -> None:
    asked = threading.Event()

    class Patient(Tenants):
        def answer(self, path: str, key: str, body: dict[str, Any]) -> Say:
            if len(self.asked) == 60 and not asked.is_set():
                asked.set()
                os.kill(client.pid, signal.SIGINT)
            return super().answer(path, key, body)

    with openai_server(Patient()) as server:
        command = [sys.executable, "-m", "coppice_cli", "audit", "isolation", "--base-url", server.url]
        client = subprocess.Popen(
            [*command, *keys(tmp_path), "--prompt-tokens", "32", "--json", str(tmp_path / "found.json")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        printed, said = client.communicate(timeout=120)
    assert client.returncode == EXIT_INTERRUPTED, said.decode()
    assert b"Traceback" not in said
    assert printed.decode().splitlines()[-1].startswith("inconclusive")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["stopped"] == "interrupted"
    assert 1 <= len(found["samples"]) <= 60


@pytest.mark.parametrize(
    ("verdict", "num_samples", "leaks"),
    [(Verdict.ISOLATED, 2000, ()), (Verdict.LEAK, 400, ("time",)), (Verdict.INCONCLUSIVE, 100, ())],
)
def test_each_verdict_has_its_exit_code(
    verdict: Verdict, num_samples: int, leaks: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = AuditOptions(base_url="http://host", victim_key=VICTIM, attacker_key=ATTACKER, samples=num_samples)
    samples = Samples()
    asyncio.run(measure(AuditedServer(1, *leaks), options, 3, 8, samples))
    code = conclude(options, Target("m", 64, 8), 3, samples, json=tmp_path / "found.json", plot=tmp_path / "found.svg")
    assert code == EXITS[verdict]
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{verdict}: ")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["verdict"] == verdict
    assert len(found["samples"]) == len(samples.measured)
    drawn = ElementTree.parse(tmp_path / "found.svg").getroot()
    texts = [element.text or "" for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    for expected in ("claim: share of answers", "first token within, ms", "victim's", "never sent", "own again"):
        assert expected in texts
    assert f"m: {verdict}, {samples.num_trials} trials" in texts
