"""Compiles the grammars of a front door in a process that a hostile one may fill, stop or bring down.

    front door --tokenizer, grammar--> this process --fork--> one child for each grammar, with limits
               <--- what is wrong ---                <-pipe-

A child begins where all others began, so what one grammar did changes nothing for the next one. Run with `python -m`.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import IO, Any

import msgpack

from coppice.grammar import GrammarError, Grammars

CPU_MAX_S = 0.25  # of one grammar, in a processor's time
MEMORY_MAX_BYTES = 128 << 20  # that one grammar may add
STACK_MAX_BYTES = 2 << 20  # less than a worker's thread has: nesting that fits here fits there
MODULE = "coppice_scheduler.edge.frontend.grammars.compiler_process"
_SIZE = struct.Struct(">I")
TOO_SLOW = f"compiling it takes more than the {CPU_MAX_S:g} s that it may take"
_TOO_MUCH = f"compiling it takes more memory than the {MEMORY_MAX_BYTES >> 20} MiB that it may take, or nests too deep"


def write_message(stream: IO[bytes], value: Any) -> None:
    packed = msgpack.packb(value)
    stream.write(_SIZE.pack(len(packed)) + packed)
    stream.flush()


def read_message(stream: IO[bytes]) -> Any:
    """Raises EOFError where the other side is gone."""
    return msgpack.unpackb(_read_exactly(stream, _SIZE.unpack(_read_exactly(stream, _SIZE.size))[0]))


def _read_exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("the other process is gone")
    return data


def serve(asked: IO[bytes], told: IO[bytes]) -> None:
    """Until the front door is gone."""
    tokenizer_json, vocab_size, eos_token_ids = read_message(asked)
    try:
        grammars = Grammars(tokenizer_json, vocab_size, eos_token_ids)
    except GrammarError as error:
        write_message(told, str(error))
        return
    write_message(told, "")
    while True:
        write_message(told, _check(grammars, read_message(asked)))


def _check(grammars: Grammars, grammar: str) -> str:
    """What is wrong with it, empty where nothing is."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        _compile_and_exit(grammars, grammar, writes)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0:
        return said.decode()
    return TOO_SLOW if code == -signal.SIGPROF else _TOO_MUCH


def _compile_and_exit(grammars: Grammars, grammar: str, writes: int) -> None:
    """In a child. The system ends it at a limit."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic of the library shows the grammar
        _limit()
        problem = ""
        try:
            grammars.compile(grammar)
        except GrammarError as error:
            problem = str(error)
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(problem.encode("utf-8", "replace"))
        code = 0
    finally:
        os._exit(code)


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + MEMORY_MAX_BYTES
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_MAX_BYTES, STACK_MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.setitimer(signal.ITIMER_PROF, CPU_MAX_S)  # its signal ends the process


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the front door goes when it is done
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except (EOFError, BrokenPipeError):
        os._exit(0)


if __name__ == "__main__":
    main()
