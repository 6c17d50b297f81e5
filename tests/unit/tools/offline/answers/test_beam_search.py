"""`LLM.beam_search` finds what `transformers` finds, however many searches run side by side."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

import coppice
from coppice import LLM, BeamSearchOptions, Generation, SamplingOptions, UsageError
from coppice.ids import DomainId, SequenceId
from coppice.messages.sampling import BEAMS_MAX, LIKELY_MAX
from coppice.messages.step import SamplingParams, TokenLogprobs
from coppice_offline.answers.prompt_search import BeamStep, PromptSearch, rounds
from coppice_offline.prompts import Read
from coppice_scheduler.core.state.request import Finish, Output, Request
from coppice_scheduler.edge.beams.search import BeamOptions
from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text
from coppice_scheduler.edge.text.detokenizer import DetokenizerFactory
from tests.fakes.oracle import beams_of_transformers, model_of, random_tokens
from tests.unit.tools.offline.test_offline_stream import is_at_rest

CLOSE = 1e-3
WIDE = BeamSearchOptions(beam_width=4, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return model_of(checkpoint)


def found_by_transformers(
    model: Any, prompt: list[int], options: BeamSearchOptions, ends: list[int]
) -> tuple[list[list[int]], list[float]]:
    return beams_of_transformers(
        model,
        prompt,
        ends,
        width=options.beam_width,
        count=options.num_answers,
        max_tokens=options.max_tokens or 16,
        length_penalty=options.length_penalty,
    )


def ids_of(generation: Generation) -> list[list[int]]:
    return [output.token_ids for output in generation.outputs]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 1.5])
@pytest.mark.parametrize(("width", "num_told", "num_stops"), [(4, None, 0), (5, 3, 4), (3, None, 9), (2, 1, 1)])
def test_answers_and_scores_are_those_of_transformers(
    llm: LLM, model: Any, checkpoint: Path, width: int, num_told: int | None, num_stops: int, length_penalty: float
) -> None:
    eos = sorted(load_checkpoint_text(checkpoint).eos_token_ids)
    prompts = [random_tokens(37, seed=width), random_tokens(3, seed=width + 1), random_tokens(16, seed=1)]
    with torch.inference_mode():
        stops = model(torch.tensor([prompts[0]])).logits[0, -1].topk(40).indices.tolist()[1::4][:num_stops]
    options = BeamSearchOptions(
        beam_width=width, n=num_told, max_tokens=9, length_penalty=length_penalty, stop_token_ids=stops
    )
    generations = llm.beam_search(prompts, options)
    for prompt, generation in zip(prompts, generations, strict=True):
        expected, scores = found_by_transformers(model, prompt, options, eos + stops)
        assert ids_of(generation) == expected
        assert [output.score for output in generation.outputs] == pytest.approx(scores, abs=CLOSE)
        for output in generation.outputs:
            has_ended = output.token_ids[-1] in {*eos, *stops}
            assert output.finish_reason == ("stop" if has_ended else "length")
            assert output.stop_reason == (output.token_ids[-1] if has_ended else None)
            assert output.usage.output_tokens == len(output.token_ids)
    assert is_at_rest(llm)


def test_a_stop_token_ends_an_answer_and_has_no_text(llm: LLM) -> None:
    (greedy,) = llm.generate("x", SamplingOptions(temperature=0, max_tokens=1, ignore_eos=True))
    options = BeamSearchOptions(beam_width=2, max_tokens=3, length_penalty=-5, stop_token_ids=greedy.token_ids)
    (found,) = llm.beam_search("x", options)
    (ended,) = [output for output in found.outputs if output.token_ids == greedy.token_ids]
    assert (ended.text, ended.finish_reason, ended.stop_reason) == ("", "stop", greedy.token_ids[0])


def test_ends_of_the_model_count_unless_they_are_ignored(llm: LLM, model: Any, checkpoint: Path) -> None:
    """The likeliest way to an end is found among all prompts of one token."""
    eos = sorted(load_checkpoint_text(checkpoint).eos_token_ids)
    with torch.inference_mode():
        ended = model(torch.arange(256)[:, None]).logits[:, -1].log_softmax(-1)[:, eos].max(-1).values
    prompt = [int(ended.argmax())]
    fields: dict[str, Any] = {"beam_width": 16, "max_tokens": 4, "length_penalty": -3}
    stopping, going_on = (
        llm.beam_search(prompt, BeamSearchOptions(**fields, ignore_eos=ignores))[0] for ignores in (False, True)
    )
    assert "stop" in {output.finish_reason for output in stopping.outputs}
    assert {len(ids) for ids in ids_of(going_on)} == {4}


def test_prompts_are_those_of_generate(llm: LLM, checkpoint: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog"
    (plain,) = llm.beam_search(text, WIDE)
    ids = plain.prompt_token_ids
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert plain.prompt == text
    for output in plain.outputs:
        assert output.text == tokenizer.decode(output.token_ids, clean_up_tokenization_spaces=False)
        assert output.logprobs is None
    same = [*llm.beam_search({"prompt": text}, WIDE), *llm.beam_search([ids, {"prompt_token_ids": ids}], WIDE)]
    assert [ids_of(each) for each in same] == [ids_of(plain)] * 3
    assert {each.usage.cached_tokens for each in same} == {len(ids) - 1}
    assert llm.beam_search([], WIDE) == []


def test_each_prompt_may_have_its_own_options(llm: LLM) -> None:
    prompts = ["one", "two", "three"]
    options = [BeamSearchOptions(beam_width=width, max_tokens=3 * width, ignore_eos=True) for width in (3, 1, 4)]
    together = llm.beam_search(prompts, options)
    assert [len(generation.outputs) for generation in together] == [3, 1, 4]
    for prompt, each, generation in zip(prompts, options, together, strict=True):
        assert ids_of(llm.beam_search(prompt, each)[0]) == ids_of(generation)
    assert llm.beam_search("x", BeamSearchOptions(beam_width=1))[0].usage.output_tokens <= 16


def test_one_beam_is_greedy_and_a_wide_search_is_likelier(llm: LLM) -> None:
    (greedy,) = llm.generate("one", SamplingOptions(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0))
    (narrow,) = llm.beam_search("one", BeamSearchOptions(beam_width=1, max_tokens=12, ignore_eos=True))
    assert ids_of(narrow) == ids_of(greedy)
    assert greedy.outputs[0].logprobs is not None
    mean = sum(each.logprob for each in greedy.outputs[0].logprobs) / 12
    assert narrow.outputs[0].score == pytest.approx(mean, abs=CLOSE)


def test_searches_need_little_memory_and_few_places(llm: LLM, checkpoint: Path) -> None:
    """Less than all searches at once would take, and than one of them has beams."""
    prompts = [random_tokens(30, seed=seed) for seed in range(5)]
    expected = [ids_of(generation) for generation in llm.beam_search(prompts, WIDE)]
    with LLM(checkpoint, num_blocks=8, max_running=3, threads=1) as small:
        assert [ids_of(generation) for generation in small.beam_search(prompts, WIDE)] == expected
        assert is_at_rest(small)


def test_answers_end_where_the_context_does(checkpoint: Path) -> None:
    with LLM(checkpoint, num_blocks=64, max_context=20, threads=1) as short:
        (found,) = short.beam_search("0123456789", BeamSearchOptions(beam_width=2, max_tokens=1000, ignore_eos=True))
    assert {len(ids) for ids in ids_of(found)} == {20 - len(found.prompt_token_ids)}


def told(step: BeamStep, token_ids: list[int]) -> None:
    """These are the likeliest, one as likely as the other."""
    logprobs = np.full(len(token_ids), -1, "<f4").tobytes()
    packed = np.array(token_ids, "<u4").tobytes()
    report = TokenLogprobs(SequenceId(1), 1, len(token_ids), logprobs[:4], packed, logprobs)
    step.take(Output(step.request.request_id, b"\5\0\0\0", Finish.LENGTH, logprobs=(report,)))


def search_of(max_tokens: int) -> PromptSearch:
    """Of two beams."""
    return PromptSearch(
        Read("x", b"\1\0\0\0"),
        BeamOptions(2, 1.0, max_tokens, frozenset()),
        2,
        lambda packed: Request("1", "t", DomainId("d"), packed, SamplingParams(), 1),
        DetokenizerFactory(Tokenizer(models.BPE())).start,
    )


@pytest.mark.parametrize(
    ("num_beams", "sizes"), [(6, [3, 6, 2]), (99, [3, 6, 2]), (4, [2, 4, 1, 2, 2]), (1, [1, 2, 1, 2, 1, 2, 2])]
)
def test_so_many_beams_run_together(num_beams: int, sizes: list[int]) -> None:
    searches = [search_of(max_tokens) for max_tokens in (2, 2, 3)]
    seen = []
    for steps in rounds(searches, num_beams):
        seen.append(len(steps))
        for step in steps:
            told(step, [5, 6, 7, 8])
    assert seen == sizes
    assert [each.num_tokens for each in searches] == [3, 3, 5]
    assert all(each.has_ended for each in searches)


def test_a_vocabulary_that_is_too_small_is_told() -> None:
    search = search_of(1)
    for steps in rounds([search], 2):
        for step in steps:
            told(step, [5])
    with pytest.raises(coppice.RequestFailed, match="found 1 answers; 2 were asked for"):
        search.generation()


def test_a_bar_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.beam_search(["a", "b", "c"], WIDE, progress=True)
    assert "3/3" in capsys.readouterr().err
    llm.beam_search(["a", "b", "c"], WIDE)
    assert capsys.readouterr().err == ""


def test_ctrl_c_ends_all_searches_and_leaves_the_llm_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt_and_step() -> bool:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return step()

    expected = llm.beam_search(["a", "b"], WIDE)
    assert llm._loaded is not None
    engine = llm._loaded.engine
    step, num_steps = engine.step, engine.stats().total_steps
    monkeypatch.setattr(engine, "step", interrupt_and_step)
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search(["a", "b"], WIDE)
    assert engine.stats().total_steps <= num_steps + 1, "nothing is computed for searches that have ended"
    assert is_at_rest(llm)
    assert [ids_of(each) for each in llm.beam_search(["a", "b"], WIDE)] == [ids_of(each) for each in expected]


def test_an_llm_that_searches_can_neither_be_closed_nor_called(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even between two steps of a search."""
    refused = []

    def take_and_close(self: PromptSearch) -> None:
        for act in (llm.close, lambda: llm.generate("x")):
            with pytest.raises(coppice.CoppiceError, match="at work") as error:
                act()
            refused.append(error)
        take(self)

    take = PromptSearch.take_step
    monkeypatch.setattr(PromptSearch, "take_step", take_and_close)
    llm.beam_search("x", WIDE)
    assert len(refused) == 2 * 12
    assert is_at_rest(llm)


def test_what_cannot_end_is_refused_and_what_just_fits_is_found(llm: LLM, checkpoint: Path) -> None:
    """The last token of an answer needs no place."""
    with LLM(checkpoint, num_blocks=3, threads=1) as small:
        with pytest.raises(UsageError, match="38 tokens and answers of 12 need room for 49; the KV memory holds 48"):
            small.beam_search(["x", random_tokens(38, seed=3)], WIDE)
        fitting = random_tokens(37, seed=3)
        assert ids_of(small.beam_search(fitting, WIDE)[0]) == ids_of(llm.beam_search(fitting, WIDE)[0])
        assert is_at_rest(small)


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda llm: llm.beam_search("", WIDE), "prompts is empty"),
        (lambda llm: llm.beam_search(["x", None], WIDE), r"prompts\[1\] is a NoneType"),
        (lambda llm: llm.beam_search("x", SamplingOptions()), "params is a SamplingOptions; it must be BeamSearchOpt"),
        (lambda llm: llm.beam_search("x", None), "params is a NoneType; it must be BeamSearchOptions"),
        (lambda llm: llm.beam_search(["x"], [4]), "params is a list with other entries"),
        (lambda llm: llm.beam_search(["x"], [WIDE, WIDE]), "params has 2 entries for 1 prompts"),
        (lambda llm: llm.beam_search("x", WIDE, progress=1), "progress is 1; it must be True or False"),
        (lambda llm: llm.generate("x", WIDE), "params is a BeamSearchOptions; it must be SamplingOptions"),
        (lambda llm: llm.beam_search("x", BeamSearchOptions(beam_width=1, stop_token_ids=[999])), "999 does not exist"),
        (
            lambda llm: llm.beam_search(
                "x", BeamSearchOptions(beam_width=BEAMS_MAX, stop_token_ids=range(LIKELY_MAX // BEAMS_MAX))
            ),
            "a search with 16 beams can have at most 15 stop tokens; this one has 17",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_name(llm: LLM, ask: Callable[[LLM], Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        ask(llm)
    assert is_at_rest(llm)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"beam_width": 0}, f"beam_width is 0; it must be an integer from 1 to {BEAMS_MAX}"),
        ({"beam_width": BEAMS_MAX + 1}, f"beam_width is {BEAMS_MAX + 1}; it must be an integer from 1 to {BEAMS_MAX}"),
        ({"beam_width": None}, "beam_width is None; it must be an integer"),
        ({"beam_width": 2.0}, "beam_width is 2.0; it must be an integer"),
        ({"beam_width": True}, "beam_width is True; it must be an integer"),
        ({"n": 3}, "n is 3; it must be an integer from 1 to beam_width, which is 2"),
        ({"n": 0}, "n is 0; it must be an integer from 1 to"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be an integer from 1 to"),
        ({"max_tokens": "x"}, "max_tokens is 'x'; it must be an integer"),
        ({"length_penalty": 10.5}, "length_penalty is 10.5; it must be a number from -10 to 10"),
        ({"length_penalty": None}, "length_penalty is None; it must be a number"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be True or False"),
        ({"stop_token_ids": "x"}, "stop_token_ids is 'x'; it must be a list of token ids"),
    ],
    ids=lambda value: repr(value) if isinstance(value, dict) else "",
)
def test_options_that_make_no_sense_are_refused_when_they_are_made(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=f"^{said}"):
        BeamSearchOptions(**{"beam_width": 2, **wrong})
