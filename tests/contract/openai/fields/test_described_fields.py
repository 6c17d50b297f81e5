"""Each field of each form of a request with values of every kind: what the description forbids is refused.

The generated requests of `test_openapi.py` find such a field by chance, these in each run.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Set
from typing import Any

import pytest

from coppice_scheduler.edge.openai.parsing.fields import REFUSED
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.rest import MODEL, Served

__all__ = ["served", "shared_server"]

jsonschema_rs = pytest.importorskip("jsonschema_rs")

KINDS: tuple[Any, ...] = (
    None, False, True, 0, 1, -1, 2**70, 0.5, "", "x", [], [True], [0.5], ["x"], [["x"]], {}, {"hue": 1}, {"hue": None},
    {"type": "text"},
)  # fmt: skip
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "one"}]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "one"}
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "one", "prompt_cache_breakpoint": {"mode": "explicit"}}]}
]
NESTED: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m", "reuse": "likely"},
}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "streamed chat": ("/v1/chat/completions", {**CHAT, **NESTED}),
    "chat with log-probabilities": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "chat in parts": ("/v1/chat/completions", {**CHAT, "messages": PARTS}),
    "text": ("/v1/completions", TEXT),
    "streamed text": ("/v1/completions", {**TEXT, **NESTED}),
    "texts": ("/v1/completions", {**TEXT, "prompt": ["one", "two"], "n": 2, "temperature": 0}),
    "token ids": ("/v1/completions", {**TEXT, "prompt": [5, 6], "echo": True, "max_tokens": 0}),
    "tokenise a text": ("/tokenize", {"prompt": "one"}),
    "tokenise a chat": ("/tokenize", {"messages": PARTS}),
    "detokenise": ("/detokenize", {"tokens": [5]}),
}
SHORT = {"chat"}


@pytest.fixture(scope="module")
def document(shared_server: Served) -> Any:
    return shared_server.http.get("/openapi.json").json()


def objects_in(value: Any) -> Iterator[tuple[str | int, ...]]:
    """Paths to all objects in a body, itself first."""
    if isinstance(value, dict):
        yield ()
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from ((key, *path) for path in objects_in(inner))


def names_in(schema: Any) -> set[str]:
    """All properties that a schema has anywhere in it."""
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    found = set().union(*map(names_in, inner))
    return found | set(schema["properties"]) if isinstance(schema, dict) and "properties" in schema else found


def variants(document: Any, body: dict[str, Any], without: Set[str]) -> Iterator[dict[str, Any]]:
    """The body with one field of one of its objects replaced or added."""
    requests = {name: schema for name, schema in document["components"]["schemas"].items() if "Request" in name}
    everywhere = {"hue"} | set().union(*(schema["properties"] for schema in requests.values()))
    nested = {"hue"} | names_in([*requests.values(), document["components"]["schemas"]["Message"]]) - everywhere
    for path in objects_in(body):
        for name in sorted((nested if path else everywhere) - without):
            for value in KINDS:
                changed = copy.deepcopy(body)
                place: Any = changed
                for key in path:
                    place = place[key]
                place[name] = value
                yield changed


@pytest.mark.parametrize(
    "form", [form if form in SHORT else pytest.param(form, marks=pytest.mark.wide) for form in FORMS]
)
def test_what_the_description_forbids_is_refused(served: Served, document: Any, form: str) -> None:
    path, body = FORMS[form]
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    described = jsonschema_rs.validator_for(
        {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "components": document["components"]}
    )
    described.validate(body)
    accepted, num_refused = "", 0
    assert served.post(body, path).status_code == 200
    # What generation refuses by name it refuses before it knows the form: once for each route is enough.
    is_another_form = path.startswith("/v1/") and form not in ("chat", "text")
    without = REFUSED.keys() - {"echo", "top_logprobs"} if is_another_form else frozenset()
    for changed in variants(document, body, without):
        if described.is_valid(changed):
            continue
        status = served.post(changed, path).status_code
        num_refused += status in (400, 404)
        if status not in (400, 404):
            accepted += f"{status} {json.dumps(changed)}\n"
    assert not accepted, accepted
    assert num_refused > 20
