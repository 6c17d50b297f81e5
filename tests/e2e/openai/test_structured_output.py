"""Answers in a given form on the whole stack, asked for as programs do; others are served beside them as ever."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import grpc
import jsonschema_rs
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from coppice_rpc.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.stack import Stack
from tests.fakes.oracle import Oracle

pytestmark = pytest.mark.wide

MESSAGES: list[Any] = [{"role": "user", "content": "Who are you?"}]
LEADS_NOWHERE = 'start: "a" rest\nrest: rest "b"'  # found out when the second token is to be chosen
OPTIONS: dict[str, Any] = {"model": "tiny", "max_tokens": 600, "temperature": 1.2, "seed": 3}


class Closed(BaseModel):
    """Without further fields: a model without sense would not come to their end."""

    model_config = ConfigDict(extra="forbid")


class Pet(Closed):
    name: Annotated[str, Field(max_length=6)]
    kind: Literal["cat", "dog"]


class Person(Closed):
    name: Annotated[str, Field(max_length=8)]
    age: Annotated[int, Field(ge=0, le=150)]
    pets: Annotated[list[Pet], Field(max_length=2)]
    email: Annotated[str, Field(pattern=r"^[a-z]{1,5}@[a-z]{1,5}\.org$")] | None


SCHEMA = Person.model_json_schema()
RESPONSE_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": r"[a-f]{2,5}-\d{3}"},
    {"choice": ["left", "right", "Grüße"]},
    {"grammar": 'start: "<" WORD ("," WORD){1,3} ">"\nWORD: /[xyz]{1,4}/'},
]


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def is_in_form(wanted: dict[str, Any], text: str) -> bool:
    ((kind, value),) = wanted.items()
    match kind:
        case "json":
            return jsonschema_rs.validator_for(value).is_valid(json.loads(text))
        case "regex":
            return re.fullmatch(value, text) is not None
        case "choice":
            return text in value
    return re.fullmatch(r"<[xyz]{1,4}(,[xyz]{1,4}){1,3}>", text) is not None


@pytest.mark.parametrize("strict", [True, pytest.param(False, marks=pytest.mark.wide)])
def test_a_schema_whole_and_streamed(client: openai.OpenAI, strict: bool) -> None:
    form = {"type": "json_schema", "json_schema": {**RESPONSE_FORMAT["json_schema"], "strict": strict}}
    options: Any = {**OPTIONS, "messages": MESSAGES, "response_format": form}
    (choice,) = client.chat.completions.create(**options).choices
    assert choice.finish_reason == "stop"
    Person.model_validate_json(choice.message.content or "")
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **options)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == choice.message.content
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]


def test_parse_makes_an_object_of_a_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(messages=MESSAGES, response_format=Person, n=3, **OPTIONS)
    people = [choice.message.parsed for choice in answer.choices]
    assert all(isinstance(person, Person) for person in people)
    assert len({repr(person) for person in people}) > 1
    again = client.beta.chat.completions.parse(messages=MESSAGES, response_format=Person, n=3, **OPTIONS)
    assert [choice.message.parsed for choice in again.choices] == people


def test_a_streamed_answer_is_parsed_at_its_end(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(messages=MESSAGES, response_format=Person, **OPTIONS) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.done" in kinds
    assert isinstance(final.choices[0].message.parsed, Person)


def test_what_was_cut_is_told_as_cut(client: openai.OpenAI) -> None:
    options = {**OPTIONS, "max_tokens": 10}
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(messages=MESSAGES, response_format=Person, **options)


def test_langchain_gets_structured_output(stack: Stack) -> None:
    module = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    chat = module.ChatOpenAI(
        model="tiny", base_url=f"{stack.url}/v1", api_key="none", max_retries=0, max_tokens=600, seed=3
    )
    found = chat.with_structured_output(Person, method="json_schema").invoke("Who are you?")
    assert isinstance(found, Person)
    found = chat.with_structured_output(SCHEMA, method="json_schema").invoke("Who are you?")
    Person.model_validate(found)


@pytest.mark.parametrize("wanted", FORMS, ids=lambda wanted: next(iter(wanted)))
def test_the_fields_of_vllm(client: openai.OpenAI, wanted: dict[str, Any]) -> None:
    ((kind, value),) = wanted.items()
    texts = set()
    for extra in ({"structured_outputs": wanted}, {f"guided_{kind}": value}):
        answer = client.completions.create(prompt="Which way?", n=2, extra_body=extra, **OPTIONS)
        assert all(choice.finish_reason == "stop" for choice in answer.choices)
        assert all(is_in_form(wanted, choice.text) for choice in answer.choices), answer.choices
        texts.add(tuple(choice.text for choice in answer.choices))
    assert len(texts) == 1, "both are the same form"


def test_grpc_has_them_as_well(stack: Stack) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        generate = scheduler_pb2_grpc.GenerationStub(channel).Generate
        asked = {
            "json": {"json_schema": json.dumps(SCHEMA)},
            "regex": {"regex": FORMS[1]["regex"]},
            "choice": {"choice": scheduler_pb2.Choices(texts=FORMS[2]["choice"])},
            "grammar": {"grammar": FORMS[3]["grammar"]},
        }
        for wanted in FORMS:
            fields: Any = asked[next(iter(wanted))]
            request = scheduler_pb2.GenerateRequest(model="tiny", text="x", max_tokens=600, temperature=1.2, **fields)
            text = "".join(answer.text for answer in generate(request, timeout=120))
            assert is_in_form(wanted, text), text


def test_with_and_without_a_form_side_by_side(stack: Stack, oracle: Oracle) -> None:
    """Those without get the tokens of `transformers`, those with their form; all share the prompt's beginning."""
    stem = list(b"a beginning that all of these have in common, of some blocks")

    async def ask(client: openai.AsyncOpenAI, number: int, extra: dict[str, Any]) -> Any:
        prompt = [*stem, ord("a") + number]
        options: Any = {
            "model": "tiny",
            "prompt": prompt,
            "temperature": 0,
            "extra_body": {"return_token_ids": True, **extra},
        }
        return (await client.completions.create(**options, max_tokens=12 if "ignore_eos" in extra else 600)).choices[0]

    async def all_at_once() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
            free = [ask(client, number, {"ignore_eos": True}) for number in range(8)]
            formed = [ask(client, number, {"structured_outputs": FORMS[number % 4]}) for number in range(8)]
            return await asyncio.gather(*[one for pair in zip(free, formed, strict=True) for one in pair])

    for number, choice in enumerate(asyncio.run(all_at_once())):
        place, is_formed = divmod(number, 2)
        if is_formed:
            assert choice.finish_reason == "stop"
            assert is_in_form(FORMS[place % 4], choice.text), choice.text
        else:
            assert len(choice.token_ids) == 12
            oracle.check([*stem, ord("a") + place], choice.token_ids)
    stack.wait_at_rest()


HOSTILE: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"regex": "(?=a)b"}},
    {"structured_outputs": {"regex": "[a-z]" * 20_000}},
    {"structured_outputs": {"choice": ["x"] * 2_000}},
    {"structured_outputs": {"json": '{"items":' * 5_000 + "{}" + "}" * 5_000}},
    {"structured_outputs": {"grammar": "root ::= " + "(" * 20_000}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["x" * 70_000]}}}},
]


def test_what_is_hostile_is_refused_and_others_go_on(stack: Stack, client: openai.OpenAI) -> None:
    running = client.completions.create(
        model="tiny", prompt="x", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    num_chunks = sum(1 for _ in zip(running, range(3), strict=False))
    for fields in HOSTILE:
        status, answer = stack.post("/v1/completions", {**OPTIONS, "prompt": "x", **fields})
        assert status == 400, answer
        assert answer["error"]["param"].startswith(next(iter(fields)))
    num_chunks += sum(1 for _ in running)
    assert num_chunks > 3
    assert client.completions.create(prompt="x", extra_body={"guided_regex": "abc"}, **OPTIONS).choices[0].text == "abc"
    stack.wait_at_rest()


def test_a_grammar_that_cannot_be_followed_ends_its_own_request_alone(stack: Stack, client: openai.OpenAI) -> None:
    async def all_at_once() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
            forms = [{"structured_outputs": {"grammar": LEADS_NOWHERE}}, {"structured_outputs": FORMS[1]}, {}] * 3
            calls = [client.completions.create(prompt="x", extra_body=form, **OPTIONS) for form in forms]
            return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(all_at_once())
    for lost, formed, free in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert isinstance(lost, openai.BadRequestError)
        assert lost.code == "grammar_limit"
        assert is_in_form(FORMS[1], formed.choices[0].text)
        assert free.choices[0].finish_reason in ("stop", "length")
    extra = {"structured_outputs": {"grammar": LEADS_NOWHERE}}
    with pytest.raises(openai.APIError, match="grammar"):
        list(client.completions.create(prompt="x", stream=True, extra_body=extra, **OPTIONS))
    stack.wait_at_rest()
