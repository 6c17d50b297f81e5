"""`coppice.LLM` on a tiny checkpoint: the tokens of `transformers`, the text of the tokenizer, clear refusals."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import coppice
from coppice import LLM, SamplingOptions
from coppice.errors import CoppiceError, UsageError
from coppice_offline.interface.errors import PromptError
from coppice_offline.interface.results import Completion
from coppice_scheduler.edge.frontend.sampling_options import seed_of_choice
from tests.fakes.checkpoints import MAX_CONTEXT
from tests.fakes.oracle import Oracle

ROOT = Path(__file__).resolve().parents[4]
GREEDY = SamplingOptions(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["The quick brown fox", "jumps", "over the lazy dog, again and again and again", "ok"]


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


def test_greedy_tokens_are_those_of_transformers(llm: LLM, oracle: Oracle) -> None:
    generations = llm.generate(PROMPTS, GREEDY)
    assert [generation.prompt for generation in generations] == PROMPTS
    for generation in generations:
        assert len(generation.token_ids) == 12
        assert generation.finish_reason == "length"
        oracle.check(generation.prompt_token_ids, generation.token_ids)
    llm.check()


def test_text_is_what_the_tokenizer_makes_of_the_tokens(llm: LLM, checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for generation in llm.generate(PROMPTS, SamplingOptions(max_tokens=40, seed=3)):
        ids = generation.token_ids
        assert generation.text == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_token_ids_are_prompts_too_one_or_several(llm: LLM) -> None:
    ids = llm.generate(PROMPTS[0], GREEDY)[0].prompt_token_ids
    texts = llm.generate([PROMPTS[0]], GREEDY)
    for asked in (ids, [ids], np.array(ids), (tuple(ids),)):
        (generation,) = llm.generate(asked, GREEDY)  # type: ignore[arg-type]
        assert generation.prompt is None
        assert generation.token_ids == texts[0].token_ids


def test_prompts_are_taken_as_mappings_as_in_vllm(llm: LLM) -> None:
    text, ids = {"prompt": PROMPTS[0]}, {"prompt_token_ids": llm.generate(PROMPTS[0], GREEDY)[0].prompt_token_ids}
    (expected,) = llm.generate(PROMPTS[0], GREEDY)
    found = [*llm.generate(text, GREEDY), *llm.generate([text, ids], GREEDY)]
    assert [generation.prompt for generation in found] == [PROMPTS[0], PROMPTS[0], None]
    for generation in found:
        assert generation.prompt_token_ids == expected.prompt_token_ids
        assert generation.token_ids == expected.token_ids
    assert "".join(piece.text for piece in llm.stream(ids, GREEDY)) == expected.text


def test_sampling_does_not_depend_on_the_batch(llm: LLM) -> None:
    options = [SamplingOptions(seed=number, max_tokens=15, temperature=0.9) for number in range(len(PROMPTS))]
    together = llm.generate(PROMPTS, options)
    for prompt, each, generation in reversed(list(zip(PROMPTS, options, together, strict=True))):
        assert llm.generate(prompt, each)[0].token_ids == generation.token_ids


def test_a_prefix_is_cached_across_calls(llm: LLM) -> None:
    stem = "a beginning of at least sixteen tokens, "
    first = llm.generate(stem + "once", GREEDY)[0]
    second = llm.generate(stem + "twice", GREEDY)[0]
    pairs = zip(first.prompt_token_ids, second.prompt_token_ids, strict=False)
    common = next(place for place, (one, other) in enumerate(pairs) if one != other)
    assert second.usage.cached_tokens == common > 32, "two whole blocks, and what they have in common of the third"
    assert second.usage.prompt_tokens == len(second.prompt_token_ids) == len(first.prompt_token_ids) + 1
    assert second.usage.output_tokens == 12


def test_several_continuations_of_one_prompt(llm: LLM) -> None:
    prompt = "a prompt of more than a block of sixteen tokens, of which all have to be read once"
    (generation,) = llm.generate(prompt, SamplingOptions(n=4, seed=5, max_tokens=10, temperature=1.0))
    assert [output.index for output in generation.outputs] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in generation.outputs}) == 4
    assert generation.usage.output_tokens == sum(len(output.token_ids) for output in generation.outputs)
    for output in generation.outputs:
        seed = seed_of_choice(5, output.index)
        (alone,) = llm.generate(prompt, SamplingOptions(seed=seed, max_tokens=10, temperature=1.0))
        assert alone.token_ids == output.token_ids
    llm.check()


def test_a_stop_text_ends_the_output_where_it_is_complete(llm: LLM) -> None:
    free = llm.generate(PROMPTS[2], SamplingOptions(seed=1, max_tokens=30, temperature=1.0, ignore_eos=True))[0]
    stop = free.text[8:10]
    (stopped,) = llm.generate(
        PROMPTS[2], SamplingOptions(seed=1, max_tokens=30, temperature=1.0, ignore_eos=True, stop=stop)
    )
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert stopped.outputs[0].stop_reason == stop
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) < 30


def test_stop_texts_count_only_after_min_tokens(llm: LLM) -> None:
    def generate(**options: Any) -> Completion:
        drawn = SamplingOptions(seed=1, temperature=1.0, ignore_eos=True, **options)
        return llm.generate(PROMPTS[2], drawn)[0].outputs[0]

    free, begun = generate(max_tokens=60), generate(max_tokens=10)
    again = next(char for char in begun.text if char in free.text[len(begun.text) :])
    stopped = generate(max_tokens=60, min_tokens=10, stop=again)
    assert stopped.text == free.text[: free.text.index(again, len(begun.text))]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", again)
    assert len(generate(max_tokens=60, stop=again).token_ids) <= 10


def test_a_stop_token_ends_the_output_and_is_told(llm: LLM) -> None:
    free = llm.generate(PROMPTS[0], GREEDY)[0]
    token_id = free.token_ids[5]
    (stopped,) = llm.generate(
        PROMPTS[0], SamplingOptions(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[token_id])
    )
    first = free.token_ids.index(token_id)
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.outputs[0].stop_reason == token_id
    assert stopped.finish_reason == "stop"


def test_chat_uses_the_template_of_the_checkpoint(llm: LLM, oracle: Oracle, checkpoint: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    (generation,) = llm.chat(messages, GREEDY)
    expected = AutoTokenizer.from_pretrained(checkpoint).apply_chat_template(messages, add_generation_prompt=True)
    assert generation.prompt_token_ids == expected["input_ids"]
    oracle.check(generation.prompt_token_ids, generation.token_ids)
    assert len(llm.chat([messages, messages[1:]], GREEDY)) == 2


def test_output_is_cut_where_the_context_ends(checkpoint: Path) -> None:
    short = LLM(checkpoint, num_blocks=16, max_context=20, threads=1)
    (generation,) = short.generate("0123456789", SamplingOptions(max_tokens=1_000, temperature=0, ignore_eos=True))
    assert len(generation.prompt_token_ids) + len(generation.token_ids) == 20
    assert generation.finish_reason == "length"


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda llm: llm.generate(""), "prompts is empty"),
        (lambda llm: llm.generate(["ok", ""]), r"prompts\[1\] is empty"),
        (lambda llm: llm.generate([[]]), r"prompts\[0\] is empty"),
        (lambda llm: llm.generate("x" * MAX_CONTEXT), f"prompts has {MAX_CONTEXT} tokens"),
        (lambda llm: llm.generate([[1, 320]]), "320, which is no token id"),
        (lambda llm: llm.generate([1, -1]), "-1, which is no token id"),
        (lambda llm: llm.generate(7), "prompts is a int"),
        (lambda llm: llm.generate([None]), r"prompts\[0\] is a NoneType"),
        (lambda llm: llm.generate(["a", "b"], [SamplingOptions()]), "params has 1 entries for 2 prompts"),
        (lambda llm: llm.generate("a", SamplingOptions(stop_token_ids=[4_000])), "token id 4000 does not exist"),
        (lambda llm: llm.chat("hello"), "messages must be"),
        (lambda llm: llm.chat([]), "messages must be"),
        (lambda llm: llm.chat([{"role": "user"}]), r"messages\[0\].content is required"),
    ],
)
def test_what_cannot_run_is_refused_by_name(llm: LLM, ask: Callable[[LLM], Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        ask(llm)
    assert llm.generate("still usable", GREEDY)


def test_no_prompts_are_no_generations(llm: LLM) -> None:
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"n": 0},
        {"n": 129},
        {"best_of": 129},
        {"best_of": 2, "n": 3},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"stop": ["ok", ""]},
        {"logprobs": 21},
        {"logit_bias": {1: 101}},
        {"repetition_penalty": 0},
    ],
)
def test_options_that_make_no_sense_are_refused_when_they_are_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SamplingOptions(**wrong)


def test_a_model_that_is_none_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(CoppiceError, match="no such folder"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"config\.json is missing"):
        LLM(tmp_path)
    with pytest.raises(UsageError, match="num_blocks"):
        LLM(checkpoint, num_blocks=-1)
    with pytest.raises(UsageError, match="device is 'tpu'"):
        LLM(checkpoint, device="tpu")  # type: ignore[arg-type]


def test_a_prompt_that_exceeds_the_memory_is_refused(checkpoint: Path) -> None:
    small = LLM(checkpoint, num_blocks=4, threads=1)
    with pytest.raises(PromptError, match="70 tokens"):
        small.generate("x" * 70)
    assert small.generate("x" * 20, GREEDY)


def test_importing_the_package_stays_light() -> None:
    code = (
        "import coppice, sys; sys.exit(any(name.split('.')[0] in ('torch', 'numpy', 'grpc') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        coppice.LMM  # noqa: B018


def test_a_bar_is_shown_where_it_is_wanted(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    assert capsys.readouterr().err == ""
    llm.generate(PROMPTS, GREEDY, progress=True)
    shown = capsys.readouterr()
    assert "4/4" in shown.err
    assert shown.out == ""


def test_the_example_in_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(import coppice\n.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 3
    assert int(lines[-1].split(" of ")[0]) > 16, "it shows what the cache is for"
