"""Grammars of `coppice.LLM`: compiled where they are asked for, and kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from coppice.errors import UsageError
from coppice.grammar import GrammarError, Grammars
from coppice.ids import DomainId
from coppice_worker.model.guides import Compiled, GrammarGuide

KEPT_MAX = 64


class CompiledGrammars:
    """Everything happens in the thread of the caller."""

    def __init__(self, load: Callable[[], Grammars]) -> None:
        """`load` is called with the first grammar."""
        self._load = cache(load)
        self._kept: dict[str, Compiled] = {}

    def check(self, grammar: str, field: str) -> None:
        """Raises UsageError, which names `field`, for a grammar that cannot be used."""
        try:
            self._compiled(grammar)
        except GrammarError as error:
            raise UsageError(f"{field} cannot be used: {error}") from None

    def open(self, _: DomainId, grammar: str, request_id: str) -> GrammarGuide:
        """Of a grammar that was checked."""
        return GrammarGuide(self._compiled(grammar), request_id)

    def _compiled(self, grammar: str) -> Compiled:
        if grammar not in self._kept:
            compiled = Compiled(grammar)
            compiled.matcher.set_result(self._load().compile(grammar))
            self._kept[grammar] = compiled
            if len(self._kept) > KEPT_MAX:
                del self._kept[next(iter(self._kept))]
        return self._kept[grammar]
