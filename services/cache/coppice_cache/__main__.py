"""`python -m coppice_cache`: the cache service, alone or under `coppice up`."""

from __future__ import annotations

import os
import signal
import sys
import threading

from coppice.errors import EXIT_OK, CoppiceError, run_main
from coppice.settings import read_settings
from coppice.telemetry import configure_logging
from coppice_cache.edge.process import CacheProcess
from coppice_cache.edge.settings import CacheSettings

PROG = "python -m coppice_cache"


def main() -> int:
    settings = read_settings(CacheSettings, sys.argv[1:], os.environ, PROG)
    return run_main(PROG, lambda: run(settings))


def run(settings: CacheSettings) -> int:
    """Serve until SIGTERM or SIGINT. Raises CoppiceError."""
    configure_logging(settings.log_level)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    process = CacheProcess(settings, stopping)
    process.start()
    stopping.wait()
    process.stop()
    if process.failures:
        hint = "start it again: workers and sessions re-attach"
        raise CoppiceError(f"the core broke: {process.failures[0]!r}", hint=hint)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
