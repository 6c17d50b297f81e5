"""How one model writes its answers: reasoning and calls of tools, apart from what it says."""

from __future__ import annotations

from dataclasses import replace

from coppice_scheduler.edge.text.answer_parts import AnswerParts
from coppice_scheduler.edge.text.chat import ChatTemplate
from coppice_scheduler.edge.text.checkpoint_text import CheckpointText
from coppice_scheduler.edge.text.output_format import OutputFormat
from coppice_scheduler.edge.text.reasoning.formats import REASONING_FORMATS, reasoning_of_template
from coppice_scheduler.edge.text.reasoning.grammar import BehindReasoning
from coppice_scheduler.edge.text.reasoning.parser import ReasoningParser
from coppice_scheduler.edge.text.tools.tool import ToolMode, ToolUse
from coppice_scheduler.edge.text.tools.tool_support import AUTO, ToolSupport


class AnswerSyntax:
    def __init__(
        self,
        checkpoint: CheckpointText,
        template: ChatTemplate,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> None:
        """AUTO: as the chat template has it; else names of formats, or `none`."""
        self.tools = ToolSupport(checkpoint, template, tool_parser)
        by_template = reasoning_of_template(checkpoint.chat_template or "")
        self.reasoning = by_template if reasoning_parser == AUTO else REASONING_FORMATS.get(reasoning_parser)
        self._token_of = checkpoint.raw.token_to_id

    def behind_reasoning(self, wanted: OutputFormat | None, opens_reasoning: bool | None) -> OutputFormat | None:
        """A form that is asked for is that of what comes behind the reasoning of a chat."""
        if wanted is None or self.reasoning is None or opens_reasoning is None:
            return wanted
        return replace(wanted, behind=BehindReasoning.of(self.reasoning, self._token_of, is_open=opens_reasoning))

    def counts_tokens(self, use: ToolUse | None, *, is_chat: bool) -> bool:
        """Whether an answer must be read as it comes, whoever waits for it: it may end early, or has reasoning."""
        ends_early = use is not None and use.calls_max is not None and use.mode is not ToolMode.NONE
        return ends_early or (is_chat and self.reasoning is not None)

    def parts(self, use: ToolUse | None, opens_reasoning: bool | None) -> AnswerParts | None:
        """What takes one answer apart; None where it is text alone. `opens_reasoning`: None for what is no chat."""
        reasoning = calls = None
        if self.reasoning is not None and opens_reasoning is not None:
            reasoning = ReasoningParser(self.reasoning, is_open=opens_reasoning)
        if use is not None:
            calls = self.tools.parser(use)
        return None if reasoning is None and calls is None else AnswerParts(reasoning, calls)
