"""Where the scheduler's metrics may be served: beyond this machine with TLS, or where somebody says so."""

from __future__ import annotations

import pytest

from coppice.errors import UsageError
from coppice.settings import parse_settings
from coppice_scheduler.edge.base.settings import ServiceSettings

OPEN = ("--metrics-port=0", "--metrics-host=0.0.0.0")
TLS = ("--tls-cert=a", "--tls-key=b", "--tls-ca=c")


def settings(*argv: str, **environ: str) -> ServiceSettings:
    return parse_settings(ServiceSettings, ["--model=m", *argv], environ, "scheduler")


def test_metrics_that_others_can_reach_need_tls_or_a_word() -> None:
    with pytest.raises(UsageError, match=r"--metrics-host 0\.0\.0\.0 can be reached from other machines"):
        settings(*OPEN).check_listening()
    settings(*OPEN, *TLS).check_listening()
    settings(*OPEN, "--insecure-network").check_listening()
    settings(*OPEN, COPPICE_INSECURE_NETWORK="1").check_listening()


def test_the_public_port_and_metrics_that_are_not_served_need_none() -> None:
    settings("--host=0.0.0.0", "--metrics-port=0").check_listening()
    settings("--metrics-host=0.0.0.0").check_listening()
