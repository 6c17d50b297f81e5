"""`LLM.stream` and `LLM.stream_chat`: the tokens and the text of `generate`, as they come; and what ends them."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import coppice
from coppice import LLM, GenerationStream, Piece, SamplingOptions, UsageError
from coppice_offline.prompts import Read

PROMPT = "a prompt of more than a block of sixteen tokens, of which all have to be read once"
CHAT = [{"role": "user", "content": "Hello?"}]
LONG = SamplingOptions(temperature=0, max_tokens=200, ignore_eos=True)
OPTIONS: list[dict[str, Any]] = [
    {"max_tokens": 40},
    {"max_tokens": 40, "n": 3},
    {"max_tokens": 40, "n": 2, "logprobs": 2, "prompt_logprobs": True},
    {"max_tokens": 40, "stop": ["e", "a"]},
    {"max_tokens": 100, "structured_outputs": {"choice": ["Grüße – 木々", "木々 – Grüße"]}},
]


def is_at_rest(llm: LLM) -> bool:
    """Nobody holds a block, and another call can begin."""
    llm.check()
    assert llm._loaded is not None
    engine = llm._loaded.engine
    return engine.is_idle and engine.stats().leases == 0 and bool(llm.generate("x"))


def joined(pieces: list[Piece], index: int) -> tuple[str, list[int]]:
    own = [piece for piece in pieces if piece.index == index]
    assert [piece.finish_reason is not None for piece in own] == [False] * (len(own) - 1) + [True]
    return "".join(piece.text for piece in own), [token for piece in own for token in piece.token_ids]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_pieces_together_are_what_generate_gives(llm: LLM, options: dict[str, Any]) -> None:
    for seed in range(3):
        asked = SamplingOptions(seed=seed, temperature=1.0, **options)
        (expected,) = llm.generate(PROMPT, asked)
        stream = llm.stream(PROMPT, asked)
        pieces = list(stream)
        for output in expected.outputs:
            assert joined(pieces, output.index) == (output.text, output.token_ids)
        found = stream.generation
        assert (found.text, found.token_ids, found.prompt_logprobs) == (
            expected.text,
            expected.token_ids,
            expected.prompt_logprobs,
        )
        assert [output.logprobs for output in found.outputs] == [output.logprobs for output in expected.outputs]
        assert [output.stop_reason for output in found.outputs] == [output.stop_reason for output in expected.outputs]
    assert is_at_rest(llm)


def test_token_ids_and_chats_are_streamed_too(llm: LLM) -> None:
    (expected,) = llm.generate(PROMPT, LONG)
    assert joined(list(llm.stream(expected.prompt_token_ids, LONG)), 0)[1] == expected.token_ids
    (expected,) = llm.chat(CHAT, LONG)
    assert joined(list(llm.stream_chat(CHAT, LONG)), 0) == (expected.text, expected.token_ids)


def test_pieces_come_with_the_steps(llm: LLM) -> None:
    """A step may bring some tokens; the first comes alone, with the prompt."""
    pieces = list(llm.stream(PROMPT, SamplingOptions(temperature=0, max_tokens=60, ignore_eos=True)))
    assert len(pieces[0].token_ids) == 1
    assert len(pieces) > 60 / 16


def test_text_is_whole_characters(llm: LLM) -> None:
    wanted = SamplingOptions(max_tokens=60, structured_outputs={"choice": ["木々のÄö"]})
    texts = [piece.text for piece in llm.stream(PROMPT, wanted)]
    assert "".join(texts) == "木々のÄö"
    assert "" in texts, "some tokens are parts of a character"
    assert not [text for text in texts if "\ufffd" in text]


def test_who_leaves_the_loop_cancels_the_request(llm: LLM) -> None:
    for piece in llm.stream(PROMPT, LONG):
        assert piece.finish_reason is None
        break
    assert is_at_rest(llm)


def test_an_error_in_the_loop_cancels_the_request(llm: LLM) -> None:
    def read() -> None:
        for piece in llm.stream(PROMPT, LONG):
            raise ZeroDivisionError(piece)

    with pytest.raises(ZeroDivisionError):
        read()
    assert is_at_rest(llm)


def test_a_stream_with_a_name_is_closed_by_hand(llm: LLM) -> None:
    with llm.stream(PROMPT, LONG) as stream:
        next(stream)
    assert list(stream) == []
    assert is_at_rest(llm)
    stream = llm.stream(PROMPT, SamplingOptions(n=3, max_tokens=200, ignore_eos=True))
    next(stream)
    with pytest.raises(coppice.RequestFailed, match="another call of this LLM is at work") as refused:
        llm.generate(PROMPT)
    assert "close it" in refused.value.line()
    with pytest.raises(coppice.UsageError, match="not complete"):
        stream.generation  # noqa: B018
    stream.close()
    stream.close()
    assert is_at_rest(llm)


def test_a_stream_that_nobody_read_holds_nothing(llm: LLM) -> None:
    stream = llm.stream(PROMPT, LONG)
    assert is_at_rest(llm)
    assert joined(list(stream), 0)[1] == llm.generate(PROMPT, LONG)[0].token_ids
    del stream
    gc.collect()
    assert is_at_rest(llm)


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda llm: llm.stream(["a", "b"]), "prompt has 'a', which is no token id"),
        (lambda llm: llm.stream({"text": "a"}), "prompt is a mapping with 'text'"),
        (lambda llm: llm.stream(""), "prompt is empty"),
        (lambda llm: llm.stream("a", {"n": 1}), "params is a dict"),
        (lambda llm: llm.stream("a", [SamplingOptions()]), "params is a list"),
        (lambda llm: llm.stream("a", SamplingOptions(best_of=2)), "there is no stream of them"),
        (lambda llm: llm.stream_chat([CHAT]), r"messages\[0\] must be a mapping"),
        (lambda llm: llm.stream_chat([]), "messages must be"),
    ],
)
def test_what_cannot_be_streamed_is_refused_when_it_is_asked_for(llm: LLM, ask: Any, named: str) -> None:
    with pytest.raises(coppice.UsageError, match=named):
        ask(llm)
    assert is_at_rest(llm)


def test_a_stream_is_an_iterator(llm: LLM) -> None:
    stream = llm.stream("x")
    assert isinstance(stream, GenerationStream)
    assert iter(stream) is stream
    stream.close()


def test_a_stream_cannot_be_closed_while_it_computes() -> None:
    """From another thread, or around the handler of a signal."""
    prompt, refused = Read("x", b"\0" * 4), []

    def turns() -> Iterator[None]:
        for act in (stream.close, lambda: stream.fail(UsageError("this LLM is closed"))):
            with pytest.raises(UsageError, match="cannot be closed") as caught:
                act()
            refused.append(caught.value)
        yield

    stream = GenerationStream(prompt, [], turns())
    with pytest.raises(StopIteration):
        next(stream)
    assert len(refused) == 2
    stream.close()


def test_a_program_may_end_with_an_open_stream(checkpoint: Path) -> None:
    """Signals have no handlers any more when it is cleaned up."""
    code = f"import coppice; llm = coppice.LLM({str(checkpoint)!r}); stream = llm.stream('x'); next(stream)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
