"""`coppice up` over stand-ins: `python -m tests.fakes.tools.up_driver PORT LOG_DIR [usual]`.

Without the last word it takes any free ports, and leaves the usual ones to whoever else runs here.
"""

from __future__ import annotations

import sys
from pathlib import Path

from coppice.errors import run_main
from coppice_cli.up import run_up
from coppice_up.options import UpOptions
from coppice_up.plan import Services


def main() -> int:
    port, log_dir, has_usual_ports = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] == ["usual"]
    fake = ("-m", "tests.fakes.cache.service")
    services = Services(cache=(*fake, "cache"), worker=(*fake, "worker"), scheduler=(*fake, "scheduler"))
    options = UpOptions(port=port, log_dir=log_dir, model=str(log_dir / "model"))
    if has_usual_ports:
        options = options.at_usual_ports()
    return run_up(options, services)


if __name__ == "__main__":
    sys.exit(run_main("coppice", main))
