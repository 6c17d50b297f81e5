"""Tools with one checkpoint: whether it can use them, how its calls are read, and the grammar where they are forced."""

from __future__ import annotations

from dataclasses import replace

from tokenizers import Tokenizer as RawTokenizer

from coppice.grammar import GrammarError
from coppice_scheduler.edge.base.errors import ApiError, invalid
from coppice_scheduler.edge.text.chat import ChatTemplate
from coppice_scheduler.edge.text.checkpoint_text import CheckpointText
from coppice_scheduler.edge.text.output_format import ANY_OBJECT, FormatKind, OutputFormat
from coppice_scheduler.edge.text.tools.call_grammar import calls_grammar, can_be_bound, format_for_grammar, text_grammar
from coppice_scheduler.edge.text.tools.call_parser import CallParser
from coppice_scheduler.edge.text.tools.formats import FORMATS, LLAMA3_JSON, ToolFormat, format_of_template
from coppice_scheduler.edge.text.tools.json_calls import JsonCalls
from coppice_scheduler.edge.text.tools.python_calls import PythonCalls
from coppice_scheduler.edge.text.tools.tool import ToolMode, ToolUse
from coppice_scheduler.edge.text.tools.xml_calls import XmlCalls, text_arguments

AUTO, NO_PARSER = "auto", "none"  # or the name of a format
TOOLS = "tools"  # what errors name


class ToolSupport:
    def __init__(self, checkpoint: CheckpointText, template: ChatTemplate, parser: str = AUTO) -> None:
        """`parser`: AUTO, NO_PARSER or a name of FORMATS."""
        self._raw: RawTokenizer = checkpoint.raw
        self._template = template
        self._parser = parser
        text = checkpoint.tool_template or checkpoint.chat_template or ""
        self._format = format_of_template(text) if parser == AUTO else FORMATS.get(parser)

    @property
    def format_name(self) -> str:
        """Of what this checkpoint writes; empty where tools cannot be used."""
        return self._format.name if self._format is not None and self._template.reads_tools else ""

    def output_format(self, use: ToolUse, wanted: OutputFormat | None) -> OutputFormat | None:
        """What the answer must look like, if anything. `wanted` is what was asked for besides. Raises ApiError."""
        tool_format = self._format_or_refusal()
        try:
            grammar = self._grammar(use, tool_format, wanted)
        except GrammarError as error:
            raise invalid(f"{TOOLS} cannot be used: {error}", param=TOOLS, code="invalid_output_format") from None
        return wanted if grammar is None else OutputFormat(FormatKind.TOOL_CALLS, grammar, TOOLS)

    def forbidden_token(self, use: ToolUse) -> int | None:
        """The one that opens calls, where there must be none."""
        tool_format = self._format_or_refusal()
        if use.mode is not ToolMode.NONE or tool_format.is_bare:
            return None
        return self._raw.token_to_id(tool_format.opens)

    def opening_token(self, use: ToolUse) -> int | None:
        """The one that opens calls, where there may be some; None where it takes several, or looks like an answer."""
        if use.mode is ToolMode.NONE or self._format is None or self._format.is_bare:
            return None
        return self._raw.token_to_id(self._format.opens)

    def ignores_strict(self, use: ToolUse) -> bool:
        """Whether tools are strict, and that changes nothing here."""
        if use.mode is not ToolMode.AUTO or self._format is None or not any(tool.is_strict for tool in use.allowed):
            return False
        return not can_be_bound(use, self._format)

    def read_by(self, use: ToolUse) -> ToolUse:
        """What `parser` needs of it."""
        if self._format is None or self._format.xml is None:
            return replace(use, tools=())
        pairs = ((tool.name, name) for tool in use.allowed for name in text_arguments(tool.parameters))
        in_json = use.mode is ToolMode.REQUIRED and not can_be_bound(use, self._format)
        return replace(use, tools=(), texts=frozenset(pairs), in_json=in_json)

    def parser(self, use: ToolUse) -> CallParser | None:
        """Reads one answer; None where nothing may be called. Of `use` it takes what `read_by` leaves."""
        if use.mode is ToolMode.NONE:
            return None
        use = self.read_by(use) if use.tools else use
        tool_format, is_forced = self._format_or_refusal(), use.mode is ToolMode.REQUIRED
        if is_forced and (use.in_json or tool_format.is_python):
            tool_format = LLAMA3_JSON
        if tool_format.is_python:
            return PythonCalls(use.names, tool_format.new_id, use.calls_max)
        if tool_format.xml is not None:
            return XmlCalls(tool_format, use.texts, use.names, tool_format.new_id, use.calls_max)
        return JsonCalls(tool_format, use.names, tool_format.new_id, use.calls_max, is_forced=is_forced)

    def _grammar(self, use: ToolUse, tool_format: ToolFormat, wanted: OutputFormat | None) -> str | None:
        token_of = self._raw.token_to_id
        if use.mode is ToolMode.REQUIRED:
            return calls_grammar(use, format_for_grammar(use, tool_format), token_of)
        if use.mode is ToolMode.NONE:
            return None
        if wanted is not None:
            return calls_grammar(use, tool_format, token_of, _schema_of(wanted, use, tool_format))
        is_bound = any(tool.is_strict for tool in use.allowed) or len(use.names) < len(use.tools)
        return text_grammar(use, tool_format, token_of) if is_bound and can_be_bound(use, tool_format) else None

    def _format_or_refusal(self) -> ToolFormat:
        """Raises ApiError."""
        self._template.check_reads_tools()
        if self._format is None:
            raise _unsupported(
                "How this model writes calls of tools is not known here; its operator can say so with --tool-parser "
                f"{' | '.join(FORMATS)}."
                if self._parser == AUTO
                else "Tools are switched off (--tool-parser none)."
            )
        return self._format


def _schema_of(wanted: OutputFormat, use: ToolUse, written: ToolFormat) -> str:
    """Of an answer that is no call. Raises ApiError, GrammarError."""
    is_json = wanted.kind in (FormatKind.JSON, FormatKind.JSON_OBJECT)
    if not is_json or written.is_bare or not can_be_bound(use, written):
        raise _unsupported(
            f"{TOOLS} cannot be combined with {wanted.field} here"
            + (": calls of this model look like an answer in JSON." if written.is_bare else ".")
            + " Send one, or a tool_choice of none."
        )
    return str(wanted.value) if wanted.kind is FormatKind.JSON else ANY_OBJECT


def _unsupported(message: str) -> ApiError:
    return invalid(message, param=TOOLS, code="unsupported_parameter")
