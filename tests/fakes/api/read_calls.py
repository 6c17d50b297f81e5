"""What a parser of calls finds in an answer that comes in pieces, checked on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from coppice_scheduler.edge.text.tools.call_parser import CallDelta, CallParser, Said
from coppice_scheduler.edge.text.tools.formats import ToolFormat
from coppice_scheduler.edge.text.tools.json_calls import JsonCalls
from coppice_scheduler.edge.text.tools.python_calls import PythonCalls
from coppice_scheduler.edge.text.tools.xml_calls import XmlCalls

NAMES = frozenset({"f", "g.h", "get-it", "get_weather"})
TEXTS = frozenset({("f", "s"), ("f", "e")})


@dataclass
class Read:
    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    order: list[str | int] = field(default_factory=list)  # texts and numbers of calls
    is_done: bool = False
    is_open: bool = False

    def say(self, texts: list[str]) -> None:
        """These come next, as one text; then there are none any more."""
        if text := "".join(texts):
            self.text += text
            self.order.append(text)
        texts.clear()


def taken(parser: CallParser) -> tuple[str, list[CallDelta]]:
    """Text and calls apart."""
    found = parser.take()
    text = "".join(each.text for each in found if isinstance(each, Said))
    return text, [each for each in found if isinstance(each, CallDelta)]


def parser_of(tool_format: ToolFormat, calls_max: int | None = None) -> CallParser:
    numbers = count()

    def new_id() -> str:
        return f"id{next(numbers)}"

    if tool_format.is_python:
        return PythonCalls(NAMES, new_id, calls_max)
    if tool_format.xml is not None:
        return XmlCalls(tool_format, TEXTS, NAMES, new_id, calls_max)
    return JsonCalls(tool_format, NAMES, new_id, calls_max)


def in_pieces(answer: str, size: int) -> list[str]:
    """Of so many characters each, but for the last."""
    return [answer[at : at + size] for at in range(0, len(answer), size)]


def read(tool_format: ToolFormat, pieces: list[str], calls_max: int | None = None, *, was_cut: bool = False) -> Read:
    parser, found = parser_of(tool_format, calls_max), Read()
    whole, said = "".join(pieces), list[str]()  # texts since the latest call: joined once, since answers here are long
    for piece in [*pieces, None]:
        if piece is None:
            parser.flush(was_cut=was_cut)
        else:
            parser.feed(piece)
        new = parser.take()
        indexes = [delta.index for delta in new if isinstance(delta, CallDelta)]
        assert len({*indexes}) == len(indexes), "a piece of each call at most"
        for delta in new:
            if isinstance(delta, Said):
                assert whole[delta.end - len(delta.text) : delta.end] == delta.text, "it is told where it stands"
                said.append(delta.text)
                continue
            found.say(said)
            if delta.index not in found.order:
                found.order.append(delta.index)
            assert found.order[-1] == delta.index, "nothing is said within a call"
            assert delta.name or delta.arguments, "nothing is told of nothing"
            if delta.name:
                assert delta.index == len(found.calls)
                found.calls.append((delta.name, ""))
                found.ids.append(delta.call_id)
            else:
                assert not delta.call_id
            name, arguments = found.calls[delta.index]
            found.calls[delta.index] = (name, arguments + delta.arguments)
    found.say(said)
    assert parser.num_calls == len(found.calls)
    found.is_done, found.is_open = parser.is_done, parser.is_open
    return found
