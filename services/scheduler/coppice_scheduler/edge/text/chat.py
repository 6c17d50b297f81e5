"""Chat messages to a prompt, by the checkpoint's own template: the same text as transformers makes of it.

The template comes with the checkpoint, messages come from anybody. The sandbox keeps a template from reaching anything
but the values that it is given, and the size limit keeps one from filling memory.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coppice.errors import UsageError
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind, invalid
from coppice_scheduler.edge.text.checkpoint_text import CheckpointText
from coppice_scheduler.edge.text.markers import whole_characters
from coppice_scheduler.edge.text.tools.tool import Tool, ToolCall

MAX_RENDERED_CHARS = 4 * 1024 * 1024
# What every chat gives its template; a client cannot.
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# Variables of templates that know no degrees of reasoning.
SWITCHES = ("enable_thinking", "thinking")
_BEYOND_HIGH = frozenset({"xhigh", "max"})
MAX_NUMBER = 1_000_000  # in values of a client's
_SHOWN_CHARS = 100
_GOES_ON = "THE_ANSWER_GOES_ON_HERE "  # letters that no template changes; its space shows whether the end is trimmed
_SPECIAL = frozenset(f"{kind}_token" for kind in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"))


class PromptEnd(Enum):
    """Where the prompt of a chat ends, and so what the answer is."""

    ANSWER = "answer"  # the assistant's turn has begun
    LAST_MESSAGE = "last message"  # what the template writes after it, and no turn
    WITHIN_LAST_MESSAGE = "within"  # the answer goes on from its content

    @classmethod
    def asked(cls, opens: bool | None, goes_on: bool) -> PromptEnd:
        """By `add_generation_prompt`, None where it was not sent, and `continue_final_message`. Raises ApiError."""
        if not goes_on:
            return cls.LAST_MESSAGE if opens is False else cls.ANSWER
        if opens:
            raise invalid(
                "continue_final_message goes on from the last message, so add_generation_prompt cannot be true.",
                param="continue_final_message",
            )
        return cls.WITHIN_LAST_MESSAGE


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    name: str | None = None
    reasoning: str | None = None  # of an answer that is sent back; what becomes of it the template says
    calls: tuple[ToolCall, ...] = ()  # likewise
    call_id: str | None = None  # of the call whose result this is


class ChatTemplate:
    """Renders chats of one checkpoint. `missing` says why there is no template, when there is none.

    `variables` are names that the template reads and a client may give: `enable_thinking`, `date_string`, ...
    """

    def __init__(self, checkpoint: CheckpointText, *, max_chars: int = MAX_RENDERED_CHARS) -> None:
        self._special_tokens = dict(checkpoint.special_tokens)
        self._max_chars = max_chars
        self._directory = checkpoint.directory
        self._template, read = self._compiled(checkpoint.chat_template)
        self._tool_template, tools_read = self._template, read
        if checkpoint.tool_template is not None:
            self._tool_template, tools_read = self._compiled(checkpoint.tool_template)
        self.reads_tools = "tools" in tools_read
        self._reads_calls = "tool_calls" in (checkpoint.tool_template or checkpoint.chat_template or "")
        self.variables = (read | tools_read) - GIVEN - _SPECIAL - self._special_tokens.keys()
        self.missing = (
            f"The checkpoint {checkpoint.directory!r} has no chat template (neither chat_template.jinja nor "
            "chat_template in tokenizer_config.json). Use /v1/completions, or add a template to the checkpoint."
        )

    def check_reads_tools(self) -> None:
        """Raises ApiError."""
        if not self.reads_tools:
            message = "The chat template of this model does not read tools. Leave them out."
            raise invalid(message, param="tools", code="unsupported_parameter")

    def _compiled(self, template: str | None) -> tuple[jinja2.Template | None, frozenset[str]]:
        """And the names that it reads. Raises UsageError."""
        if template is None:
            return None, frozenset()
        environment = _environment()
        try:
            parsed = environment.parse(template)
            read = meta.find_undeclared_variables(parsed)
            return environment.from_string(parsed), frozenset(read)
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(
                f"the chat template of {self._directory!r} is not valid: line {error.lineno}: {error.message}"
            ) from error

    def render_now(
        self,
        messages: Sequence[ChatMessage],
        values: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
        end: PromptEnd = PromptEnd.ANSWER,
    ) -> str:
        """The prompt of `messages`, not empty. `values` are of `variables`. Raises ApiError."""
        if end is PromptEnd.WITHIN_LAST_MESSAGE:
            return self._open_message(messages, values, tools)
        has_calls = any(message.calls for message in messages)
        template = self._tool_template if tools or has_calls else self._template
        if tools:
            self.check_reads_tools()
        if has_calls and not self._reads_calls:
            message = "The chat template of this model does not read calls of earlier answers."
            raise invalid(message, param="messages", code="unsupported_parameter")
        if template is None:
            raise invalid(self.missing, param="messages", code="no_chat_template")
        values = values or {}
        for name, value in values.items():
            if name not in self.variables:
                raise not_read(name, f"chat_template_kwargs.{name}", self.variables)
            _check_numbers(name, value)
        parts: list[str] = []
        size = 0
        try:
            for part in template.generate(
                **values,
                **self._special_tokens,
                messages=[_plain(message) for message in messages],
                tools=[_plain_tool(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=end is PromptEnd.ANSWER,
            ):
                size += len(part)
                if size > self._max_chars:
                    raise invalid(
                        f"The chat renders to more than {self._max_chars} characters.",
                        param="messages",
                        code="context_length_exceeded",
                    )
                parts.append(part)
        except jinja2.TemplateError as error:
            # The template's own words, such as that roles must alternate.
            raise invalid(f"The chat template refused the messages: {error}", param="messages") from error
        except ApiError:
            raise
        except Exception as error:  # whatever the template does with what it is given
            raise ApiError(
                ErrorKind.INVALID,
                f"The chat template failed on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error
        return whole_characters("".join(parts))

    def _open_message(
        self, messages: Sequence[ChatMessage], values: Mapping[str, Any] | None, tools: Sequence[Tool]
    ) -> str:
        """As transformers does it: up to a mark that is put behind the last message's content. Raises ApiError."""
        *before, last = messages
        if last.calls:
            raise invalid("The last of messages calls tools; no answer goes on from that.", param="messages")
        marked = replace(last, content=last.content + _GOES_ON)
        text = self.render_now([*before, marked], values, tools, PromptEnd.LAST_MESSAGE)
        head, mark, tail = text.rpartition(_GOES_ON.strip())
        if not mark or not head.rstrip().endswith(last.content.strip()):
            message = "The chat template of this model changes the last message, so no answer can go on from it."
            raise invalid(message, param="messages", code="unsupported_parameter")
        return head if tail.startswith(" ") else head.rstrip()


def effort_of_template(effort: str) -> str:
    """A degree of reasoning in words that templates know."""
    return "high" if effort in _BEYOND_HIGH else effort


def _check_numbers(name: str, value: Any) -> None:
    """A template may write something so many times. Raises ApiError."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_numbers(name, inner)
    elif isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
        message = f"chat_template_kwargs.{name} has a number beyond {MAX_NUMBER}; send it as a string."
        raise invalid(message, param=f"chat_template_kwargs.{name}")


def switch_of(variables: Collection[str]) -> str | None:
    """The variable by which a template turns reasoning on and off; None where it has none."""
    return next((name for name in SWITCHES if name in variables), None)


def not_read(name: str, field: str, variables: frozenset[str]) -> ApiError:
    """The refusal of a value that the template would not see; `field` is what the client sent it in."""
    if name in GIVEN:
        why = "is the server's to give"
    else:
        known = f"it reads {', '.join(sorted(variables))}" if variables else "it reads none"
        why = f"is not read by the chat template of this model; of such values {known}"
    field = field[:_SHOWN_CHARS]
    return invalid(f"{field} {why}. Leave it out.", param=field, code="unsupported_parameter")


def _plain(message: ChatMessage) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        plain["name"] = message.name
    if message.reasoning is not None:
        plain["reasoning_content"] = message.reasoning
    if message.calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.calls]
    if message.call_id is not None:
        plain["tool_call_id"] = message.call_id
    return plain


def _plain_call(call: ToolCall) -> dict[str, Any]:
    """Templates write arguments as JSON, and so must have them as values."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments  # as the model wrote it
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _plain_tool(tool: Tool) -> dict[str, Any]:
    """In one order, however it was sent: the same tools have the same prompt."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": json.loads(tool.parameters)}}


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; a prompt is the same without the mark."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
