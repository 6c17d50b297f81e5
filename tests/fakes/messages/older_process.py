"""A service as a build of an older session protocol runs it.

    python -m tests.fakes.messages.older_process VERSION MODULE ARGS

It says no field, message or value that its version does not have, and ends on what it could not know. A scheduler's
planner, which is a process of its own, is of the same build.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from typing import Any

from coppice.edge import codec
from tests.fakes.messages.golden import older

version, module = int(sys.argv[1]), sys.argv[2]
for name in ("INDEX", "WORKERS", "STEPS"):
    setattr(codec, name, older(getattr(codec, name), version))
sys.argv[1:3] = []


class OlderPopen(subprocess.Popen[Any]):
    def __init__(self, argv: list[str], **options: Any) -> None:
        if argv[1:3] == ["-m", "coppice_scheduler.edge.planner"]:
            argv = [argv[0], "-m", "tests.fakes.messages.older_process", str(version), *argv[2:]]
        super().__init__(argv, **options)


subprocess.Popen = OlderPopen  # type: ignore[misc]
runpy.run_module(module, run_name="__main__", alter_sys=True)
