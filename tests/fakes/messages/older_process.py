"""A service as a build of an older session protocol runs it.

    python -m tests.fakes.messages.older_process VERSION MODULE ARGS

It says no field, message or value that its version does not have, and ends on what it could not know.
"""

from __future__ import annotations

import runpy
import sys

from coppice.edge import codec
from tests.fakes.messages.golden import older

version, module = int(sys.argv[1]), sys.argv[2]
for name in ("INDEX", "WORKERS", "STEPS"):
    setattr(codec, name, older(getattr(codec, name), version))
sys.argv[1:3] = []
runpy.run_module(module, run_name="__main__", alter_sys=True)
