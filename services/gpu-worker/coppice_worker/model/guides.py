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
from functools import partial
from pathlib import Path
from typing import TypeVar

from coppice.grammar import GrammarError, Grammars, Matcher
from coppice.ids import DomainId
from coppice_worker.core.batch.guides import UInt32
from coppice_worker.model.config.info import ModelInfo

TOKENIZER_FILE = "tokenizer.json"
KEPT_MAX = 16  # compiled grammars of a domain; the lexer of one may take 20 MiB
DOMAINS_MAX = 64  # with kept grammars

ResultT = TypeVar("ResultT")

_log = logging.getLogger("coppice.worker")


class GuideMaker:
    """Opens guides for one model. `open` is called by one thread."""

    def __init__(self, load: Callable[[], Grammars]) -> None:
        """`load` is called once, in a thread, at once; its GrammarError is that of every grammar."""
        self._kept: OrderedDict[DomainId, OrderedDict[str, Future[Matcher]]] = OrderedDict()
        self._waiting: OrderedDict[DomainId, deque[tuple[str, Future[Matcher]]]] = OrderedDict()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, args=(load,), name="grammars", daemon=True).start()

    def open(self, domain: DomainId, grammar: str) -> GrammarGuide:
        """Begins to compile what is not kept."""
        kept = self._kept.setdefault(domain, OrderedDict())
        self._kept.move_to_end(domain)
        if grammar not in kept:
            kept[grammar] = self._compile(domain, grammar)
        kept.move_to_end(grammar)
        compiled = kept[grammar]
        if len(kept) > KEPT_MAX:
            kept.popitem(last=False)
        if len(self._kept) > DOMAINS_MAX:
            self._kept.popitem(last=False)
        return GrammarGuide(compiled)

    def _compile(self, domain: DomainId, grammar: str) -> Future[Matcher]:
        compiled: Future[Matcher] = Future()
        with self._changed:
            self._waiting.setdefault(domain, deque()).append((grammar, compiled))
            self._changed.notify()
        return compiled

    def _run(self, load: Callable[[], Grammars]) -> None:
        loaded: Future[Grammars] = Future()
        _settle(loaded, load)
        while True:
            grammar, compiled = self._next()
            _settle(compiled, partial(_compile, loaded, grammar))

    def _next(self) -> tuple[str, Future[Matcher]]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            domain, line = self._waiting.popitem(last=False)
            first = line.popleft()
            if line:
                self._waiting[domain] = line  # its next turn comes after those of all others
            return first


class GrammarGuide:
    """A `Guide` by a grammar that is being compiled."""

    def __init__(self, compiled: Future[Matcher]) -> None:
        self._compiled = compiled
        self._matcher: Matcher | None = None  # has taken the first `_num_taken` tokens of the output
        self._num_taken = 0

    @property
    def is_ready(self) -> bool:
        return self._compiled.done()

    def fill(self, output: UInt32, words: UInt32) -> bool:
        try:
            if self._matcher is None:
                self._matcher = self._compiled.result().copy()
            self._matcher.take(output[self._num_taken :])
            self._num_taken = len(output)
            self._matcher.fill(words)
        except GrammarError as error:
            _log.warning("a grammar cannot be followed: %s", error)
            return False
        return True


def _settle(future: Future[ResultT], work: Callable[[], ResultT]) -> None:
    try:
        future.set_result(work())
    except GrammarError as error:
        future.set_exception(error)
    except Exception as error:
        _log.exception("a grammar could not be compiled")
        future.set_exception(GrammarError(str(error)))


def _compile(loaded: Future[Grammars], grammar: str) -> Matcher:
    return loaded.result().compile(grammar)


def grammars_of(folder: Path, model: ModelInfo) -> Grammars:
    """Of a checkpoint. Raises GrammarError."""
    path = folder / TOKENIZER_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GrammarError(f"{path} cannot be read: {error}") from error
    return Grammars(text, model.vocab_size, model.eos_token_ids)
