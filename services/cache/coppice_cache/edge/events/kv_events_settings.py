"""From settings to publishers of KV events: what is wrong with them is said before anything starts."""

from __future__ import annotations

import string
from dataclasses import dataclass

from coppice.errors import UnavailableError, UsageError
from coppice.ids import DomainId, WorkerId
from coppice.settings import nearest
from coppice.tenants.directory import TenantDirectory
from coppice_cache.edge.durability.registry import connect
from coppice_cache.edge.events.kv_events_out import KvEventsOut
from coppice_cache.edge.events.kv_events_redis import RedisOut
from coppice_cache.edge.events.kv_events_view import TOPIC_FIELDS, KvEventsView
from coppice_cache.edge.events.kv_events_zmq import ZmqOut
from coppice_cache.edge.events.token_rule import token_rule
from coppice_cache.edge.settings import CacheSettings, split_endpoint


@dataclass(frozen=True, slots=True)
class KvEventsPlan:
    """What is to be published, checked."""

    domains: frozenset[DomainId]
    topic: str
    with_tokens: bool

    def view(self, worker: WorkerId | None = None) -> KvEventsView:
        return KvEventsView(self.domains, self.topic, with_tokens=self.with_tokens, worker=worker)


def kv_events_plan(settings: CacheSettings, directory: TenantDirectory) -> KvEventsPlan | None:
    """None: nothing is to be published. Raises UsageError."""
    token_rule(settings, directory)
    published, replayed = (
        {worker for worker, _ in map(split_endpoint, given)}
        for given in (settings.kv_events_zmq, settings.kv_events_replay)
    )
    if settings.kv_events_replay and published != replayed:
        raise UsageError(
            f"--kv-events-replay is for {_said(replayed)}, and --kv-events-zmq for {_said(published)}",
            hint="name the same workers in both",
        )
    if settings.kv_events_redis_stream and not settings.redis_url:
        raise UsageError("--kv-events-redis-stream needs a Redis", hint="give --redis-url redis://HOST:PORT/0")
    if not settings.kv_events_zmq and not settings.kv_events_redis_stream:
        return None
    domains = _domains(settings, directory)
    return KvEventsPlan(domains, _topic(settings.kv_events_topic, domains), settings.kv_events_tokens)


def open_publishers(settings: CacheSettings, plan: KvEventsPlan) -> list[KvEventsOut]:
    """Binds what is to be bound; nothing is sent yet. Raises UsageError or UnavailableError."""
    publishers: list[KvEventsOut] = []
    if settings.kv_events_redis_stream and settings.redis_url:
        way = RedisOut(
            connect(settings.redis_url, settings.redis_password.get_secret_value()), settings.kv_events_redis_stream
        )
        publishers.append(KvEventsOut(plan.view(), way))
    replay = dict(map(split_endpoint, settings.kv_events_replay))
    try:
        for worker, endpoint in map(split_endpoint, settings.kv_events_zmq):
            view = plan.view(WorkerId(worker) if worker else None)
            publishers.append(KvEventsOut(view, ZmqOut(endpoint, replay.get(worker))))
    except UnavailableError:
        for publisher in publishers:
            publisher.stop()
        raise
    return publishers


def _said(workers: set[str]) -> str:
    return ", ".join(sorted(worker or "all workers" for worker in workers)) or "none"


def _domains(settings: CacheSettings, directory: TenantDirectory) -> frozenset[DomainId]:
    known = [shares.domain for shares in directory.domains()]
    if not settings.kv_events_domains:
        if settings.tenants:
            raise UsageError(
                "KV events are to be published, but of no domain",
                hint=f"name them with --kv-events-domains; known: {', '.join(sorted(known))}",
            )
        return frozenset(known)
    for domain in settings.kv_events_domains:
        if settings.tenants and domain not in known:
            raise UsageError(f"--kv-events-domains: no tenant has the domain {domain!r}", hint=nearest(domain, known))
    return frozenset(map(DomainId, settings.kv_events_domains))


def _topic(template: str, domains: frozenset[DomainId]) -> str:
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UsageError(f"--kv-events-topic {template!r}: {error}") from error
    named = {name for _, name, _, _ in parts if name is not None}
    for name in sorted(named - set(TOPIC_FIELDS)):
        hint = f"known: {', '.join(f'{{{known}}}' for known in TOPIC_FIELDS)}"
        raise UsageError(f"--kv-events-topic {template!r}: {{{name}}} is no field of a topic", hint=hint)
    if any(spec or conversion for _, _, spec, conversion in parts):
        raise UsageError(f"--kv-events-topic {template!r}: fields are written as {{worker}}, without a format")
    if "worker" not in named:
        raise UsageError(
            f"--kv-events-topic {template!r} lacks {{worker}}",
            hint="a reader could not tell on which worker a block is",
        )
    if len(domains) > 1 and "domain" not in named:
        raise UsageError(
            f"--kv-events-topic {template!r} lacks {{domain}}, and {len(domains)} domains are published",
            hint="on one topic, routers would answer for one tenant from the prompts of another",
        )
    return template
