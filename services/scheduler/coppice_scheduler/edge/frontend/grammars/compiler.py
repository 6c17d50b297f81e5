"""The process beside a front door in which grammars are compiled before anything is reserved for them."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Collection
from contextlib import suppress
from threading import Lock

from coppice.grammar import GrammarError
from coppice_scheduler.edge.frontend.grammars.compiler_process import MODULE, read_message, write_message


class GrammarCompiler:
    """Any thread may use it; grammars are compiled one after the other."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Starts the process. Raises GrammarError for a tokenizer that it cannot use."""
        self._hello = (tokenizer_json, vocab_size, sorted(eos_token_ids))
        self._turn = Lock()
        self._start()

    def compile(self, grammar: str) -> None:
        """Raises GrammarError for what cannot be used, and what takes too much."""
        with self._turn:
            try:
                problem = self._ask(grammar)
            except (EOFError, OSError):  # somebody ended the process
                self._end()
                self._start()
                problem = self._ask(grammar)
        if problem:
            raise GrammarError(problem)

    def _ask(self, message: object) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        write_message(self._process.stdin, message)
        return str(read_message(self._process.stdout))

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=-1
        )
        self._end = weakref.finalize(self, _end, self._process)
        problem = self._ask(self._hello)
        if problem:
            raise GrammarError(problem)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with suppress(OSError):  # what was left to write
            stream.close()
    process.wait()
