"""Runs pip with a line that says how far it is, and says what to do about what fails.

pip's own bar is for a terminal and for one file. Here its output is read, `Progress 262144 of 5546993` among it, and
one line is shown instead: redrawn on a terminal, now and then elsewhere. The whole output is shown when pip fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

REDRAW_S = 0.2
PLAIN_LINE_S = 15.0
END_S = 3.0
SHOWN_LINES = 30
NAMED_FILE = re.compile(r"\s*(?:Downloading|Using cached|Processing)\s+(\S+)")
RAW_PROGRESS = re.compile(r"Progress (\d+) of \d+")

# The first that fits is said. What names the cause goes before what only follows from it.
HINTS = (
    (r"No space left on device|Errno 28\b", "The disk is full: make room, then run the same command again."),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLError|SSLCertVerification",
        "pip does not trust the certificate of the index: set PIP_CERT to the file of your authority.",
    ),
    (
        r"NewConnectionError|NameResolutionError|Temporary failure in name resolution|Name or service not known"
        r"|Network is unreachable|ConnectTimeout|ReadTimeout|Connection refused|Connection reset|ProxyError",
        "pip reaches no package index: check the network; set HTTPS_PROXY for a proxy, PIP_INDEX_URL for a mirror.",
    ),
    (
        r"ResolutionImpossible|conflicting dependencies",
        "constraints.txt and what the index offers disagree: `make lock` writes it anew.",
    ),
    (
        r"unable to execute '?\S*(?:cc|\+\+)|No such file or directory: '?\S*(?:cc|\+\+)\b|no acceptable C compiler"
        r"|command '\S*(?:cc|\+\+)' failed|Python\.h: No such file",
        "A package has no wheel for this machine and must be compiled: install a C compiler and Python's headers"
        " (Debian, Ubuntu: apt-get install build-essential python3-dev).",
    ),
    (
        r"No matching distribution found|Could not find a version",
        "No index that pip knows has this package for this Python and machine: try another Python (PYTHON=python3.12)"
        " or another index (PIP_INDEX_URL).",
    ),
    (r"Permission denied|Errno 13\b|Read-only file system", "This folder cannot be written: check who owns .venv."),
)


class Failed(Exception):
    """Ends the set-up; its text is one line that says what to do."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def size_text(num_bytes: int) -> str:
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{max(1, round(num_bytes / 1e6))} MB"


def hint(output: str) -> str:
    """What to do about pip's output."""
    for pattern, advice in HINTS:
        if re.search(pattern, output):
            return advice
    return "pip failed, its words are above; .venv can be removed and made again."


class Meter:
    """How far pip is, from the lines that it prints. `sizes` has the bytes of each file that it will fetch, and
    `count_installed` says how many packages are there: while pip unpacks them it says nothing."""

    def __init__(self, what: str, sizes: dict[str, int], count_installed: Callable[[], int] = int) -> None:
        self._what = what
        self._sizes = sizes
        self._count_installed = count_installed
        self._installed_before = count_installed()
        self._seen: set[str] = set()
        self._current = ""
        self._current_bytes = 0
        self._past_bytes = 0
        self._is_installing = False

    def hear(self, line: str) -> None:
        if progress := RAW_PROGRESS.match(line):
            if self._current:
                self._current_bytes = int(progress[1])
        elif named := NAMED_FILE.match(line):
            self._begin(named[1].rsplit("/", 1)[-1])
        elif line.startswith("Installing collected packages"):
            self._is_installing = True

    def _begin(self, file: str) -> None:
        self._past_bytes += self._sizes.get(self._current, 0)
        self._current_bytes = 0
        self._current = file if file in self._sizes and file not in self._seen else ""
        self._seen.add(file)

    def text(self) -> str:
        if self._is_installing:
            done = self._count_installed() - self._installed_before
            return f"{self._what}: {done} of {len(self._sizes)} packages are unpacked"
        if not self._seen or not self._sizes:
            return self._what
        name = f", {self._current.split('-')[0]}" if self._current else ""
        fetched = size_text(self._past_bytes + self._current_bytes)
        return f"{self._what}: {fetched} of {size_text(sum(self._sizes.values()))}{name}"


class Line:
    """One line, kept up to date while a block runs."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._begun = time.monotonic()
        self._stop = threading.Event()
        self._is_terminal = sys.stderr.isatty()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._is_terminal:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()

    def _run(self) -> None:
        while not self._stop.wait(REDRAW_S if self._is_terminal else PLAIN_LINE_S):
            text = f"  {self._meter.text()} ({time.monotonic() - self._begun:.0f} s)"
            if self._is_terminal:
                sys.stderr.write("\r\x1b[2K" + text[: shutil.get_terminal_size().columns - 1])
                sys.stderr.flush()
            else:
                say(text)


def run(command: list[str], meter: Meter) -> tuple[int, str]:
    """Exit status and output of a command. Ctrl-C reaches it, too: it is waited for, and nothing writes after us."""
    lines: list[str] = []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    with (
        Line(meter),
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if not RAW_PROGRESS.match(line):
                    lines.append(line)
                meter.hear(line)
        except KeyboardInterrupt:
            end(process)
            raise
    return process.returncode, "".join(lines)


def end(process: subprocess.Popen[str]) -> None:
    """Ctrl-C on a terminal reached the process itself, and it tidies up; a signal to us alone did not."""
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


def pip(python: Path, arguments: list[str], meter: Meter) -> None:
    """Runs pip of a virtual environment; its output is shown when it fails."""
    status, output = run([str(python), "-m", "pip", *arguments], meter)
    if status:
        # One line for each index that lacks a package tells nothing.
        told = [line for line in output.splitlines() if not line.startswith("WARNING: Location")]
        say("\n".join(told[-SHOWN_LINES:]))
        raise Failed(hint(output))
