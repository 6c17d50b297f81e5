"""Grammars on the demo model's tokenizer: which tokens may come next, where an answer ends, and what is refused."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import Tokenizer

from coppice.grammar import GrammarError, Grammars, Matcher

TOKENIZER = Path(__file__).resolve().parents[4] / "shared/coppice/demo_model/tokenizer.json"
VOCAB = 4096
END = 0
WALK_MAX = 400  # tokens


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER.read_text(encoding="utf-8"), VOCAB, (END,))


def packed(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.uint32)


def allowed(matcher: Matcher, vocab_size: int = VOCAB) -> list[int]:
    words = np.full(-(-vocab_size // 32), 0xDEADBEEF, np.uint32)  # nothing of what was there stays
    matcher.fill(words)
    bits = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def regex(pattern: str) -> str:
    return str(LLMatcher.grammar_from_regex(pattern))


def lark(text: str) -> str:
    return str(LLMatcher.grammar_from_lark(text))


def schema(wanted: dict[str, Any]) -> str:
    compact = {"whitespace_flexible": False}
    return str(LLMatcher.grammar_from_json_schema(json.dumps(wanted), overrides=compact))


def choice(texts: list[str]) -> str:
    return lark("start: " + " | ".join(map(json.dumps, texts)))


# --- tokens


def test_only_tokens_that_the_form_goes_on_with_are_allowed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.compile(regex("ab+"))
    assert {tokenizer.id_to_token(token) for token in allowed(matcher)} == {"a", "ab"}
    matcher.take(packed(tokenizer.token_to_id("ab")))
    assert {tokenizer.id_to_token(token) for token in allowed(matcher)} == {"b", "bb", "<|endoftext|>"}


def test_all_allowed_tokens_are_taken_and_all_others_refused(grammars: Grammars) -> None:
    compiled = grammars.compile(regex("(?:no|not|nothing)[.!]?"))
    may = set(allowed(compiled))
    assert 2 <= len(may) < 20
    for token in range(VOCAB):
        matcher = compiled.copy()
        if token in may:
            matcher.take(packed(token))
            continue
        with pytest.raises(GrammarError):
            matcher.take(packed(token))


def test_the_end_token_is_all_that_is_left_of_a_whole_form(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.compile(regex("ab"))
    assert END not in allowed(matcher)
    matcher.take(packed(tokenizer.token_to_id("ab")))
    assert allowed(matcher) == [END]


def test_tokens_are_taken_together_or_one_by_one(grammars: Grammars, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode('{"name":"value","list":[1,2').ids
    compiled = grammars.compile(schema({"type": "object"}))
    together, one_by_one = compiled.copy(), compiled.copy()
    together.take(packed(*tokens))
    for token in tokens:
        assert token in allowed(one_by_one)
        one_by_one.take(packed(token))
    one_by_one.take(packed())
    assert allowed(together) == allowed(one_by_one)
    assert tokenizer.token_to_id(",") in allowed(together)


def test_all_is_allowed_and_nothing_read_after_the_end_token(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.compile(regex("ab?"))
    matcher.take(packed(tokenizer.token_to_id("a"), END, 4000, 4001))
    assert allowed(matcher) == list(range(VOCAB))
    matcher.take(packed(4002))
    assert allowed(matcher) == list(range(VOCAB))


def test_any_end_token_ends_an_answer(tokenizer: Tokenizer) -> None:
    matcher = Grammars(TOKENIZER.read_text(encoding="utf-8"), VOCAB, {4000, END}).compile(regex("ab"))
    matcher.take(packed(tokenizer.token_to_id("ab")))
    assert allowed(matcher) == [END, 4000]
    matcher.take(packed(4000, 17))
    assert len(allowed(matcher)) == VOCAB


@pytest.mark.parametrize("vocab_size", [4097, 4127, 4128, 5000])
def test_logits_of_no_token_are_never_allowed(vocab_size: int) -> None:
    matcher = Grammars(TOKENIZER.read_text(encoding="utf-8"), vocab_size, (END,)).compile(regex("(?s:.*)"))
    found = allowed(matcher, vocab_size)
    assert len(found) > 3000
    assert max(found) < VOCAB
    with pytest.raises(GrammarError, match="out of range"):
        matcher.take(packed(vocab_size))


# --- copies


def test_copies_go_their_own_ways(grammars: Grammars, tokenizer: Tokenizer) -> None:
    compiled = grammars.compile(regex("(?:ab|ba)c"))
    first, second, ended = compiled.copy(), compiled.copy(), compiled.copy()
    first.take(packed(tokenizer.token_to_id("a")))
    third = first.copy()
    second.take(packed(tokenizer.token_to_id("b")))
    with pytest.raises(GrammarError):
        first.take(packed(tokenizer.token_to_id("x")))
    ended.take(packed(*tokenizer.encode("abc").ids, END))

    def firsts(matcher: Matcher) -> set[str]:
        return {tokenizer.id_to_token(token)[0] for token in allowed(matcher)}

    assert firsts(compiled) == {"a", "b"}
    assert firsts(second) == {"a"}
    assert firsts(third) == {"b"}
    assert len(allowed(ended.copy())) == VOCAB, "a copy of what ended has ended"


# --- errors


def test_what_was_refused_stays_so(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.compile(regex("ab+"))
    with pytest.raises(GrammarError, match="satisfy"):
        matcher.take(packed(tokenizer.token_to_id("x")))
    with pytest.raises(GrammarError):
        matcher.take(packed(tokenizer.token_to_id("a")))
    with pytest.raises(GrammarError):
        allowed(matcher)


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        "{",
        "start: (",
        '{"grammars": []}',
        regex("("),
        regex("a{3,1}"),
        regex("(?=a)b"),
        lark("start: nothing"),
        lark('other: "a"'),
        lark("start: /[^\\s\\S]/"),  # no text at all
        schema({"type": "no such type"}),
        schema({"$ref": "#/$defs/nowhere"}),
        schema({"type": "integer", "minimum": 3, "maximum": 2}),
        schema({"type": "array", "uniqueItems": True, "contains": {"type": "null"}}),
    ],
)
def test_bad_grammars_are_refused_with_a_reason(grammars: Grammars, grammar: str) -> None:
    with pytest.raises(GrammarError) as refused:
        grammars.compile(grammar)
    assert str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_model_without_end_tokens_has_no_grammars() -> None:
    with pytest.raises(GrammarError, match="no end token"):
        Grammars(TOKENIZER.read_text(encoding="utf-8"), VOCAB, ())


@pytest.mark.parametrize(
    ("text", "vocab_size", "ends"), [("{}", VOCAB, (END,)), (None, 100, (END,)), (None, VOCAB, (VOCAB,))]
)
def test_an_unfit_tokenizer_has_no_grammars(text: str | None, vocab_size: int, ends: tuple[int, ...]) -> None:
    with pytest.raises(GrammarError, match="tokenizer cannot be used"):
        Grammars(text or TOKENIZER.read_text(encoding="utf-8"), vocab_size, ends)


# --- limits


def follow(grammars: Grammars, grammar: str, seed: int = 0) -> list[int]:
    """A random answer, whole."""
    matcher, draw, tokens = grammars.compile(grammar), random.Random(seed), []
    for _ in range(WALK_MAX):
        may = allowed(matcher)
        assert may, "an answer that can neither go on nor end"
        tokens.append(draw.choice(may))
        matcher.take(packed(tokens[-1]))
        if tokens[-1] == END:
            return tokens
    raise AssertionError("it comes to no end")


def doubling(count: int) -> str:
    """2 ** count times "a", all forced."""
    return lark("start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(count)) + f'r{count}: "a"')


@pytest.mark.parametrize(
    "grammar",
    [
        regex("(?s:.*)a(?s:.){300}b"),  # 2 ** 300 states of a lexer
        regex("(?:[a-z]{0,300}){0,300}"),
        regex("(?:[a-z]{0,100}){0,100}"),  # takes a second where a step may have a hundred times as much
        regex("(" * 5000 + "a" + ")" * 5000),
        lark('start: "a" start'),
        lark("start: " + "(" * 5000 + '"a"' + ")" * 5000),
        doubling(14),  # within the library's own limits, beyond ours
        doubling(40),
        lark('start: "a" B\nB: /x/ & /y/'),  # nothing can follow its "a"
    ],
)
def test_hostile_grammars_meet_a_limit_and_leave_the_others_alone(grammars: Grammars, grammar: str) -> None:
    with pytest.raises(GrammarError):
        follow(grammars, grammar)
    assert follow(grammars, regex("ab"))[-1] == END


@pytest.mark.parametrize(
    "grammar",
    [
        regex("(?:a|b){0,40}a(?:a|b){20}"),
        regex("(?:[a-z]{0,20}){0,40}"),
        regex("(?:(?:a{1,100}){1,100}){1,100}b"),
        lark('start: a a a a a a a a\na: a a | "x" | ""'),
        schema({"enum": [f"v{number:05}" for number in range(5000)]}),
    ],
)
def test_large_and_ambiguous_grammars_within_the_limits_are_followed(grammars: Grammars, grammar: str) -> None:
    assert follow(grammars, grammar)[-1] == END


# --- whatever is allowed leads to the form

_TEXTS = st.text(alphabet=st.sampled_from("abcxyz 019.,\"\\\n'é中🙂"), min_size=1, max_size=12)
_PIECES = st.sampled_from(
    [
        "a",
        "the",
        "[a-f]",
        "[^x-z]",
        "[0-9]{2}",
        "(?:ab|cd)",
        "\\.",
        "é",
        "[中-国]",
        "\\\\",
        '"',
        "\\n",
        "z?",
        "[A-Z]{0,3}",
    ]
)


def _combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs.map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        pairs.map("".join),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda made: f"(?:{made[0]}){{{made[1]},{made[1] + made[2]}}}"
        ),
    )


_REGEXES = st.recursive(_PIECES, _combined, max_leaves=8)
_SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.recursive(
    st.one_of(
        st.just({"type": "boolean"}),
        st.tuples(st.integers(-200, 200), st.integers(0, 300)).map(
            lambda made: {"type": "integer", "minimum": made[0], "maximum": made[0] + made[1]}
        ),
        st.integers(0, 6).map(lambda length: {"type": "string", "maxLength": length}),
        st.lists(st.one_of(_TEXTS, st.integers(-9, 9), st.none()), min_size=1, max_size=4).map(
            lambda values: {"enum": values}
        ),
    ),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["a", "b c", 'q"', "é"]), inner, max_size=3).map(
            lambda made: {"type": "object", "properties": made, "required": [*made], "additionalProperties": False}
        ),
        st.tuples(inner, st.integers(0, 2)).map(
            lambda made: {"type": "array", "items": made[0], "minItems": made[1], "maxItems": made[1] + 1}
        ),
    ),
    max_leaves=5,
)


def matches(value: Any, wanted: dict[str, Any]) -> bool:
    """For the few keywords of these schemas."""
    if "enum" in wanted:
        return any(value == each and type(value) is type(each) for each in wanted["enum"])
    match wanted["type"]:
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return type(value) is int and wanted["minimum"] <= value <= wanted["maximum"]
        case "string":
            return isinstance(value, str) and len(value) <= wanted["maxLength"]
        case "array":
            fits = isinstance(value, list) and wanted["minItems"] <= len(value) <= wanted["maxItems"]
            return fits and all(matches(item, wanted["items"]) for item in value)
    properties = wanted["properties"]
    fits = isinstance(value, dict) and set(value) == set(properties)
    return fits and all(matches(value[name], properties[name]) for name in properties)


def whole_text(grammars: Grammars, tokenizer: Tokenizer, grammar: str, seed: int) -> str:
    tokens = follow(grammars, grammar, seed)
    return str(tokenizer.decode(tokens[:-1], skip_special_tokens=False))


@settings(max_examples=60)
@given(_REGEXES, st.integers(0, 2**32))
def test_whatever_is_allowed_ends_in_a_match_of_the_regex(
    grammars: Grammars, tokenizer: Tokenizer, pattern: str, seed: int
) -> None:
    text = whole_text(grammars, tokenizer, regex(pattern), seed)
    assert re.fullmatch(pattern, text), (pattern, text)


@settings(max_examples=40)
@given(st.lists(_TEXTS, min_size=1, max_size=6), st.integers(0, 2**32))
def test_whatever_is_allowed_ends_in_one_of_the_choices(
    grammars: Grammars, tokenizer: Tokenizer, texts: list[str], seed: int
) -> None:
    assert whole_text(grammars, tokenizer, choice(texts), seed) in texts


@settings(max_examples=60)
@given(_SCHEMAS, st.integers(0, 2**32))
def test_whatever_is_allowed_ends_in_what_the_schema_describes(
    grammars: Grammars, tokenizer: Tokenizer, wanted: dict[str, Any], seed: int
) -> None:
    text = whole_text(grammars, tokenizer, schema(wanted), seed)
    assert matches(json.loads(text), wanted), (wanted, text)
