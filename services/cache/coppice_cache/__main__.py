"""`python -m coppice_cache`: the cache service, alone or under `coppice up`."""

from __future__ import annotations

import os
import signal
import sys

from coppice.edge.session_listener import allow_open_files
from coppice.edge.signal_event import SignalEvent
from coppice.errors import EXIT_OK, CoppiceError, run_main
from coppice.processes.leaving import leave
from coppice.settings import read_settings
from coppice.telemetry.logs import configure_logging
from coppice.tenants.watch import LOOK_S
from coppice_cache.edge.process import CacheProcess
from coppice_cache.edge.settings import CacheSettings

PROG = "python -m coppice_cache"


def main() -> int:
    settings = read_settings(CacheSettings, sys.argv[1:], os.environ, PROG)
    return run_main(PROG, lambda: run(settings))


def run(settings: CacheSettings) -> int:
    """Serve until SIGTERM or SIGINT. Raises CoppiceError."""
    configure_logging(settings.log_level, settings.log_format)
    allow_open_files()
    stopping = SignalEvent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    wants_tenants = SignalEvent()
    process = CacheProcess(settings, stopping)
    if process.tenants is not None:
        signal.signal(signal.SIGHUP, lambda *_: wants_tenants.set())
    process.start()
    while not stopping.wait(LOOK_S):
        always = wants_tenants.is_set()
        wants_tenants.clear()
        process.look_at_tenants(always=always)
    process.stop()
    if process.failures:
        hint = "start it again: workers and sessions re-attach"
        raise CoppiceError(f"the core broke: {process.failures[0]!r}", hint=hint)
    return EXIT_OK


if __name__ == "__main__":
    leave(main())
