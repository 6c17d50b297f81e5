"""Guides of sequences, by grammars that are compiled beside the steps and kept for their domain.

    open(domain, grammar)   kept? --> guide, ready
                            else  --> [ domain 1: . . . ] [ domain 2: . ] --> one thread    domains take turns

A grammar is compiled once for all requests of a domain that bring it, as long as it is among the latest. Nothing is
shared between domains: nobody can tell by the time which grammars others use, or waits for all that others bring.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from coppice.grammar import GrammarError, Grammars, Matcher
from coppice.ids import DomainId
from coppice.telemetry.logs import about_request
from coppice_worker.core.batch.guides import UInt32
from coppice_worker.model.config.info import ModelInfo

TOKENIZER_FILE = "tokenizer.json"
# Of the texts of a domain's kept grammars. What is compiled takes 20 to 100 times as much.
USED_BYTES_MAX = 1 << 21
UNUSED_BYTES_MAX = 1 << 23  # somebody comes back for each of these
GRAMMAR_OVERHEAD = 1 << 12  # bytes that the smallest counts for
DOMAINS_MAX = 64  # with kept grammars

ResultT = TypeVar("ResultT")

_log = logging.getLogger("coppice.worker")


class GuideMaker:
    """Opens guides for one model. `open` is called by one thread."""

    def __init__(self, load: Callable[[], Grammars]) -> None:
        """`load` is called once, in a thread, at once; its GrammarError is that of every grammar."""
        self._kept: OrderedDict[DomainId, _Kept] = OrderedDict()
        self._waiting: OrderedDict[DomainId, deque[Compiled]] = OrderedDict()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, args=(load,), name="grammars", daemon=True).start()

    def open(self, domain: DomainId, grammar: str, request_id: str = "") -> GrammarGuide:
        """Begins to compile what is not kept."""
        kept = self._kept.setdefault(domain, _Kept())
        self._kept.move_to_end(domain)
        if len(self._kept) > DOMAINS_MAX:
            self._kept.popitem(last=False)
        compiled = kept.find(grammar)
        if compiled is None:
            compiled = Compiled(grammar)
            kept.add(compiled)
            with self._changed:
                self._waiting.setdefault(domain, deque()).append(compiled)
                self._changed.notify()
        return GrammarGuide(compiled, request_id)

    def _run(self, load: Callable[[], Grammars]) -> None:
        loaded: Future[Grammars] = Future()
        _settle(loaded, load)
        while True:
            compiled = self._next()
            _settle(compiled.matcher, partial(_compile, loaded, compiled.grammar))

    def _next(self) -> Compiled:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            domain, line = self._waiting.popitem(last=False)
            first = line.popleft()
            if line:
                self._waiting[domain] = line  # its next turn comes after those of all others
            return first


@dataclass(slots=True, eq=False)
class Compiled:
    """A grammar that is, or will be, compiled."""

    grammar: str
    matcher: Future[Matcher] = field(default_factory=Future)
    is_used: bool = False  # by a guide; until then the request that brought it is still to come back for it
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = GRAMMAR_OVERHEAD + len(self.grammar.encode("utf-8", "replace"))


class _Kept:
    """Those of one domain, least recently asked for first."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, Compiled] = OrderedDict()

    def find(self, grammar: str) -> Compiled | None:
        if grammar in self._found:
            self._found.move_to_end(grammar)
        return self._found.get(grammar)

    def add(self, compiled: Compiled) -> None:
        """In place of some that were used, where there is no room; in the end of any."""
        self._found[compiled.grammar] = compiled
        self._drop([each for each in self._found.values() if each.is_used], USED_BYTES_MAX)
        self._drop(list(self._found.values()), UNUSED_BYTES_MAX)

    def _drop(self, those: list[Compiled], bytes_max: int) -> None:
        """The first of those, until the others fit."""
        total = sum(each.num_bytes for each in those)
        for each in those:
            if total <= bytes_max:
                return
            del self._found[each.grammar]
            total -= each.num_bytes


class GrammarGuide:
    """A `Guide` by a grammar that is being compiled."""

    def __init__(self, compiled: Compiled, request_id: str = "") -> None:
        self._compiled = compiled
        self._request_id = request_id
        self._matcher: Matcher | None = None  # has taken the first `_num_taken` tokens of the output
        self._num_taken = 0

    @property
    def is_ready(self) -> bool:
        return self._compiled.matcher.done()

    def fill(self, output: UInt32, words: UInt32) -> bool:
        try:
            if self._matcher is None:
                self._compiled.is_used = True
                self._matcher = _result(self._compiled.matcher).copy()
            self._matcher.take(output[self._num_taken :])
            self._num_taken = len(output)
            self._matcher.fill(words)
        except GrammarError as error:
            with about_request(self._request_id):
                _log.warning("a grammar cannot be followed: %s", error)
            return False
        return True


def _settle(future: Future[ResultT], work: Callable[[], ResultT]) -> None:
    try:
        future.set_result(work())
    except GrammarError as error:
        future.set_exception(error)
    except BaseException as error:  # a panic of the library is no Exception; the thread must go on
        _log.exception("a grammar could not be compiled")
        future.set_exception(GrammarError(str(error)))


def _compile(loaded: Future[Grammars], grammar: str) -> Matcher:
    return _result(loaded).compile(grammar)


def _result(future: Future[ResultT]) -> ResultT:
    """Another error each time: one that is raised again and again keeps all that it came by."""
    error = future.exception()
    if error is not None:
        raise GrammarError(str(error))
    return future.result()


def grammars_of(folder: Path, model: ModelInfo) -> Grammars:
    """Of a checkpoint. Raises GrammarError."""
    path = folder / TOKENIZER_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GrammarError(f"{path} cannot be read: {error}") from error
    return Grammars(text, model.vocab_size, model.eos_token_ids)
