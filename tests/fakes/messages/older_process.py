"""A service as a build of an older session protocol runs it, and the processes of ours that it starts.

    python -m tests.fakes.messages.older_process VERSION MODULE ARGS

It says no field, message or value that its version does not have, and ends on what it could not know.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from typing import Any

from coppice.edge import codec
from tests.fakes.messages.golden import older

THIS = "tests.fakes.messages.older_process"


def main(version: str, module: str) -> None:
    for name in ("INDEX", "WORKERS", "STEPS"):
        setattr(codec, name, older(getattr(codec, name), int(version)))

    class OlderPopen(subprocess.Popen[Any]):
        def __init__(self, argv: list[str], **options: Any) -> None:
            is_ours = argv[1:2] == ["-m"] and argv[2].startswith("coppice_")
            super().__init__([*argv[:2], THIS, version, *argv[2:]] if is_ours else argv, **options)

    subprocess.Popen = OlderPopen  # type: ignore[misc]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _, wanted, started, *_ = sys.argv
    sys.argv[1:3] = []
    main(wanted, started)
