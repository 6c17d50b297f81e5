"""The size of the queue and its shares reach the core from flags, environment and tenants file."""

from __future__ import annotations

from pathlib import Path

import pytest

from coppice.errors import UsageError
from coppice.settings import parse_settings
from coppice.tenants.directory import DEFAULT_TENANT_ID
from coppice.tenants.keys import digest_of_key
from coppice.tenants.watch import TenantsWatch
from coppice_scheduler.core.policy.queue_room import Amount, QueueRoom
from coppice_scheduler.core.state.settings import SchedulerSettings
from coppice_scheduler.edge.base.settings import ServiceSettings
from coppice_scheduler.edge.planner import core_settings as made

FLAG, VARIABLE = "--max-queued-tokens", "COPPICE_SCHEDULER_MAX_QUEUED_TOKENS"
TENANTS = f"""
tenants:
  - {{id: a, api_key_sha256: "{digest_of_key("a")}", weight: 3}}
  - {{id: s, api_key_sha256: "{digest_of_key("s")}", mode: strict, guarantee_share: 0.5}}
"""


def settings(*argv: str, **environ: str) -> ServiceSettings:
    return parse_settings(ServiceSettings, ["--model=m", *argv], environ, "scheduler")


def core_settings(given: ServiceSettings, tenants: TenantsWatch | None) -> SchedulerSettings:
    return made.core_settings(given, 100, None if tenants is None else tenants.directory)


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_size_that_cannot_be_is_refused_by_name(value: str) -> None:
    with pytest.raises(UsageError, match=FLAG):
        settings(f"{FLAG}={value}")
    with pytest.raises(UsageError, match=VARIABLE):
        settings(**{VARIABLE: value})


def test_shares_follow_the_tenants_file(tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text(TENANTS)
    given = settings("--max-queued=40", **{VARIABLE: "4000"})
    core = core_settings(given, TenantsWatch(tmp_path / "tenants.yaml"))
    assert [tenant for tenant, limits in core.tenants.items() if limits.is_strict] == ["s"]
    room = QueueRoom(core)
    assert (room.share_of("a"), room.share_of("s")) == (Amount(30, 3000), Amount(10, 1000))


def test_the_only_tenant_has_the_whole_queue() -> None:
    room = QueueRoom(core_settings(settings("--max-queued=40"), None))
    assert room.share_of(DEFAULT_TENANT_ID) == room.whole == Amount(40, 4_194_304)
