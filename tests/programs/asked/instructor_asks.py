"""`instructor` in the modes that OpenAI's clients use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from json import loads as parse
from pathlib import Path
from typing import Annotated, Any, Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

sys.path.insert(0, str(Path(__file__).parent))
from cases import case, print_all

Name = Annotated[str, Field(max_length=6, pattern="^[A-Z][a-z]+$")]


class City(BaseModel):
    """Tells the weather of a city."""

    model_config = ConfigDict(extra="forbid")
    name: Name
    day: Literal["today", "tomorrow"]


class Cities(BaseModel):
    """Tells the weather of some cities."""

    model_config = ConfigDict(extra="forbid")
    cities: list[City]


class Anything(BaseModel):
    """What any object is."""

    name: str = "nobody"


ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "How is it?"}],
    "max_retries": 0,
    "max_tokens": 900,
    "temperature": 1.2,
    "seed": 3,
}
SEEDS = range(8)  # of answers that are lists
CLOSES = {str(ord("}")): 100}  # in JSON mode the model chooses: it takes the shortest object


def client(url: str, mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)


def city(url: str, mode: instructor.Mode) -> Any:
    return client(url, mode).chat.completions.create(response_model=City, **ASKED).model_dump()


@case
def tools(url: str) -> Any:
    return city(url, instructor.Mode.TOOLS)


@case
def tools_strict(url: str) -> Any:
    return city(url, instructor.Mode.TOOLS_STRICT)


@case
def json_schema(url: str) -> Any:
    return city(url, instructor.Mode.JSON_SCHEMA)


@case
def json(url: str) -> Any:
    asked = {**ASKED, "logit_bias": CLOSES}
    return client(url, instructor.Mode.JSON).chat.completions.create(response_model=Anything, **asked).model_dump()


@case
def tools_in_parts(url: str) -> Any:
    parts = client(url, instructor.Mode.TOOLS).chat.completions.create_partial(response_model=City, **ASKED)
    return [part.model_dump() for part in parts]


@case
def json_schema_in_parts(url: str) -> Any:
    parts = client(url, instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(response_model=City, **ASKED)
    return [part.model_dump() for part in parts]


@case
def with_usage(url: str) -> Any:
    found, completion = client(url, instructor.Mode.TOOLS).chat.completions.create_with_completion(
        response_model=City, **ASKED
    )
    return [found.model_dump(), completion.usage.completion_tokens]


@case
def by_name_of_the_provider(url: str) -> Any:
    by_name = instructor.from_provider("openai/tiny", base_url=f"{url}/v1", api_key="none")
    asked = {name: value for name, value in ASKED.items() if name != "model"}
    return by_name.chat.completions.create(response_model=City, **asked).model_dump()


def several(create: Callable[..., Any], response_model: Any) -> list[Any]:
    """A model without sense may well leave one list empty."""
    return [create(response_model=response_model, **{**ASKED, "seed": seed}) for seed in SEEDS]


def plain(lists: list[Any]) -> list[list[Any]]:
    return [[found.model_dump() for found in each] for each in lists]


@case
def tools_in_a_list(url: str) -> Any:
    return plain(several(client(url, instructor.Mode.TOOLS).chat.completions.create, list[City]))


@case
def tools_strict_in_a_list(url: str) -> Any:
    return plain(several(client(url, instructor.Mode.TOOLS_STRICT).chat.completions.create, list[City]))


@case
def json_schema_in_a_list(url: str) -> Any:
    """Of a model of ours: instructor's own schema of a list has `tasks` optional beside any other names."""
    found = several(client(url, instructor.Mode.JSON_SCHEMA).chat.completions.create, Cities)
    return plain([each.cities for each in found])


@case
def tools_one_by_one(url: str) -> Any:
    """Lists of several, and how they come one by one. instructor's own schema lets objects stand under names other
    than `tasks`, and its reader of streams takes every object for an entry: answers with other names are left out."""
    asks = client(url, instructor.Mode.TOOLS).chat.completions
    both = []
    for seed in range(16):
        asked = {**ASKED, "seed": seed}
        whole, completion = asks.create_with_completion(response_model=list[City], **asked)
        arguments = parse(completion.choices[0].message.tool_calls[0].function.arguments)
        if set(arguments) == {"tasks"} and len(whole) > 1:
            both.append(plain([whole, asks.create_iterable(response_model=City, **asked)]))
    return both


@case
def a_validator_asks_again(url: str) -> Any:
    """What the first answer was and why it will not do is sent back, as a call and its result."""
    asked: list[Any] = []

    class Second(City):
        def model_post_init(self, _: Any) -> None:
            asked.append(self.name)
            if len(asked) == 1:
                raise ValueError("ask again")

    found = client(url, instructor.Mode.TOOLS).chat.completions.create(
        response_model=Second, **{**ASKED, "max_retries": 2}
    )
    return [found.model_dump(), len(asked)]


if __name__ == "__main__":
    print_all(sys.argv[1])
