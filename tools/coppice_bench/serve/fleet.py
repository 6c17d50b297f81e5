"""Runs a load, in this process or in several, and gathers its records as they come.

Several processes are for servers that one cannot keep busy. Each makes the same jobs and sends every n-th of them.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

from coppice.errors import CoppiceError
from coppice_bench.serve.load.client import Client, Part
from coppice_bench.serve.load.records import Record

_START_LEAD_S = 0.1  # in which all processes hear when to start
_END_S = 10.0


@dataclass
class Gathered:
    """What has been heard so far; stands as it is when the run is interrupted."""

    records: list[Record] = field(default_factory=list)
    start_s: float = 0.0
    client_cpu_s: float = 0.0
    num_clipped: int = 0


def run_part(part: Part, gathered: Gathered, on_record: Callable[[Record], None]) -> None:
    """Returns when the load is over. Raises KeyboardInterrupt, and CoppiceError when a client process fails."""

    def heard(record: Record) -> None:
        gathered.records.append(record)
        on_record(record)

    if part.options.processes == 1:
        _run_here(part, gathered, heard)
    else:
        _run_in_processes(part, gathered, heard)


def _run_here(part: Part, gathered: Gathered, heard: Callable[[Record], None]) -> None:
    client = Client(part, heard)
    gathered.num_clipped = client.num_clipped
    gathered.start_s = time.monotonic()
    before_s = time.process_time()
    try:
        asyncio.run(client.run(gathered.start_s))
    finally:
        gathered.client_cpu_s = time.process_time() - before_s


def _run_in_processes(part: Part, gathered: Gathered, heard: Callable[[Record], None]) -> None:
    command = [sys.executable, "-m", "coppice_bench.serve.load.client"]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(part.options.processes)
    ]
    listeners: list[threading.Thread] = []
    try:
        for number, child in enumerate(children):
            _say(child.stdin, part.of_process(number).to_json())
        gathered.num_clipped = max(int(_hear(child)["ready"]) for child in children)
        gathered.start_s = time.monotonic() + _START_LEAD_S
        for child in children:
            _say(child.stdin, repr(gathered.start_s))
        _gather(children, listeners, gathered, heard)
    finally:
        for child in children:
            child.terminate()
        for child in children:
            _reap(child)
        for listener in listeners:
            listener.join()  # what it reads has ended with the child
        for child in children:
            _close(child)
    failed = [child.returncode for child in children if child.returncode > 0]
    if failed:
        raise CoppiceError(f"a client process ended with {failed[0]} before its part of the load; see above")


def _gather(
    children: list[subprocess.Popen[str]],
    listeners: list[threading.Thread],
    gathered: Gathered,
    heard: Callable[[Record], None],
) -> None:
    """`listeners` gets the threads that read from the children: an interrupt leaves them reading."""
    lock = threading.Lock()

    def listen(child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            told = json.loads(line)
            with lock:
                if isinstance(told, list):
                    heard(Record(*told))
                else:
                    gathered.client_cpu_s += told["cpu_s"]

    listeners += [threading.Thread(target=listen, args=(child,), daemon=True) for child in children]
    for listener in listeners:
        listener.start()
    for listener in listeners:
        listener.join()
    for child in children:
        child.wait(_END_S)


def _say(stream: IO[str] | None, line: str) -> None:
    assert stream is not None
    try:
        stream.write(line + "\n")
        stream.flush()
    except BrokenPipeError:
        raise CoppiceError("a client process ended before it began; see above") from None


def _hear(child: subprocess.Popen[str]) -> dict[str, int]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise CoppiceError("a client process ended before it began; see above")
    return dict(json.loads(line))


def _reap(child: subprocess.Popen[str]) -> None:
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _close(child: subprocess.Popen[str]) -> None:
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                pass
