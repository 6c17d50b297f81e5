"""Values of wrong types are refused by name, when options are made or when a call is made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import coppice
from coppice import LLM, SamplingOptions
from coppice.errors import CoppiceError, UsageError
from coppice.messages.sampling import CHOICES_MAX

CHAT = [{"role": "user", "content": "Hello?"}]
WRONG: list[tuple[str, Any]] = [
    *[(name, value) for name in ("n", "best_of", "max_tokens", "min_tokens", "seed", "top_k", "logprobs")
      for value in ("x", 1.5, True, [1], ...)],
    *[(name, value) for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty",
                                 "repetition_penalty")
      for value in ("hot", True, [0.5], {}, 1j)],
    *[(name, value) for name in ("ignore_eos", "prompt_logprobs") for value in (1, "yes", None)],
    *[(name, None) for name in ("n", "min_tokens", "min_p", "frequency_penalty", "repetition_penalty")],
    ("stop", 5), ("stop", [5]), ("stop", b"x"), ("stop", {"x": 1}), ("stop", ["x", ""]), ("stop", [None]),
    ("stop_token_ids", 3), ("stop_token_ids", "x"), ("stop_token_ids", ["x"]), ("stop_token_ids", [1.0]),
    ("stop_token_ids", [True]), ("stop_token_ids", {3: 1}), ("stop_token_ids", b"x"),
    ("logit_bias", [3]), ("logit_bias", {"3": 1}), ("logit_bias", {3: "x"}), ("logit_bias", {3: None}),
    ("logit_bias", {True: 1}), ("logit_bias", {3: float("nan")}), ("logit_bias", 3),
    ("structured_outputs", 3), ("structured_outputs", ["regex"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG, ids=repr)
def test_options_of_wrong_types_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name} (is .*; it must|cannot be used: .* must) be "):
        SamplingOptions(**{name: value})


def test_a_refusal_says_what_would_be_right() -> None:
    said = []
    for wrong in ({"stop": 5}, {"temperature": "hot"}, {"n": 1.5}, {"logit_bias": [3]}, {"stop_token_ids": "x" * 999}):
        with pytest.raises(UsageError) as refused:
            SamplingOptions(**wrong)  # type: ignore[arg-type]
        said.append(str(refused.value))
    assert said[:4] == [
        "stop is 5; it must be a text, or several, none of them empty",
        "temperature is 'hot'; it must be a number from 0 to 2",
        f"n is 1.5; it must be an integer from 1 to {CHOICES_MAX}",
        "logit_bias is [3]; it must be a mapping of token ids to numbers from -100 to 100",
    ]
    assert len(said[4]) < 200


def test_what_is_as_good_is_taken(llm: LLM) -> None:
    plain = SamplingOptions(
        temperature=0.5, n=2, seed=3, max_tokens=4, stop=["x"], stop_token_ids=[5], logit_bias={7: 2.0}
    )
    same = SamplingOptions(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        n=np.int64(2),  # type: ignore[arg-type]
        seed=np.uint64(3),  # type: ignore[arg-type]
        max_tokens=np.int32(4),  # type: ignore[arg-type]
        stop=("x",),
        stop_token_ids=np.array([5]),  # type: ignore[arg-type]
        logit_bias={np.int64(7): Fraction(2)},  # type: ignore[dict-item]
    )
    assert plain == same
    assert llm.generate("x", plain)[0].outputs[1].token_ids == llm.generate("x", same)[0].outputs[1].token_ids
    assert SamplingOptions(stop=None, stop_token_ids=None, logit_bias=None) == SamplingOptions()
    assert SamplingOptions(stop_token_ids={5}) == SamplingOptions(stop_token_ids=[5])


def test_options_do_not_change_with_what_they_were_made_of(llm: LLM) -> None:
    ids, biases = [5], {5: 1.0}
    options = SamplingOptions(stop_token_ids=ids, logit_bias=biases)
    ids.append(4_000)
    biases[4_000] = 500
    assert llm.generate("x", options)


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda llm: llm.generate(None), "prompts is a NoneType"),
        (lambda llm: llm.generate({"text": "a"}), "prompts is a mapping with 'text'; it must have prompt, a text, or"),
        (lambda llm: llm.generate({}), "prompts is a mapping with nothing; it must"),
        (lambda llm: llm.generate({"prompt": [5]}), "prompts is a mapping with 'prompt'; it must have prompt, a text"),
        (
            lambda llm: llm.generate({"prompt": "a", "cache_salt": "s"}),
            "a mapping with 'prompt', 'cache_salt'; it must",
        ),
        (lambda llm: llm.generate({"prompt_token_ids": "a"}), "prompts is a mapping with 'prompt_token_ids'; it must"),
        (lambda llm: llm.generate({"prompt_token_ids": 5}), "prompts.prompt_token_ids is a int"),
        (lambda llm: llm.generate([{"prompt_token_ids": [5, 999]}]), r"prompts\[0\].prompt_token_ids has 999"),
        (lambda llm: llm.generate(b"abc"), "prompts is a bytes"),
        (lambda llm: llm.generate([{"prompt": ""}]), r"prompts\[0\].prompt is empty"),
        (lambda llm: llm.generate(["a", 5]), r"prompts\[1\] is a int"),
        (lambda llm: llm.generate([5, "a"]), "prompts has 'a', which is no token id"),
        (lambda llm: llm.generate(["a", None]), r"prompts\[1\] is a NoneType"),
        (lambda llm: llm.generate([1.0, 2.0]), r"prompts\[0\] is a float"),
        (lambda llm: llm.generate([[1, True]]), "True, which is no token id"),
        (lambda llm: llm.generate("a", {"n": 2}), "params is a dict"),
        (lambda llm: llm.generate("a", 7), "params is a int"),
        (lambda llm: llm.generate(["a"], [{"n": 2}]), "params is a list with other entries"),
        (lambda llm: llm.generate("a", progress="yes"), "progress is 'yes'; it must be True or False"),
        (lambda llm: llm.chat(None), "messages must be"),
        (lambda llm: llm.chat({"role": "user", "content": "a"}), "messages must be"),
        (lambda llm: llm.chat(["a"]), r"messages\[0\] must be"),
        (lambda llm: llm.chat([[]]), r"messages\[0\] must be"),
        (lambda llm: llm.chat([CHAT, CHAT[0]]), r"messages\[1\] must be"),
        (lambda llm: llm.chat([*CHAT, CHAT]), r"messages\[1\] must be"),
        (lambda llm: llm.chat([CHAT, [{"role": "user", "content": 5}]]), r"messages\[1\]: messages\[0\].content must"),
        (lambda llm: llm.chat([{"role": 5, "content": "a"}]), r"messages\[0\].role must be a string"),
        (lambda llm: llm.chat([{"role": "king", "content": "a"}]), r"messages\[0\].role is 'king'"),
        (lambda llm: llm.chat([{"role": "user", "content": "a", "hue": 1}]), r"messages\[0\].hue is not supported"),
        (lambda llm: llm.chat(CHAT, {"n": 2}), "params is a dict"),
        (lambda llm: llm.chat(CHAT, chat_template_kwargs=[1]), "chat_template_kwargs is a list"),
        (lambda llm: llm.chat(CHAT, chat_template_kwargs={"hue": 1}), "chat_template_kwargs.hue is not read"),
    ],
)
def test_calls_with_wrong_types_are_refused_by_name(llm: LLM, ask: Callable[[LLM], Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        ask(llm)


def test_everything_public_is_an_attribute_of_the_package() -> None:
    for name in coppice.__all__:
        assert getattr(coppice, name) is not None
    errors = (coppice.PromptError, coppice.UsageError, coppice.RequestFailed, coppice.EngineBroken)
    assert all(issubclass(error, coppice.CoppiceError) for error in (*errors, coppice.UnavailableError))
    assert coppice.CoppiceError is CoppiceError
    assert isinstance(coppice.Usage(1, 0, 1), coppice.Usage)


def test_errors_and_results_bring_no_torch() -> None:
    names = (
        "CoppiceError EngineBroken PromptError RequestFailed UnavailableError UsageError Completion Generation Piece"
    )
    code = (
        "import coppice, sys\n"
        f"for name in {names.split()}: getattr(coppice, name)\n"
        "sys.exit(any(name.split('.')[0] in ('torch', 'numpy', 'grpc') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
