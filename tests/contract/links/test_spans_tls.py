"""Spans go to a collector over TLS, under the certificate of the process as it is when they go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from opentelemetry import trace

from coppice.telemetry.traces import Tracing, configure_tracing
from coppice.tls.credentials import Credentials, TlsFiles
from tests.fakes.certificates import Authority, replace
from tests.fakes.telemetry.collector import Collector
from tests.fakes.waiting import wait_for


@pytest.fixture(autouse=True)
def _own_global_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "set_tracer_provider", lambda provider: None)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return made_authority(tmp_path / "ours")


def made_authority(folder: Path) -> Authority:
    folder.mkdir()
    return Authority(folder)


@pytest.fixture
def collector(authority: Authority) -> Iterator[Collector]:
    collector = served_by(authority)
    yield collector
    collector.close()


def served_by(authority: Authority) -> Collector:
    """A collector that takes spans of whoever has a certificate of the same CA."""
    certificate, key = authority.public("localhost")
    pair = key.read_bytes(), certificate.read_bytes()
    ca = (authority.folder / "ca.pem").read_bytes()
    return Collector(credentials=grpc.ssl_server_credentials([pair], ca, require_client_auth=True))


def ends_a_span(tracing: Tracing, name: str) -> None:
    tracing.tracer("t").start_span(name).end()


def names(collector: Collector) -> set[str]:
    return {span.name for span in collector.spans}


def test_spans_go_under_the_certificate_of_the_process(authority: Authority, collector: Collector) -> None:
    tracing = configure_tracing("test", collector.endpoint, tls=authority.credentials("worker", "w0"))
    ends_a_span(tracing, "step")
    wait_for(lambda: names(collector) == {"step"}, "the span to come")
    tracing()


def test_who_has_a_certificate_of_another_ca_is_not_heard(tmp_path: Path, collector: Collector) -> None:
    theirs = made_authority(tmp_path / "other").files("worker", "w0")
    trusting = Credentials(TlsFiles(theirs.certificate, theirs.key, tmp_path / "ours" / "ca.pem"))
    tracing = configure_tracing("test", collector.endpoint, tls=trusting)
    ends_a_span(tracing, "step")
    wait_for(lambda: tracing.spans_dropped == 1, "the span to be dropped")
    tracing()
    assert not collector.spans


def test_a_collector_of_another_ca_gets_nothing(tmp_path: Path, authority: Authority) -> None:
    other = served_by(made_authority(tmp_path / "other"))
    tracing = configure_tracing("test", other.endpoint, tls=authority.credentials("worker", "w0"))
    ends_a_span(tracing, "step")
    wait_for(lambda: tracing.spans_dropped == 1, "the span to be dropped")
    tracing()
    other.close()
    assert not other.spans


def test_files_that_are_replaced_count_for_what_goes_next(tmp_path: Path, authority: Authority) -> None:
    files = authority.files("worker", "w0")
    other = made_authority(tmp_path / "other")
    collector = served_by(other)
    tracing = configure_tracing("test", collector.endpoint, tls=Credentials(files))
    ends_a_span(tracing, "before")
    wait_for(lambda: tracing.spans_dropped == 1, "a collector of another CA to get nothing")
    renewed = other.files("worker", "w0")
    for old, new in ((files.ca, renewed.ca), (files.certificate, renewed.certificate), (files.key, renewed.key)):
        replace(old, new.read_bytes())

    def arrived() -> bool:
        ends_a_span(tracing, "after")
        return names(collector) == {"after"}

    wait_for(arrived, "a span to come")
    tracing()
    collector.close()


def test_plain_text_beside_tls_is_said(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    plain = Collector()
    tracing = configure_tracing("test", plain.endpoint, tls=authority.credentials("worker", "w0"))
    ends_a_span(tracing, "step")
    wait_for(lambda: names(plain) == {"step"}, "the span to come")
    tracing()
    plain.close()
    assert "without TLS" in caplog.text
