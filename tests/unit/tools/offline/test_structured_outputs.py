"""Outputs of `coppice.LLM` in a given form, by a model without sense: only the grammar can have made them so."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import pytest

from coppice import LLM, SamplingOptions
from coppice.errors import UsageError
from coppice_offline import grammars

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{2,5}-\d{3}"
CHOICES = ["left", "right", "straight on", "Grüße"]
LARK = 'start: "<" WORD ("," WORD){1,3} ">"\nWORD: /[xyz]{1,4}/'
GBNF = 'root ::= "<" word ("," word)? ">"\nword ::= [xyz] [xyz]'
LIST = re.compile(r"<[xyz]{1,4}(,[xyz]{1,4}){1,3}>")
PAIR = re.compile(r"<[xyz]{2}(,[xyz]{2})?>")
PROMPTS = ["The quick brown fox", "jumps", "over the lazy dog, again and again and again", "ok"]


def options(wanted: dict[str, Any] | None, seed: int = 1, **more: Any) -> SamplingOptions:
    return SamplingOptions(
        **{"max_tokens": 600, "temperature": 1.2, "seed": seed, "structured_outputs": wanted, **more}
    )


def is_in_form(wanted: dict[str, Any], text: str) -> bool:
    ((kind, value),) = wanted.items()
    match kind:
        case "json":
            schema = json.loads(value) if isinstance(value, str) else value
            return jsonschema_rs.validator_for(schema).is_valid(json.loads(text))
        case "json_object":
            return isinstance(json.loads(text), dict)
        case "regex":
            return re.fullmatch(value, text) is not None
        case "choice":
            return text in value
    return (LIST if value == LARK else PAIR).fullmatch(text) is not None


FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"json": json.dumps(SCHEMA)},
    {"regex": REGEX},
    {"choice": CHOICES},
    {"grammar": LARK},
    {"grammar": GBNF},
]


@pytest.mark.parametrize("wanted", FORMS, ids=lambda wanted: repr(wanted)[:40])
def test_outputs_have_the_form(llm: LLM, wanted: dict[str, Any]) -> None:
    free = llm.generate(PROMPTS, [options(None, seed, max_tokens=40) for seed in range(4)])
    assert not [output.text for output in free if len(output.text) < 20], "the model ends by itself: nothing is shown"
    for temperature in (0, 1.2):
        asked = [options(wanted, seed, temperature=temperature) for seed in range(4)]
        for generation in llm.generate(PROMPTS, asked):
            assert generation.finish_reason == "stop"
            assert is_in_form(wanted, generation.text), generation.text
    llm.check()


def test_any_object_is_an_object_up_to_where_it_is_cut(llm: LLM) -> None:
    """A model without sense comes to no end; what there is of its object is the beginning of one."""
    (generation,) = llm.generate("x", options({"json_object": True}, max_tokens=200))
    if generation.finish_reason == "stop":
        assert is_in_form({"json_object": True}, generation.text)
    else:
        assert generation.finish_reason == "length"
        assert generation.text.startswith("{")


def test_all_continuations_have_the_form_and_are_those_of_their_seeds(llm: LLM) -> None:
    prompt = "a prompt of more than a block of sixteen tokens, of which all have to be read once"
    wanted = {"json": SCHEMA}
    (generation,) = llm.generate(prompt, options(wanted, seed=5, n=3))
    assert len({output.text for output in generation.outputs}) == 3
    for output in generation.outputs:
        assert output.finish_reason == "stop"
        assert is_in_form(wanted, output.text), output.text
    again = llm.generate([prompt, "other"], options(wanted, seed=5, n=3))[0]
    assert [output.token_ids for output in again.outputs] == [output.token_ids for output in generation.outputs]
    llm.check()


def test_who_asks_for_no_form_gets_the_same_tokens_beside_those_who_do(llm: LLM) -> None:
    free = [options(None, seed, max_tokens=30, logprobs=2) for seed in range(len(PROMPTS))]
    alone = llm.generate(PROMPTS, free)
    forms = [options(wanted, seed) for seed, wanted in enumerate(FORMS)]
    prompts = [*PROMPTS, *["another prompt"] * len(FORMS)]
    together = llm.generate(prompts[::-1], [*free, *forms][::-1])[::-1]
    for before, beside in zip(alone, together[: len(PROMPTS)], strict=True):
        assert beside.token_ids == before.token_ids
        assert beside.outputs[0].logprobs == before.outputs[0].logprobs
    for wanted, generation in zip(FORMS, together[len(PROMPTS) :], strict=True):
        assert is_in_form(wanted, generation.text), generation.text


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    """The first token is forced, so its own probability would be 1 if the grammar had a part in it."""
    prompt = "a prompt"
    (forced,) = llm.generate(prompt, options({"regex": "zzz"}, logprobs=3, temperature=0))
    (free,) = llm.generate(prompt, options(None, logprobs=3, temperature=0, max_tokens=1))
    assert forced.text == "zzz"
    assert forced.outputs[0].logprobs is not None
    assert free.outputs[0].logprobs is not None
    assert forced.outputs[0].logprobs[0].top == pytest.approx(free.outputs[0].logprobs[0].top, abs=1e-3)
    assert forced.outputs[0].logprobs[0].logprob < -0.1


def test_a_limit_of_tokens_may_cut_an_output(llm: LLM) -> None:
    (generation,) = llm.generate("x", options({"regex": "a{30}"}, max_tokens=7))
    assert (generation.text, generation.finish_reason) == ("a" * 7, "length")


def test_a_stop_text_still_ends_an_output(llm: LLM) -> None:
    (generation,) = llm.generate("x", options({"regex": "abcdef"}, stop="cd"))
    assert (generation.text, generation.finish_reason) == ("ab", "stop")


def test_a_bias_chooses_within_the_form(llm: LLM) -> None:
    for text, other in (("yes", "no"), ("no", "yes")):
        first, outside = (llm.generate("x", options({"choice": [one]}))[0].token_ids[0] for one in (text, "q"))
        wanted = options({"choice": [text, other]}, logit_bias={first: 50, outside: 100})
        assert llm.generate("x", wanted)[0].text == text


def test_chats_have_the_form(llm: LLM) -> None:
    (generation,) = llm.chat([{"role": "user", "content": "which way?"}], options({"choice": CHOICES}))
    assert generation.text in CHOICES


def test_grammars_that_are_not_kept_any_more_are_compiled_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "KEPT_MAX", 2)
    texts = [chr(ord("a") + number) * 3 for number in range(12)]
    for _ in range(2):
        generations = llm.generate(["x"] * 12, [options({"choice": [text]}) for text in texts])
        assert [generation.text for generation in generations] == texts


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"regex": "("}, "structured_outputs.*unclosed group"),
        ({"regex": "(?=a)b"}, "structured_outputs.*look-around"),
        ({"regex": ""}, "structured_outputs.*empty"),
        ({"regex": 5}, r"structured_outputs\.regex must be a string"),
        ({"json": "{"}, "structured_outputs.*no JSON"),
        ({"json": {"not": {}}}, 'structured_outputs.*"not"'),
        ({"json": [1]}, r"structured_outputs\.json must be a JSON schema"),
        ({"json": {"enum": ["x" * 70_000]}}, "structured_outputs.*longer than 64 KiB"),
        ({"choice": []}, "structured_outputs.*one choice at least"),
        ({"choice": ["a", ""]}, "structured_outputs.*none may be empty"),
        ({"choice": "a"}, r"structured_outputs\.choice must be a list of strings"),
        ({"grammar": "start: x"}, "structured_outputs.*unknown name"),
        ({"grammar": "root ::= ("}, "structured_outputs.*no GBNF"),
        ({"hue": 1}, r"structured_outputs\.hue is not supported"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs must have exactly one"),
        ("a", "structured_outputs must be an object"),
    ],
)
def test_a_form_that_cannot_be_is_refused_by_name(llm: LLM, wanted: Any, words: str) -> None:
    """When the options are made, or else when they are used, and before anything is computed."""
    with pytest.raises(UsageError, match=words):
        llm.generate(PROMPTS, options(wanted))
    (generation,) = llm.generate("still usable", options({"regex": "a"}))
    assert generation.text == "a"


@pytest.mark.parametrize("wanted", [None, {}])
def test_no_form_is_any_output(llm: LLM, wanted: dict[str, Any] | None) -> None:
    plain = SamplingOptions(max_tokens=12, temperature=0, ignore_eos=True, min_tokens=3)
    same = options(wanted, max_tokens=12, temperature=0, ignore_eos=True, min_tokens=3)
    assert llm.generate("x", same)[0].token_ids == llm.generate("x", plain)[0].token_ids


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_tokens": 1}])
def test_what_contradicts_a_form_is_refused_when_options_are_made(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="structured_outputs say where the output ends; leave out ignore_eos and"):
        options({"regex": "a"}, **more)
    assert options({"regex": "a"}, ignore_eos=False, min_tokens=0)
