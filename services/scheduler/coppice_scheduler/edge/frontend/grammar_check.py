"""Whether the grammar of a call can be used, found out before anything is reserved for it.

A process beside this one compiles it, within limits that end it and nothing else (`grammars/compiler_process.py`). A
worker compiles it once more; what is refused here never gets there. The long lane of `TextWork` waits for it: one at a
time for each tenant, so many of one tenant's wait for each other and for nobody else.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Protocol

from coppice.grammar import GrammarError
from coppice_scheduler.edge.base.errors import ApiError, invalid
from coppice_scheduler.edge.frontend.generation_spec import GenerationSpec
from coppice_scheduler.edge.frontend.grammars.compiler_process import CPU_MAX_S, TOO_SLOW
from coppice_scheduler.edge.frontend.text_work import SHORT_SIZE, TextWork
from coppice_scheduler.edge.text.output_format import FormatKind, OutputFormat, grammar_of
from coppice_scheduler.edge.text.tools.call_grammar import what_is_wrong

KNOWN_BYTES_MAX = 1 << 19  # of a tenant's grammars that were found good
KNOWN_OVERHEAD = 1 << 10  # bytes that the smallest counts for
TENANTS_MAX = 256  # whose grammars are known
_SHOWN_CHARS = 400  # of what is wrong


class Compiler(Protocol):
    """`GrammarCompiler`, or `Grammars` in this process."""

    def compile(self, grammar: str, /) -> object:
        """Raises GrammarError."""


class GrammarCheck:
    """Used from one event loop."""

    def __init__(
        self, load: Callable[[], Compiler], text_work: TextWork, thread_time: Callable[[], float] = time.thread_time
    ) -> None:
        """`load` is called once: by `load`, or in a thread with the first grammar."""
        self._load = load
        self._text_work = text_work
        self._thread_time = thread_time
        self._loading = Lock()
        self._loaded: Compiler | str | None = None  # or why they cannot be
        self._known: OrderedDict[str, _Known] = OrderedDict()  # by tenant

    def load(self) -> None:
        """Takes half a second for 128,000 tokens."""
        with suppress(GrammarError):  # it is told to those who ask for a grammar
            self._grammars()

    async def grammar_of(self, tenant: str, spec: GenerationSpec) -> str:
        """The grammar for the answer, empty where any will do. Raises ApiError."""
        wanted = spec.output_format
        if wanted is None:
            return ""
        _check_options(spec, wanted)
        known = self._known.setdefault(tenant, _Known())
        self._known.move_to_end(tenant)
        if len(self._known) > TENANTS_MAX:
            self._known.popitem(last=False)
        grammar = known.find(wanted)
        if grammar is None:
            grammar = await self._text_work.run(tenant, SHORT_SIZE + 1, partial(self._checked, wanted))
            known.add(wanted, grammar)
        return grammar

    def _checked(self, wanted: OutputFormat) -> str:
        """On a thread."""
        try:
            grammars = self._grammars()
            began_s = self._thread_time()
            grammar = grammar_of(wanted)
            grammars.compile(grammar)
            took_s = self._thread_time() - began_s
        except GrammarError as error:
            raise _refusal(wanted, str(error)) from None
        if took_s > CPU_MAX_S:
            raise _refusal(wanted, TOO_SLOW)
        return grammar

    def _grammars(self) -> Compiler:
        with self._loading:
            if self._loaded is None:
                try:
                    self._loaded = self._load()
                except GrammarError as error:
                    self._loaded = str(error)
        if isinstance(self._loaded, str):
            raise GrammarError(self._loaded)  # another one each time: an error keeps what it came by
        return self._loaded


def _size(wanted: OutputFormat, grammar: str) -> int:
    return KNOWN_OVERHEAD + sum(map(len, wanted.value)) + len(grammar)


class _Known:
    """Grammars of one tenant, by what was asked for; least recently asked for first."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[OutputFormat, str] = OrderedDict()
        self._num_bytes = 0

    def find(self, wanted: OutputFormat) -> str | None:
        if wanted in self._grammars:
            self._grammars.move_to_end(wanted)
        return self._grammars.get(wanted)

    def add(self, wanted: OutputFormat, grammar: str) -> None:
        """Forgets others where there is no room."""
        if wanted in self._grammars:
            return  # of a call that came at the same time
        self._grammars[wanted] = grammar
        self._num_bytes += _size(wanted, grammar)
        while self._num_bytes > KNOWN_BYTES_MAX:
            self._num_bytes -= _size(*self._grammars.popitem(last=False))


def _refusal(wanted: OutputFormat, problem: str) -> ApiError:
    field, code = wanted.field, "invalid_output_format"
    if wanted.kind is FormatKind.TOOL_CALLS:
        place, problem = what_is_wrong(str(wanted.value), problem)
        if place is not None:
            field, code = f"{field}[{place}]", "invalid_function_parameters"
    shown = problem if len(problem) <= _SHOWN_CHARS else problem[:_SHOWN_CHARS] + "..."
    return invalid(f"{field} cannot be used: {shown}", param=field, code=code)


def _check_options(spec: GenerationSpec, wanted: OutputFormat) -> None:
    """An answer in a given form ends where the form does, with an end token. Raises ApiError."""
    for name, is_asked in (("ignore_eos", spec.ignore_eos), ("min_tokens", spec.min_tokens > 0)):
        if is_asked:
            raise invalid(
                f"{name} cannot be combined with {wanted.field}, which says where the answer ends. Leave one out.",
                param=name,
                code="unsupported_parameter",
            )
