"""`coppice index ingest`: the advisory index as a process."""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.edge.signal_event import SignalEvent
from coppice.errors import EXIT_OK, CoppiceError, UsageError
from coppice.telemetry.logs import LogLevel, configure_logging
from coppice.tls.settings import refuse_open_hosts
from coppice_cache.edge.api.admin_http import AdminServer
from coppice_cache.engine_index.core.fleet import FleetLimits
from coppice_cache.engine_index.core.tree import AdvisoryLimits
from coppice_cache.engine_index.http import build_ingest_app
from coppice_cache.engine_index.ingest import FeedSpec, Ingest

_log = logging.getLogger("coppice.ingest")


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """zmq, replay, name: in step; a replay or a name of "-" is none. topic: prefix of the topics to follow."""

    zmq: Sequence[str]
    replay: Sequence[str] = ()
    name: Sequence[str] = ()
    topic: str = ""
    host: str = "127.0.0.1"
    port: int = 8073
    insecure_network: bool = False
    blocks_per_source_max: int = 1_000_000
    log_level: LogLevel = "info"


def feed_specs(options: IngestOptions) -> list[FeedSpec]:
    """Raises UsageError."""
    if not options.zmq:
        raise UsageError("--zmq is missing", hint="name the engine's endpoint, such as --zmq tcp://HOST:5557")
    for flag, values in (("--replay", options.replay), ("--name", options.name)):
        if len(values) > len(options.zmq):
            raise UsageError(
                f"{flag} is given {len(values)} times, --zmq {len(options.zmq)} times",
                hint=f"they belong together in order; {flag} - stands for none",
            )
    replays = [*options.replay, *["-"] * (len(options.zmq) - len(options.replay))]
    names = [*options.name, *["-"] * (len(options.zmq) - len(options.name))]
    specs = [
        FeedSpec(endpoint if name == "-" else name, endpoint, "" if replay == "-" else replay)
        for endpoint, replay, name in zip(options.zmq, replays, names, strict=True)
    ]
    doubled = {spec.name for spec in specs if sum(other.name == spec.name for other in specs) > 1}
    if doubled:
        raise UsageError(f"two feeds are called {min(doubled)}", hint="give each --zmq its own --name")
    return specs


def run_ingest(options: IngestOptions) -> int:
    """Serve until SIGINT or SIGTERM. Raises CoppiceError."""
    specs = feed_specs(options)
    if not 0 <= options.port <= 65535:
        raise UsageError(f"--port is {options.port}", hint="0 to 65535; 0 takes a free one")
    if options.blocks_per_source_max < 1:
        raise UsageError(f"--blocks is {options.blocks_per_source_max}", hint="at least 1")
    if not options.insecure_network:
        refuse_open_hosts(
            {"--host": options.host},
            "whoever reaches it can ask what the engines have cached",
            "listen on 127.0.0.1, behind a proxy with TLS for others, or say --insecure-network where nobody else "
            "reaches that network",
        )
    configure_logging(options.log_level)
    stopping = SignalEvent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    limits = FleetLimits(tree=AdvisoryLimits(blocks_per_source_max=options.blocks_per_source_max))
    http = AdminServer(options.host, options.port, flag="--port")
    try:
        ingest = Ingest(specs, topic=options.topic, limits=limits)
    except CoppiceError:
        http.stop()
        raise
    http.start(build_ingest_app(ingest))
    _log.info("following %d feed(s); REST on %s:%d", len(specs), options.host, http.port)
    ingest.start()
    while not stopping.wait(1.0) and ingest.failure is None:
        pass
    ingest.stop()
    http.stop()
    if ingest.failure is not None:
        raise CoppiceError(f"reading events broke: {ingest.failure!r}", hint="start it again")
    return EXIT_OK
