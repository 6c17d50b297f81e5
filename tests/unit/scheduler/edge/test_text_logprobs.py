"""Which log-probabilities belong to the text of an answer that has reasoning and calls besides."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from coppice_scheduler.core.state.request import Finish, Output
from coppice_scheduler.edge.http.answer_blocks import AnswerBlocks, Piece
from coppice_scheduler.edge.openai.responses.logprobs import TextLogprobs, WrittenLists
from coppice_scheduler.edge.text.answer_parts import AnswerParts, PartKind
from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text
from coppice_scheduler.edge.text.detokenizer import DetokenizerFactory, TokenTexts
from coppice_scheduler.edge.text.logprobs import LogprobTrack, TokenLogprob
from coppice_scheduler.edge.text.reasoning.formats import THINK
from coppice_scheduler.edge.text.reasoning.parser import ReasoningParser
from coppice_scheduler.edge.text.text_stream import TextStream
from coppice_scheduler.edge.text.tools.formats import HERMES
from coppice_scheduler.edge.text.tools.json_calls import JsonCalls
from tests.fakes.api.engine import pack, report
from tests.fakes.api.rest import DEMO

RAW = load_checkpoint_text(DEMO).raw
FACTORY, TEXTS = DetokenizerFactory(RAW), TokenTexts(RAW)
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
SILENT = "<|endoftext|>"
WORDS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<think>a\n</think>",
        CALL,
        f"{CALL}. So",
        "<tool",
        "<",
        " ",
        "\n\n",
        "ab ",
        "東",
        "é.",
        SILENT,
    ]
)


def parts() -> AnswerParts:
    return AnswerParts(ReasoningParser(THINK, is_open=False), JsonCalls(HERMES, frozenset("f"), lambda: "id"))


def told(ids: list[int], sizes: list[int]) -> list[TokenLogprob]:
    """Of an answer whose tokens come so many at once."""
    track, prompt = LogprobTrack(3), 3
    stream = TextStream(
        0, prompt, FACTORY.start([], keeps_markers=True), None, lambda: None, track=track, parts=parts()
    )
    blocks, logprobs, found = AnswerBlocks(), TextLogprobs(TEXTS), list[TokenLogprob]()
    outputs, place = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        new, first = ids[place : place + size], prompt + place
        outputs.append(Output("r", pack(new), logprobs=(report(new, first, 1),)))
        place += len(new)
    for output in [*outputs, Output("r", b"", Finish.LENGTH)]:
        delta = stream.take(output)
        if delta is not None:
            logprobs.add(delta.logprobs)
            found += [entry for piece in blocks.take(delta) for entry in logprobs.of(piece)]
    return found


def expected(ids: list[int]) -> list[int]:
    """Slow and plain: places of the tokens whose last character is of the text, where all is read at once."""
    detokenizer = FACTORY.start([], keeps_markers=True)
    pieces, is_open = list[str](), list[bool]()
    for token_id in ids:
        pieces.append(detokenizer.feed([token_id]))
        is_open.append(detokenizer.is_open)
    pieces.append(detokenizer.flush())
    answer = parts()
    answer.feed("".join(pieces))
    answer.flush(was_cut=True)
    of_text = set[int]()
    for part in answer.take():
        if part.kind is PartKind.TEXT:
            of_text |= set(range(part.end - len(part.text), part.end))
            assert "".join(pieces)[: part.end].endswith(part.text)
    found, places, begin, num_chars = list[int](), list[int](), 0, 0
    for place, piece in enumerate(pieces):
        places += [place] if place < len(ids) else []
        num_chars += len(piece)
        if place >= len(ids) or not is_open[place]:
            found += places if num_chars > begin and num_chars - 1 in of_text else []
            places, begin = [], num_chars
    return found


@settings(max_examples=200, deadline=None)
@given(st.lists(WORDS, max_size=12), st.lists(st.integers(1, 9), max_size=9), st.integers(0, 2))
def test_a_token_is_told_where_its_last_character_is_said(words: list[str], sizes: list[int], num_cut: int) -> None:
    ids = RAW.encode("".join(words), add_special_tokens=False).ids
    ids = ids[: len(ids) - num_cut]
    found = told(ids, sizes)
    assert [entry.token_id for entry in found] == [ids[place] for place in expected(ids)]


def test_what_was_thought_ends_where_it_does() -> None:
    answer, ends = parts(), []
    for piece in ("<think>ab", " ", "cd </th", "ink>\n", "ef"):
        answer.feed(piece)
        ends += [(part.kind, part.text, part.end) for part in answer.take()]
    thought = PartKind.REASONING
    assert ends == [(thought, "ab", 9), (thought, " cd", 12), (PartKind.TEXT, "ef", 24)]


def test_what_was_thought_is_not_kept() -> None:
    logprobs = TextLogprobs(TEXTS)
    entries = [TokenLogprob(place, -1.0, (), place, text_end=place + 1) for place in range(4)]
    logprobs.add(entries)
    assert logprobs.of(Piece(0, PartKind.REASONING, "ab", True, 2)) == []
    assert logprobs.of(Piece(1, PartKind.TEXT, "c", True, 3)) == entries[2:3]


def test_lists_are_written_once_and_stand_where_they_are_told() -> None:
    lists = WrittenLists()
    first, second = lists.begin(0), lists.begin(11)
    event = json.dumps({"all": first, "other": second, "text": '"x.0"'}).encode()
    assert json.loads(lists.put_into(event)) == {"all": [], "other": [], "text": '"x.0"'}
    new = lists.add(0, [{"a": 1}, {"b": "\u2028"}])
    lists.add(11, [])
    assert json.loads(lists.put_into(event))["all"] == [{"a": 1}, {"b": "\u2028"}]
    assert b"\\u2028" in lists.put_into(event), "some clients end a line there"
    assert lists.put_into(json.dumps([new]).encode()) == b"[[]]", "that of the latest"
    lists.add(0, [{"c": 2}])
    assert json.loads(lists.put_into(json.dumps([new, first]).encode())) == [
        [{"c": 2}],
        [{"a": 1}, {"b": "\u2028"}, {"c": 2}],
    ]
