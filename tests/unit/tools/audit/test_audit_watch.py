"""`coppice audit isolation --watch`: metrics follow each audit, and a leak is one only when it is certain."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from coppice.errors import EXIT_OK, UnavailableError, UsageError
from coppice_audit.core.samples import Samples
from coppice_audit.options import KEY_VARIABLES, AuditOptions
from coppice_audit.run import measure
from coppice_audit.watch import AuditMetrics, watch
from coppice_cli.app import app
from coppice_up.ports import free_addresses
from tests.fakes.api.openai_server import openai_server
from tests.fakes.certificates import Authority
from tests.fakes.tools.audited import ATTACKER, VICTIM, AuditedServer, Tenants

SEEN = "coppice_isolation_audit_leak"


def audit_of(*leaks: str) -> Callable[[], Samples]:
    def audited() -> Samples:
        samples = Samples()
        options = AuditOptions(base_url="", victim_key="v", attacker_key="a", samples=160)
        asyncio.run(measure(AuditedServer(2, *leaks), options, 3, 4, samples))
        return samples

    return audited


def gone() -> Samples:
    raise UnavailableError("no answer")


def watched(*audits: Callable[[], Samples]) -> Iterator[dict[str, float]]:
    """What a scrape sees after each."""
    registry = CollectorRegistry()
    scraped: list[dict[str, float]] = []
    waiting = list(audits)

    def pause() -> None:
        found = {f"{one.name} {''.join(one.labels.values())}".strip(): one.value for m in registry.collect()
                 for one in m.samples}  # fmt: skip
        scraped.append(found)
        if not waiting:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(lambda: waiting.pop(0)(), AuditMetrics(registry), pause)
    return iter(scraped)


def outcome(scrape: dict[str, float]) -> list[str]:
    return [name.split()[1] for name, on in scrape.items() if name.startswith("coppice_isolation_audit_outcome") and on]


def test_metrics_follow_the_audits(capsys: pytest.CaptureFixture[str]) -> None:
    quiet, leaking, lost, quiet_again = watched(audit_of(), audit_of("cached_tokens"), gone, audit_of())
    assert (quiet[SEEN], outcome(quiet)) == (0, ["inconclusive"]), "few samples"
    assert (leaking[SEEN], outcome(leaking)) == (1, ["leak"])
    assert (lost[SEEN], outcome(lost)) == (1, ["failed"]), "of a leak nothing new is known"
    assert (quiet_again[SEEN], outcome(quiet_again)) == (0, ["inconclusive"])
    assert quiet_again["coppice_isolation_audits_total inconclusive"] == 2
    assert quiet_again["coppice_isolation_audits_total failed"] == 1
    assert quiet_again["coppice_isolation_audit_end_timestamp_seconds"] > 0
    said = capsys.readouterr().err.splitlines()
    assert "reported as cached" in said[1]
    assert said[2] == "failed: no answer"


def test_a_leak_by_time_is_certain_with_few_samples() -> None:
    (scrape,) = watched(audit_of("time"))
    assert (scrape[SEEN], outcome(scrape)) == (1, ["leak"])


def test_the_first_audit_must_be_possible(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError):
        watch(gone, AuditMetrics(CollectorRegistry()), lambda: None)
    (address,) = free_addresses(1)
    (tmp_path / "v").write_text("v")
    (tmp_path / "a").write_text("a")
    command = ["audit", "isolation", "--base-url", f"http://{address}", "--victim-key-file", str(tmp_path / "v")]
    command += ["--attacker-key-file", str(tmp_path / "a"), "--metrics-port", "0", "--watch", "5"]
    with pytest.raises(UnavailableError, match="no answer from"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    for more, told in ((["--json", "x"], "--json"), (["--plot", "x"], "--plot"), (["--seed", "1"], "--seed")):
        with pytest.raises(UsageError, match=f"{told} is of one audit"):
            CliRunner().invoke(app, [*command, *more], catch_exceptions=False)


@contextmanager
def audits_again_and_again(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command at work on a server that leaks, and the URL of its metrics. Whatever fails, it is ended."""
    environ = {**os.environ, KEY_VARIABLES["victim"]: VICTIM, KEY_VARIABLES["attacker"]: ATTACKER}
    with openai_server(Tenants(shares=True)) as server:
        command = [sys.executable, "-m", "coppice_cli", "audit", "isolation", "--base-url", server.url, "--samples=8"]
        command += ["--prompt-tokens=32", "--watch=3600", "--metrics-port=0", *flags]
        with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as watching:
            try:
                assert watching.stderr is not None
                yield watching, line_of(watching.stderr, "metrics on ").split()[2].rstrip(";")
            finally:
                watching.kill()


def line_of(lines: IO[str], start: str) -> str:
    return next(line for line in iter(lines.readline, "") if line.startswith(start))


def test_the_command_serves_metrics_until_ctrl_c() -> None:
    with audits_again_and_again() as (watching, url):
        assert watching.stderr is not None
        verdict = line_of(watching.stderr, "leak; answers: ")
        scraped = urllib.request.urlopen(url, timeout=60).read().decode()
        watching.send_signal(signal.SIGINT)
        rest = watching.stderr.read()
        assert watching.wait(60) == EXIT_OK
    assert "8 of 8 of the victim's prompts were reported as cached" in verdict
    assert "coppice_isolation_audit_leak 1.0" in scraped
    assert rest.splitlines() == ["stopped"]


def test_metrics_beyond_loopback_need_tls_or_a_word(tmp_path: Path) -> None:
    environ = {KEY_VARIABLES["victim"]: VICTIM, KEY_VARIABLES["attacker"]: ATTACKER}
    command = ["audit", "isolation", "--base-url", "http://127.0.0.1:1", "--watch", "5", "--metrics-host", "0.0.0.0"]
    command += ["--metrics-port", "0"]

    def invoked(*more: str) -> None:
        CliRunner().invoke(app, [*command, *more], env=environ, catch_exceptions=False)

    with pytest.raises(UsageError, match=r"--metrics-host 0\.0\.0\.0 can be reached from other machines"):
        invoked()
    with pytest.raises(UsageError, match="belong together"):
        invoked("--tls-cert", "x")
    with pytest.raises(UnavailableError, match="no answer from"):
        invoked("--insecure-network")
    with pytest.raises(UnavailableError, match="no answer from"):
        invoked(*Authority(tmp_path).flags("monitor", "canary"))


def test_with_tls_metrics_are_for_those_who_show_a_certificate_and_sigterm_ends_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    flags, monitor = authority.flags("monitor", "canary"), authority.credentials("monitor", "prometheus")
    with audits_again_and_again("--metrics-host=0.0.0.0", *flags) as (watching, url):
        assert watching.stderr is not None
        assert url.startswith("https://0.0.0.0:")
        url = url.replace("0.0.0.0", "127.0.0.1")
        line_of(watching.stderr, "leak; answers: ")
        scraped = urllib.request.urlopen(url, timeout=60, context=monitor.client_context()).read().decode()
        nobody = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        nobody.check_hostname = False
        plain = socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), timeout=60)
        # It says nothing, so that nothing of it is unread when the other side closes: the alert arrives.
        with nobody.wrap_socket(plain) as silent, pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"):
            silent.recv(1)
        watching.send_signal(signal.SIGTERM)
        rest = watching.stderr.read()
        assert watching.wait(60) == EXIT_OK
    assert "coppice_isolation_audit_leak 1.0" in scraped
    assert rest.splitlines() == ["stopped"]
