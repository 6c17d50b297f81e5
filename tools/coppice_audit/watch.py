"""`coppice audit isolation --watch`: audits again and again, with new prompts; metrics tell how the last one ended.

coppice_isolation_audit_leak                     1 when the last audit that ended saw a leak that is certain
coppice_isolation_audit_outcome{outcome}         1 for that of the last one: a verdict, or failed
coppice_isolation_audits_total{outcome}          how many ended so
coppice_isolation_audit_end_timestamp_seconds    when the last one ended
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from coppice.addresses import Address
from coppice.errors import EXIT_OK, CoppiceError
from coppice.telemetry.build_info import BuildInfo
from coppice.telemetry.metrics_server import serve_metrics
from coppice.tls.credentials import Credentials
from coppice_audit.core.judge import Verdict, judge, leak_is_certain, verdict_of
from coppice_audit.core.samples import Samples
from coppice_audit.options import AuditOptions, WatchOptions
from coppice_audit.run import INTERRUPTED, SEED_BITS, Audit
from coppice_bench.report import note

FAILED = "failed"


class AuditMetrics:
    """What a scrape sees."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._leak = Gauge(
            "coppice_isolation_audit_leak", "1 when the last audit saw a leak that is certain.", registry=registry
        )
        self._outcome = Gauge(
            "coppice_isolation_audit_outcome", "1 for how the last audit ended.", ["outcome"], registry=registry
        )
        self._audits = Counter("coppice_isolation_audits", "Audits that ended.", ["outcome"], registry=registry)
        self._end = Gauge(
            "coppice_isolation_audit_end_timestamp_seconds", "When the last audit ended.", registry=registry
        )
        for outcome in (*Verdict, FAILED):
            self._outcome.labels(outcome)
            self._audits.labels(outcome)

    def ended(self, outcome: str, *, is_leak: bool | None) -> None:
        """`is_leak` None: nothing new is known of that."""
        if is_leak is not None:
            self._leak.set(is_leak)
        for other in (*Verdict, FAILED):
            self._outcome.labels(other).set(other == outcome)
        self._audits.labels(outcome).inc()
        self._end.set_to_current_time()


def run_watch(options: AuditOptions, watching: WatchOptions) -> int:
    """Until Ctrl-C or SIGTERM. Raises CoppiceError when the first audit cannot be made; later ones that cannot are
    counted."""
    options.check()
    watching.check()
    credentials = None if watching.tls is None else Credentials(watching.tls)
    registry = CollectorRegistry()
    registry.register(BuildInfo("canary"))
    metrics = AuditMetrics(registry)
    server = serve_metrics(
        watching.metrics_host, watching.metrics_port, registry, tuple, flag="--metrics-port", tls=credentials
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as containers are stopped
    address = Address(server.host, server.port)
    note(f"metrics on {'http' if credentials is None else 'https'}://{address}/metrics; Ctrl-C stops")
    try:
        watch(lambda: _audited(options), metrics, lambda: time.sleep(watching.every_s))
    except KeyboardInterrupt:
        note("stopped")
    finally:
        server.close()
    return EXIT_OK


def watch(audited: Callable[[], Samples], metrics: AuditMetrics, pause: Callable[[], None]) -> None:
    """Audit, tell, pause, for ever. Raises KeyboardInterrupt, and CoppiceError of the first audit."""
    is_first = True
    while True:
        try:
            checks = judge(audited())
        except CoppiceError as error:
            if is_first:
                raise
            metrics.ended(FAILED, is_leak=None)
            note(f"{FAILED}: {error.line()}")
        else:
            verdict = verdict_of(checks)
            seen = [f"{check.name}: {check.seen}" for check in checks if check.verdict is verdict]
            metrics.ended(verdict, is_leak=leak_is_certain(checks))
            note("; ".join([verdict, *(seen if verdict is not Verdict.ISOLATED else ())]))
        is_first = False
        pause()


def _audited(options: AuditOptions) -> Samples:
    audit = Audit(options, secrets.randbits(SEED_BITS))
    audit.run()
    if audit.samples.stopped == INTERRUPTED:
        raise KeyboardInterrupt
    return audit.samples
