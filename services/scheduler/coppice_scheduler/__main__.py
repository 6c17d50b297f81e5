"""`python -m coppice_scheduler`: the planner, and the front doors that it starts."""

from __future__ import annotations

import os
import sys

from coppice.errors import EXIT_OK, run_main
from coppice.processes.leaving import leave
from coppice.settings import read_settings
from coppice.telemetry.logs import configure_logging
from coppice_scheduler.edge.base.settings import ServiceSettings
from coppice_scheduler.edge.service import serve

PROG = "python -m coppice_scheduler"


def main() -> int:
    settings = read_settings(ServiceSettings, sys.argv[1:], os.environ, PROG)
    return run_main(PROG, lambda: run(settings))


def run(settings: ServiceSettings) -> int:
    configure_logging(settings.log_level, settings.log_format)
    serve(settings)
    return EXIT_OK


if __name__ == "__main__":
    leave(main())
