"""gRPC has the same powers as REST: all that a GenerationSpec can say, a GenerateRequest can ask for, and nothing is
asked for in vain.

    GenerateRequest and the messages in it  --spec_of-->  GenerationSpec and the classes in it  <--  the REST APIs
    ROWS: each field, changed                             what of it changes
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor

from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_scheduler.edge.frontend.generation_spec import GenerationSpec
from coppice_scheduler.edge.grpc.messages import spec_of

Row = tuple[str, Any, set[str]]

TEXT: dict[str, Any] = {"model": "m", "text": "one", "regex": "a"}
CHAT: dict[str, Any] = {
    "model": "m",
    "chat": {
        "messages": [
            {"role": "user", "content": "x", "tool_calls": [{"id": "1", "name": "f", "arguments": "{}"}]},
        ],
        "tools": [{"name": "f"}, {"name": "g"}],
    },
    "tool_choice": {"mode": "auto", "names": ["g"]},
}
FORM = {"OutputFormat.kind", "OutputFormat.value", "OutputFormat.field"}
PROMPTS = {"TextPrompt.text", "TokenPrompt.tokens"}

# Where a field stands in the request; another value for it, as protobuf's JSON; and what changes of the spec.
OF_TEXTS: list[Row] = [
    ("model", "n", {"GenerationSpec.model"}),
    ("text", "two", {"TextPrompt.text"}),
    ("token_ids.tokens", base64.b64encode(bytes(4)).decode(), PROMPTS),
    ("max_tokens", 7, {"GenerationSpec.max_tokens"}),
    ("fill_context", True, {"GenerationSpec.fills_context"}),
    ("temperature", 0.5, {"GenerationSpec.temperature"}),
    ("top_p", 0.5, {"GenerationSpec.top_p"}),
    ("top_k", 7, {"GenerationSpec.top_k"}),
    ("seed", 7, {"GenerationSpec.seed"}),
    ("stop", ["a"], {"GenerationSpec.stop"}),
    ("ignore_eos", True, {"GenerationSpec.ignore_eos"}),
    ("n", 7, {"GenerationSpec.n"}),
    ("stop_token_ids", [7], {"GenerationSpec.stop_token_ids"}),
    ("min_tokens", 7, {"GenerationSpec.min_tokens"}),
    ("min_p", 0.5, {"GenerationSpec.min_p"}),
    ("frequency_penalty", 0.5, {"GenerationSpec.frequency_penalty"}),
    ("presence_penalty", 0.5, {"GenerationSpec.presence_penalty"}),
    ("repetition_penalty", 0.5, {"GenerationSpec.repetition_penalty"}),
    ("logit_bias", {"7": 0.5}, {"GenerationSpec.logit_bias"}),
    ("num_logprobs", 7, {"GenerationSpec.num_logprobs"}),
    ("echo", True, {"GenerationSpec.echo"}),
    ("include_stop_str_in_output", True, {"GenerationSpec.include_stop"}),
    ("skip_special_tokens", False, {"GenerationSpec.skip_special_tokens"}),
    ("priority", -7, {"GenerationSpec.priority"}),
    ("prompt_cache_key", "k", {"GenerationSpec.reuse"}),
    ("prompt_reuse", "PROMPT_REUSE_UNLIKELY", {"GenerationSpec.reuse"}),
    ("prompt_cache_ttl_ms", 7, {"GenerationSpec.retain_ms"}),
    ("cache_salt", "s", {"GenerationSpec.cache_salt"}),
    ("json_object", True, FORM),
    ("json_schema", "{}", FORM),
    ("regex", "b", {"OutputFormat.value"}),
    ("choice.texts", ["a"], FORM),
    ("grammar", "b", FORM),
    ("best_of", 7, {"GenerationSpec.best_of"}),
    ("use_beam_search", True, {"GenerationSpec.uses_beams"}),
    ("length_penalty", 0.5, {"GenerationSpec.length_penalty"}),
    ("num_prompt_logprobs", 7, {"GenerationSpec.num_prompt_logprobs"}),
]
OF_CHATS: list[Row] = [
    ("chat.messages.0.role", "system", {"ChatMessage.role"}),
    ("chat.messages.0.content", "y", {"ChatMessage.content"}),
    ("chat.messages.0.name", "bo", {"ChatMessage.name"}),
    ("chat.messages.0.reasoning_content", "why", {"ChatMessage.reasoning"}),
    ("chat.messages.0.tool_call_id", "1", {"ChatMessage.call_id"}),
    ("chat.messages.0.tool_calls.0.id", "2", {"ToolCall.call_id"}),
    ("chat.messages.0.tool_calls.0.name", "g", {"ToolCall.name"}),
    ("chat.messages.0.tool_calls.0.arguments", '{"a":1}', {"ToolCall.arguments"}),
    ("chat.chat_template_kwargs", {"a": 1}, {"ChatPrompt.template_values"}),
    ("chat.tools.0.name", "h", {"Tool.name"}),
    ("chat.tools.0.description", "d", {"Tool.description"}),
    ("chat.tools.0.parameters", '{"type":"object"}', {"Tool.parameters"}),
    ("chat.tools.0.strict", True, {"Tool.is_strict"}),
    ("chat.add_generation_prompt", False, {"ChatPrompt.end"}),
    ("chat.continue_final_message", True, {"ChatPrompt.end"}),
    ("tool_choice.mode", "required", {"ToolUse.mode"}),
    ("tool_choice.names", ["f"], {"ToolUse.names"}),
    ("parallel_tool_calls", False, {"ToolUse.calls_max"}),
]
ROWS = [*((TEXT, row) for row in OF_TEXTS), *((CHAT, row) for row in OF_CHATS)]

# What a spec says and no field of a GenerateRequest does, and why that takes no power away.
NOT_ASKED: Mapping[str, str] = {
    "GenerationSpec.timeout_s": "the deadline that every call of gRPC has says it",
    "GenerationSpec.endpoint": "it follows from the prompt",
    "GenerationSpec.streams": "an answer always comes as a stream, of one response where the client wants no more",
    "OutputFormat.behind": "the front door finds it in the chat template, whichever API a call came by",
    "ToolUse.texts": "the front door makes it of the tools, whichever API a call came by",
    "ToolUse.in_json": "the front door makes it of the tools, whichever API a call came by",
}


def spec(request: dict[str, Any]) -> GenerationSpec:
    return spec_of(json_format.ParseDict(request, pb.GenerateRequest()), 1.0)


def changed(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with `value` there; of those that exclude each other, it is the one."""
    request = copy.deepcopy(base)
    *above, last = path.split(".")
    first = path.split(".")[0]
    oneof = pb.GenerateRequest.DESCRIPTOR.fields_by_name[first].containing_oneof
    for other in oneof.fields if oneof is not None else ():
        if other.name != first:
            request.pop(other.name, None)
    inner: Any = request
    for name in above:
        inner = inner[int(name)] if isinstance(inner, list) else inner.setdefault(name, {})
    inner[last] = value
    return request


def field_of(path: str) -> str:
    """The field at the end of a path, such as `ChatMessage.role`."""
    message: Descriptor | None = pb.GenerateRequest.DESCRIPTOR
    found = ""
    for name in path.split("."):
        if not name.isdigit():
            assert message is not None
            found = f"{message.name}.{name}"
            message = message.fields_by_name[name].message_type
    return found


def fields_of_messages(message: Descriptor) -> set[str]:
    """Of this message and those in it; what has other fields in it is none itself."""
    found: set[str] = set()
    for field in message.fields:
        inner = field.message_type
        if inner is not None and inner.file is pb.DESCRIPTOR and not inner.GetOptions().map_entry:
            found |= fields_of_messages(inner)
        else:
            found.add(f"{message.name}.{field.name}")
    return found


def fields_of_classes(cls: type, left_out: Iterable[str] = ()) -> set[str]:
    """Likewise, of a dataclass; what is left out is not looked into."""
    found: set[str] = set()
    for name, hint in get_type_hints(cls).items():
        field = f"{cls.__name__}.{name}"
        inner = [] if field in left_out else [each for each in _classes_in(hint) if is_dataclass(each)]
        found |= {field} if not inner else set().union(*(fields_of_classes(each, left_out) for each in inner))
    return found


def _classes_in(hint: Any) -> Iterator[type]:
    arguments = get_args(hint)
    for argument in arguments:
        yield from _classes_in(argument)
    if not arguments and isinstance(hint, type):
        yield hint


def values_of(value: Any, field: str = "") -> dict[str, list[Any]]:
    """What stands in each field of all dataclasses in there."""
    found: dict[str, list[Any]] = {}
    if is_dataclass(value) and not isinstance(value, type):
        inner = [(getattr(value, each.name), f"{type(value).__name__}.{each.name}") for each in fields(value)]
    elif isinstance(value, tuple) and any(map(is_dataclass, value)):
        inner = [(each, field) for each in value]
    else:
        return {field: [value]}
    for each, name in inner:
        for leaf, values in values_of(each, name).items():
            found.setdefault(leaf, []).extend(values)
    return found


def not_sent(message_fields: Iterable[str], rows: Iterable[str]) -> list[str]:
    sent = {field_of(path) for path in rows}
    return [
        f"{field} is in scheduler.proto, and no row here sends it: read it into the GenerationSpec in "
        "edge/grpc/messages.py, and add a row that says what of the spec it changes"
        for field in sorted(set(message_fields) - sent)
    ]


def not_asked(spec_fields: Iterable[str], reached: Iterable[str], excused: Iterable[str]) -> list[str]:
    return [
        f"{field} cannot be asked for over gRPC: add a field to scheduler.proto, run make proto, read it in "
        "edge/grpc/messages.py, and add a row here; or say in NOT_ASKED why gRPC can do without"
        for field in sorted(set(spec_fields) - set(reached) - set(excused))
    ]


PATHS = [path for _, (path, _, _) in ROWS]
REACHED = set().union(*(reaches for _, (_, _, reaches) in ROWS))


def test_every_field_of_the_request_says_something() -> None:
    assert not_sent(fields_of_messages(pb.GenerateRequest.DESCRIPTOR), PATHS) == []


def test_all_that_a_spec_says_can_be_asked_for() -> None:
    assert not_asked(fields_of_classes(GenerationSpec, NOT_ASKED), REACHED, NOT_ASKED) == []


@pytest.mark.parametrize(("base", "row"), ROWS, ids=PATHS)
def test_a_field_changes_what_its_row_says_and_nothing_else(base: dict[str, Any], row: Row) -> None:
    path, value, reaches = row
    before, after = values_of(spec(base)), values_of(spec(changed(base, path, value)))
    assert {name for name in before | after if before.get(name) != after.get(name)} - containers() == reaches
    if type(value) in (int, float):
        assert [after[name] for name in reaches] == [[value]]


def containers() -> set[str]:
    """Fields that have others in them: where they are empty, or were, these say so."""
    return set(values_of(spec(TEXT)) | values_of(spec(CHAT))) - fields_of_classes(GenerationSpec)


def test_exceptions_are_of_fields_that_there_are_and_that_no_row_reaches() -> None:
    assert NOT_ASKED.keys() <= fields_of_classes(GenerationSpec, NOT_ASKED) - REACHED


def test_a_field_of_one_side_alone_is_told_with_what_to_do() -> None:
    assert "run make proto" in not_asked({"GenerationSpec.new", "GenerationSpec.n"}, REACHED, NOT_ASKED)[0]
    (told,) = not_sent({"GenerateRequest.new", "GenerateRequest.n"}, PATHS)
    assert told.startswith("GenerateRequest.new ")
