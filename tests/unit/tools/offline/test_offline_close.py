"""`LLM.close` and `with`: what is freed, and what is said afterwards."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import coppice
from coppice import LLM, BeamSearchOptions, SamplingOptions
from coppice_offline.answers.generation_stream import GenerationStream

CHAT = [{"role": "user", "content": "Hello?"}]
LONG = SamplingOptions(temperature=0, max_tokens=200, ignore_eos=True)
FORM = SamplingOptions(max_tokens=60, structured_outputs={"regex": "[ab]{3}"})
THREADS_END_S = 60.0  # only a failing test waits so long


def parts_of(llm: LLM) -> list[weakref.ref[Any]]:
    executor = llm._executor
    assert executor is not None
    return [weakref.ref(part) for part in (executor, executor._decoder, executor._pool, executor._outputs)]


def check_freed(parts: list[weakref.ref[Any]]) -> None:
    gc.collect()  # that of `close` does nothing while another thread of these tests is at its own
    kept = [part() for part in parts]
    assert kept == [None] * len(kept), [(type(part), gc.get_referrers(part)) for part in kept]


def threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def test_with_frees_the_model_the_pool_and_the_threads(checkpoint: Path) -> None:
    before = threads()
    with LLM(checkpoint, num_blocks=64, threads=1) as llm:
        parts = parts_of(llm)
        assert all(part() is not None for part in parts)
        generations = llm.generate(["x", "y"], FORM)
        llm.chat(CHAT, LONG)
        streamed = list(llm.stream("x", FORM))
    check_freed(parts)
    for thread in threads() - before:
        thread.join(THREADS_END_S)
        assert not thread.is_alive(), thread
    assert len(generations) == 2, "what was generated stays"
    assert streamed


def test_an_error_within_with_frees_it_too_whoever_keeps_the_error(checkpoint: Path) -> None:
    def use(parts: list[weakref.ref[Any]]) -> None:
        with LLM(checkpoint, num_blocks=64, threads=1) as llm:
            parts += parts_of(llm)
            llm.generate("")

    parts: list[weakref.ref[Any]] = []
    with pytest.raises(coppice.PromptError) as kept:
        use(parts)
    check_freed(parts)
    assert kept.tb is not None


CALLS: list[Callable[[LLM], Any]] = [
    lambda llm: llm.generate("x"),
    lambda llm: llm.chat(CHAT),
    lambda llm: llm.beam_search("x", BeamSearchOptions(beam_width=2)),
    lambda llm: llm.stream("x"),
    lambda llm: llm.stream_chat(CHAT),
    lambda llm: llm.check(),
    lambda llm: llm.__enter__(),
]


def test_after_close_every_call_says_so(checkpoint: Path) -> None:
    llm = LLM(checkpoint, num_blocks=64, threads=1)
    llm.close()
    llm.close()
    for call in CALLS:
        with pytest.raises(coppice.UsageError, match="this LLM is closed") as refused:
            call(llm)
        assert "make a new one" in refused.value.line()


def test_close_ends_streams_and_who_reads_on_is_told(checkpoint: Path) -> None:
    with LLM(checkpoint, num_blocks=64, threads=1) as llm:
        parts = parts_of(llm)
        begun, fresh = llm.stream("x", LONG), llm.stream("y", LONG)
        complete = list(llm.stream("z", LONG))
        next(begun)
    for stream in (begun, fresh):
        for _ in range(2):
            with pytest.raises(coppice.UsageError, match="this LLM is closed"):
                next(stream)
    assert complete[-1].finish_reason == "length"
    check_freed(parts)


def test_what_was_streamed_to_its_end_outlives_the_model(checkpoint: Path) -> None:
    with LLM(checkpoint, num_blocks=64, threads=1) as llm:
        stream: GenerationStream = llm.stream("x", LONG)
        text = "".join(piece.text for piece in stream)
    assert stream.generation.text == text
    assert list(stream) == []


def test_a_model_at_work_cannot_be_closed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(checkpoint, num_blocks=64, threads=1) as llm:
        assert llm._loaded is not None
        engine, refused = llm._loaded.engine, []
        step = engine.step

        def close_and_step() -> bool:
            with pytest.raises(coppice.UsageError, match="at work") as error:
                llm.close()
            refused.append(error)
            return step()

        monkeypatch.setattr(engine, "step", close_and_step)
        assert llm.generate("x", LONG)[0].token_ids
        assert refused
        monkeypatch.undo()
        assert llm.generate("x")
