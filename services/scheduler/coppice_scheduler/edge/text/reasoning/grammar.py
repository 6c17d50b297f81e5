"""A grammar whose answer comes behind reasoning, which is free."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from coppice_scheduler.edge.text.reasoning.formats import ReasoningFormat

_ANY = r"/(.|\n)*/"
_SPACE = r"SPACE: /[ \n]{1,20}/"


@dataclass(frozen=True, slots=True)
class BehindReasoning:
    """Where an answer in a given form begins. Markers that are tokens of the tokenizer are those in the grammar."""

    format: ReasoningFormat
    opens_token: int | None
    closes_token: int | None
    is_open: bool  # the prompt ends within reasoning; else the model may open it, or answer at once

    @classmethod
    def of(cls, found: ReasoningFormat, token_of: Callable[[str], int | None], *, is_open: bool) -> BehindReasoning:
        return cls(found, token_of(found.opens), token_of(found.closes), is_open)

    def grammar(self, answer: str) -> str:
        """Of reasoning and then `answer`, a grammar of llguidance's."""
        closes = json.dumps(self.format.closes)
        # Lazy: it ends where the marker comes for the first time.
        thought = f"thought[lazy]: {_ANY} {closes}"
        if self.closes_token is not None:
            thought = f"thought: TEXT <[{self.closes_token}]>\nTEXT: {_ANY} & ~({_ANY} {closes} {_ANY})"
        opens = json.dumps(self.format.opens) if self.opens_token is None else f"<[{self.opens_token}]>"
        start = "thought SPACE? @answer" if self.is_open else f"(SPACE? {opens} thought SPACE?)? @answer"
        first = {"name": "reasoning", "lark_grammar": f"start: {start}\n{thought}\n{_SPACE}"}
        return json.dumps({"grammars": [first, *_named(answer)]}, ensure_ascii=False)


def _named(grammar: str) -> list[dict[str, object]]:
    """The grammars of a text, the first of them as `answer`."""
    if not grammar.startswith("{"):
        return [{"name": "answer", "lark_grammar": grammar}]
    first, *others = json.loads(grammar)["grammars"]
    return [{**first, "name": "answer"}, *others]
