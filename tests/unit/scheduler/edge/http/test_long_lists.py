"""Long lists of numbers are parsed in slices, and what comes out is what the parser makes of the whole."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from coppice_scheduler.edge.http import long_lists
from coppice_scheduler.edge.http.json_body import parse_object
from coppice_scheduler.edge.http.long_lists import SLICE_BYTES, SLICE_ENTRIES, parse_json, pieces_of, write_json
from coppice_scheduler.edge.openai.parsing.schema import packed_ids
from coppice_scheduler.edge.text.tokenizer import SLICE, pack_tokens, unpack_tokens

IDS = [number * 7919 % 150_000 for number in range(60_000)]
LIST = json.dumps(IDS)
PROMPT = '{"prompt": '


def whole(raw: bytes) -> Any:
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        return str(error)


def sliced(raw: bytes) -> Any:
    try:
        return parse_json(raw)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    "text",
    [
        f'{{"prompt": {LIST}, "n": 1}}',
        f'{{"prompt": [{LIST}, [1], {LIST}], "tokens": {LIST}}}',
        f'{{"prompt": "a \\"list: {LIST}", "n": 1}}',
        f'{{"prompt": "a \\\\", "n": {LIST}}}',
        f'{{"prompt": {LIST}, "prompt": "x"}}',
        f'{{"x": {{"prompt": {LIST}}}}}',
        f"[{LIST}]",
        LIST,
        f'{{"prompt": {LIST}',
        f'{{"prompt": {LIST}}} x',
        PROMPT + LIST.replace(", ", " ,\n ") + "}",
        PROMPT + LIST.replace("]", ",]") + "}",
        PROMPT + LIST.replace("[", "[,") + "}",
        PROMPT + LIST.replace("7919", "7919 7919") + "}",
        PROMPT + LIST.replace("7919", "07919") + "}",
        PROMPT + LIST.replace("7919", "9" * 30) + "}",
        PROMPT + LIST.replace("7919", "9" * 5000) + "}",
        PROMPT + "[" + " " * 2 * SLICE_BYTES + "]}",
        PROMPT + "[" + "," * 2 * SLICE_BYTES + "]}",
    ],
)
def test_it_is_what_the_parser_makes_of_the_whole(text: str) -> None:
    raw = text.encode()
    assert sliced(raw) == whole(raw)


@pytest.mark.parametrize("end", ["", " ", "1", "1 ", "1, "])
def test_a_comma_at_the_end_of_a_slice(end: str) -> None:
    raw = f'{{"prompt": [{"1," * (SLICE_BYTES // 2 + 1)}{end}]}}'.encode()
    assert sliced(raw) == whole(raw)


def test_a_slice_that_begins_or_ends_at_any_place() -> None:
    rng = random.Random(5)
    for _ in range(40):
        filler = "".join(rng.choice(("1", ",", " ", "1,", "22,")) for _ in range(rng.randrange(8)))
        entries = "1," * (SLICE_BYTES // 2 + rng.randrange(-2, 3)) + filler + "1," * rng.randrange(3) + "5"
        raw = f'{{"prompt": [{entries}]}}'.encode()
        assert sliced(raw) == whole(raw)


@pytest.mark.parametrize("parse", [parse_json, parse_object])
def test_no_long_list_is_parsed_at_once(parse: Callable[[bytes], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def seen(raw: bytes, **options: Any) -> Any:
        sizes.append(len(raw))
        return from_json(raw, **options)

    monkeypatch.setattr(long_lists, "from_json", seen)
    assert parse(f'{{"prompt": [{LIST}, {LIST}]}}'.encode()) == {"prompt": [IDS, IDS]}
    assert 0 < max(sizes, default=0) < SLICE_BYTES + 100 < len(LIST)


class SeenList(list[int]):
    """Remembers how much was taken of it at a time."""

    def __init__(self, values: Iterable[int]) -> None:
        super().__init__(values)
        self.sizes: list[int] = []

    def __getitem__(self, at: Any) -> Any:
        part = super().__getitem__(at)
        self.sizes.append(len(part))
        return part


@pytest.mark.parametrize("pack", [pack_tokens, lambda ids: packed_ids(ids, "prompt")], ids=["own ids", "ids of a body"])
def test_no_long_list_is_packed_at_once(pack: Callable[[list[int]], bytes]) -> None:
    ids = SeenList(IDS)
    assert unpack_tokens(pack(ids)) == IDS
    assert sum(ids.sizes) == len(IDS)
    assert max(ids.sizes) <= SLICE < len(IDS) / 3


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=20,
    ),
    st.integers(1, 3 * SLICE_ENTRIES),
)
def test_what_is_written_in_slices_is_what_json_writes(value: Any, times: int) -> None:
    for each in (value, [value] * times, {"a": [{"b": [value, 1] * times}]}):
        whole = json.dumps(each, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        assert write_json(each) == whole


def test_no_long_list_is_written_at_once() -> None:
    entries = [{"1": {"logprob": -0.5, "rank": 1}}] * (20 * SLICE_ENTRIES)
    chat, completion = {"prompt_logprobs": entries}, {"choices": [{"prompt_logprobs": entries}] * 3}
    for body in (chat, completion):
        assert max(map(len, pieces_of(body))) < len(json.dumps(entries)) / 15
