"""Log-probabilities of responses, as the `openai` package asks for them and reads them: those of the text alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest
from openai.types.responses import (
    ResponseContentPartDoneEvent,
    ResponseOutputMessage,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
)
from openai.types.responses.response_output_text import Logprob

from coppice_scheduler.core.state.request import OutputError, OutputErrorCode
from coppice_scheduler.edge.text.detokenizer import TokenTexts
from tests.contract.anthropic.test_messages import BETWEEN, THINKER, THOUGHT, with_template
from tests.contract.openai.responses.test_responses import WEATHER, ask, stream
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.engine import Script, likely_ids, logprob_of
from tests.fakes.api.rest import MODEL, Served

__all__ = ["served", "shared_server"]
TEXT = "Grüße aus 東京!\u2028"
INCLUDE: dict[str, Any] = {"include": ["message.output_text.logprobs"]}


@pytest.fixture(scope="module")
def thinker() -> Iterator[Served]:
    with with_template(THINKER) as served:
        yield served


def told(response: Any) -> list[tuple[str, list[Logprob]]]:
    """Text and log-probabilities of each message."""
    parts = [item.content[0] for item in response.output if item.type == "message"]
    return [(part.text, part.logprobs) for part in parts]


def text_of(entries: list[Logprob]) -> str:
    return b"".join(bytes(entry.bytes) for entry in entries).decode()


def data_of(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]


def test_a_part_of_text_has_them(served: Served) -> None:
    served.says(TEXT)
    response = ask(served, top_logprobs=3, **INCLUDE)
    ((text, entries),) = told(response)
    assert all(isinstance(entry, Logprob) for entry in entries)
    assert (text, text_of(entries), response.top_logprobs) == (TEXT, TEXT, 3)
    ids, texts = served.ids(TEXT), TokenTexts(served.checkpoint.raw)
    assert [entry.logprob for entry in entries] == [logprob_of(token_id) for token_id in ids]
    assert any("\ufffd" in entry.token for entry in entries), "half a character: its bytes tell what it is"
    for entry, token_id in zip(entries, ids, strict=True):
        assert [likely.logprob for likely in entry.top_logprobs] == [logprob_of(token_id, rank) for rank in range(3)]
        likely = [texts.text_of(each) for each in likely_ids(token_id, 3)]
        assert [each.token for each in entry.top_logprobs] == likely
    assert served.engine.requests[-1].sampling.num_logprobs == 3


def test_without_a_number_they_have_no_others(served: Served) -> None:
    served.says("one two")
    ((_, entries),) = told(ask(served, **INCLUDE))
    assert text_of(entries) == "one two"
    assert [entry.top_logprobs for entry in entries] == [[]] * len(entries)
    ((_, entries),) = told(ask(served, include=["message.input_image.image_url"]))
    assert entries == []


@pytest.mark.parametrize("tokens_per_output", [1, 3, 1000])
@pytest.mark.parametrize("says", [TEXT, THOUGHT + TEXT, THOUGHT + BETWEEN])
def test_they_are_those_of_the_text_alone_and_a_stream_tells_the_same(
    thinker: Served, says: str, tokens_per_output: int
) -> None:
    thinker.says(says, tokens_per_output=tokens_per_output)
    options: dict[str, Any] = {"tools": [WEATHER], "top_logprobs": 2, **INCLUDE}
    whole = ask(thinker, **options)
    texts = ["I look.", " And", " Done."] if says.endswith(BETWEEN) else [TEXT]
    assert [(text, text_of(entries)) for text, entries in told(whole)] == [(text, text) for text in texts]
    events, streamed = stream(thinker, **options)
    assert told(streamed) == told(whole)
    for index, item in enumerate(whole.output):
        if not isinstance(item, ResponseOutputMessage):
            continue
        of_item = [event for event in events if getattr(event, "output_index", None) == index]
        expected = [entry.to_dict() for entry in told(whole)[sum(i.type == "message" for i in whole.output[:index])][1]]
        deltas = [event for event in of_item if isinstance(event, ResponseTextDeltaEvent)]
        assert [entry.to_dict() for event in deltas for entry in event.logprobs] == expected
        (done,) = (event for event in of_item if isinstance(event, ResponseTextDoneEvent))
        assert [entry.to_dict() for entry in done.logprobs] == expected
        (part,) = (event for event in of_item if isinstance(event, ResponseContentPartDoneEvent))
        assert part.to_dict()["part"]["logprobs"] == expected  # type: ignore[index]
        for event in deltas if tokens_per_output == 1 else []:
            raw: Any = event.to_dict()["logprobs"]
            shown = b"".join(bytes(entry["bytes"]) for entry in raw)
            assert shown == event.delta.encode(), "they come with their text"


def test_a_character_that_was_cut_is_told_with_what_stands_for_it(served: Served) -> None:
    ids = served.ids("a 東")[:-1]
    served.engine.script = lambda request: Script(ids, stop_token=False)
    response = ask(served, max_output_tokens=len(ids), **INCLUDE)
    ((text, entries),) = told(response)
    assert text == "a \ufffd"
    assert len(entries) == len(ids)


def test_events_and_answers_are_as_described(served: Served) -> None:
    served.says("one two")
    document = httpx.get(f"{served.url}/openapi.json").json()
    body = {"model": MODEL, "input": "x", "top_logprobs": 1, "max_output_tokens": 20, **INCLUDE}

    def validate(name: str, value: Any) -> None:
        root = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema_rs.validator_for({"$schema": "https://json-schema.org/draft/2020-12/schema", **root}).validate(value)

    validate("ResponseRequest", body)
    validate("Response", served.post(body, "/v1/responses").json())
    events = data_of(served.post({**body, "stream": True}, "/v1/responses").text)
    for event in events:
        validate("ResponseEvent", event)
    assert all(event["logprobs"] for event in events if event["type"].startswith("response.output_text"))


def test_a_stream_that_breaks_tells_those_that_came(served: Served) -> None:
    served.says("one two", error=OutputError(OutputErrorCode.INTERNAL, "It broke."), tokens_per_output=1)
    body = {"model": MODEL, "input": "x", "stream": True, "max_output_tokens": 20, **INCLUDE}
    *_, failed, _ = data_of(served.post(body, "/v1/responses").text)
    (part,) = failed["response"]["output"][0]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode() == part["text"] == "one two"
