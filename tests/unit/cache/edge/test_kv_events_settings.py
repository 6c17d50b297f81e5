"""Settings of the KV events: what is wrong with them is said before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coppice.errors import UsageError
from coppice.ids import DomainId
from coppice.tenants.directory import TenantDirectory
from coppice_cache.edge.events.kv_events_settings import kv_events_plan
from coppice_cache.edge.events.token_rule import token_rule
from coppice_cache.edge.settings import CacheSettings

TENANTS = """
tenants:
  - id: a
    api_key_sha256: "{}"
  - id: b
    api_key_sha256: "{}"
  - id: s
    api_key_sha256: "{}"
    mode: strict
    guarantee_share: 0.1
""".format("0" * 64, "1" * 64, "2" * 64)

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a replay without a stream": ({"kv_events_replay": ("tcp://*:1",)}, "--kv-events-zmq for none"),
    "a replay for another worker": (
        {"kv_events_zmq": ("w0=tcp://*:1",), "kv_events_replay": ("w1=tcp://*:2",)},
        "--kv-events-replay is for w1, and --kv-events-zmq for w0",
    ),
    "a Redis stream without Redis": ({"kv_events_redis_stream": "kv"}, "needs a Redis"),
    "no domain where there are several": ({"kv_events_zmq": ("tcp://*:1",), "tenants": True}, "but of no domain"),
    "a domain of no tenant": (
        {"kv_events_zmq": ("tcp://*:1",), "tenants": True, "kv_events_domains": ("tenant/c",)},
        "no tenant has the domain 'tenant/c'",
    ),
    "tokens of a strict domain": (
        {
            "kv_events_zmq": ("tcp://*:1",),
            "tenants": True,
            "kv_events_domains": ("tenant/a", "tenant/s"),
            "kv_events_topic": "{worker}@{domain}",
            "kv_events_tokens": True,
        },
        "tenant/s has mode strict",
    ),
    "tokens of a strict domain, for watchers alone": (
        {"tenants": True, "kv_events_domains": ("tenant/s",), "kv_events_tokens": True},
        "tenant/s has mode strict",
    ),
    "domains on one topic": (
        {"kv_events_zmq": ("tcp://*:1",), "tenants": True, "kv_events_domains": ("tenant/a", "tenant/b")},
        "lacks {domain}",
    ),
    "a topic for all workers": ({"kv_events_zmq": ("tcp://*:1",), "kv_events_topic": "kv"}, "lacks {worker}"),
    "an unknown field": ({"kv_events_zmq": ("tcp://*:1",), "kv_events_topic": "{worker}{pod}"}, "{pod} is no field"),
    "a broken template": ({"kv_events_zmq": ("tcp://*:1",), "kv_events_topic": "{worker"}, "--kv-events-topic"),
    "a field with a format": ({"kv_events_zmq": ("tcp://*:1",), "kv_events_topic": "{worker:>9}"}, "without a format"),
}


def _directory(settings: CacheSettings) -> TenantDirectory:
    return TenantDirectory.load(settings.tenants) if settings.tenants else TenantDirectory.single_default()


@pytest.mark.parametrize(("values", "named"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_said(values: dict[str, Any], named: str, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(TENANTS)
    if values.get("tenants"):
        values = {**values, "tenants": str(file)}
    settings = CacheSettings(**values)
    with pytest.raises(UsageError) as caught:
        kv_events_plan(settings, _directory(settings))
    assert named in caught.value.line()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("localhost:5557",), "is no ZMQ endpoint"),
        (("tcp://*:1", "tcp://*:2"), "names no worker"),
        (("w0=tcp://*:1", "w0=tcp://*:2"), "named twice"),
    ],
)
def test_wrong_endpoints_are_refused(given: tuple[str, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        CacheSettings(kv_events_zmq=given)


def test_the_default_is_the_one_default_domain() -> None:
    assert kv_events_plan(CacheSettings(), TenantDirectory.single_default()) is None
    plan = kv_events_plan(CacheSettings(kv_events_zmq=("tcp://*:1",)), TenantDirectory.single_default())
    assert plan is not None
    assert plan.domains == {"tenant/default"}
    assert not plan.with_tokens


def test_the_rule_for_tokens_is_that_of_flags_and_tenants(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(TENANTS)
    settings = CacheSettings(tenants=str(file), kv_events_tokens=True)
    rule = token_rule(settings, _directory(settings))
    assert rule.why_not([DomainId("tenant/a"), DomainId("tenant/b")]) is None
    assert rule.why_not([DomainId("tenant/a"), DomainId("tenant/s")]) is not None
    off = CacheSettings(tenants=str(file))
    assert token_rule(off, _directory(off)).why_not([DomainId("tenant/a")]) is not None
