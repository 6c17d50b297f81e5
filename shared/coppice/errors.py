"""Errors that a person reads.

    CoppiceError            exit code 1: something failed while we ran
    +-- UsageError          exit code 2: a flag, a variable or a file is wrong; nothing was started
    +-- UnavailableError    exit code 1: something that we need (a port, a service, a hub) is not there

Each says what was wrong, where, and what to do about it; `run_main` turns one into a single line on stderr.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class CoppiceError(Exception):
    """What went wrong, and in `hint` what to do about it (may be empty)."""

    exit_code = EXIT_FAILURE

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def line(self) -> str:
        """One line for a person: what, then what to do."""
        text = " ".join(self.what.split())
        return f"{text} ({' '.join(self.hint.split())})" if self.hint else text


class UsageError(CoppiceError):
    """A flag, an environment variable or a configuration file is wrong."""

    exit_code = EXIT_USAGE


class UnavailableError(CoppiceError):
    """A port, a service, a file or a model hub that is needed cannot be had."""


def run_main(prog: str, main: Callable[[], int]) -> int:
    """Run `main` and return its exit code; an error of ours becomes one line on stderr that starts with `prog`.

    Anything else is a bug of ours and keeps its traceback, also where a library ends the process.
    """
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    try:
        return main()
    except CoppiceError as error:
        print(f"{prog}: {error.line()}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
