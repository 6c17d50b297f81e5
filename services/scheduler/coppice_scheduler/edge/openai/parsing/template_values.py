"""Values for the chat template. What the template does not read is refused, or told where the operator has it so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from coppice_scheduler.edge.base.errors import invalid
from coppice_scheduler.edge.frontend.generation_spec import MAX_TEMPLATE_BYTES
from coppice_scheduler.edge.http.field_table import NAME_CHARS, Reading, UnknownFields
from coppice_scheduler.edge.http.json_body import Fields
from coppice_scheduler.edge.text.chat import GIVEN, PromptEnd, not_read, switch_of

KWARGS = "chat_template_kwargs"
MAX_VALUES = 32
MAX_EFFORT_CHARS = 64

# The field that says so.
PROMPT_END = {
    PromptEnd.LAST_MESSAGE: "add_generation_prompt",
    PromptEnd.WITHIN_LAST_MESSAGE: "continue_final_message",
}

Wanted = tuple[str, str, Any]  # field of the body, variable of the template, value


def template_values_of(fields: Fields, reading: Reading) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What a chat gives its template, and names of the fields that have no effect there. Raises ApiError."""
    return _chosen([*_kwargs(fields), *_thinking(fields), *_effort(fields, reading.template_variables)], reading)


def kwargs_of(fields: Fields, reading: Reading) -> dict[str, Any]:
    """`chat_template_kwargs` alone. Raises ApiError."""
    return _chosen([*_kwargs(fields)], reading)[0]


def prompt_end_of(fields: Fields) -> PromptEnd:
    """`add_generation_prompt` and `continue_final_message`, as in vLLM. Raises ApiError."""
    name = "add_generation_prompt"
    opens = None if fields.get(name) is None else fields.flag(name)
    return PromptEnd.asked(opens, fields.flag("continue_final_message"))


def _chosen(wanted: list[Wanted], reading: Reading) -> tuple[dict[str, Any], tuple[str, ...]]:
    values: dict[str, Any] = {}
    ignored = []
    for field, name, value in wanted:
        if name not in reading.template_variables:
            if name in GIVEN or reading.unknown_fields is UnknownFields.REFUSE:
                raise not_read(name, field, reading.template_variables)
            if value is not None:
                ignored.append(field[:NAME_CHARS])
        elif value is not None and values.setdefault(name, value) != value:
            raise invalid(f"{field} differs from what another field says of {name}; send one.", param=field)
    return values, tuple(ignored)


def _kwargs(fields: Fields) -> Iterator[Wanted]:
    values = fields.at_most(KWARGS, MAX_VALUES, "entries")
    if values is None:
        return
    if not isinstance(values, dict):
        raise fields.wrong(KWARGS, "an object")
    try:
        num_chars = len(json.dumps(values))
    except RecursionError:
        raise invalid(f"{KWARGS} is nested too deeply.", param=KWARGS, code="too_complex") from None
    if num_chars > MAX_TEMPLATE_BYTES:
        message = f"{KWARGS} has {num_chars} characters of JSON; at most {MAX_TEMPLATE_BYTES} are taken."
        raise invalid(message, param=KWARGS)
    yield from ((f"{KWARGS}.{name}", name, value) for name, value in values.items())


def _thinking(fields: Fields) -> Iterator[Wanted]:
    if fields.get("enable_thinking") is not None:
        yield "enable_thinking", "enable_thinking", fields.flag("enable_thinking")


def _effort(fields: Fields, variables: frozenset[str]) -> Iterator[Wanted]:
    effort = fields.text("reasoning_effort")
    if effort is None:
        return
    if not 1 <= len(effort) <= MAX_EFFORT_CHARS:
        message = f"reasoning_effort has {len(effort)} characters; it must have 1 to {MAX_EFFORT_CHARS}."
        raise invalid(message, param="reasoning_effort")
    switch = switch_of(variables)
    if "reasoning_effort" in variables or switch is None:
        yield "reasoning_effort", "reasoning_effort", effort
    else:
        yield "reasoning_effort", switch, effort != "none"
