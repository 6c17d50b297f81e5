"""Where the prompt of a chat ends, as in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.text.chat import ChatMessage, ChatTemplate, PromptEnd
from coppice_scheduler.edge.text.tools.tool import ToolCall
from tests.unit.scheduler.edge.frontend.test_frontdoor_text import (
    CHATS,
    TEMPLATES,
    checkpoint_at,
    sentencepiece_like,
    with_bos,
)

CHANGING = ("tools and a namespace", "slices and tests")  # the last message, by their templates
# Some templates trim the spaces around the last message.
OPEN_CHATS = (*CHATS, [("user", "hi"), ("assistant", "It is")], [("user", "hi"), ("assistant", " It is ")])


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in CHANGING])
def test_the_end_of_a_prompt_is_as_in_transformers(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    checkpoint = checkpoint_at(tmp_path, with_bos(sentencepiece_like()), chat_template=TEMPLATES[name], **tokens)
    oracle, template = transformers.AutoTokenizer.from_pretrained(tmp_path), ChatTemplate(checkpoint)
    for chat in OPEN_CHATS:
        plain = [{"role": role, "content": content} for role, content in chat]
        messages = [ChatMessage(role, content) for role, content in chat]
        closed = oracle.apply_chat_template(plain, tokenize=False, add_generation_prompt=False)
        assert template.render_now(messages, end=PromptEnd.LAST_MESSAGE) == closed
        if name == "loop controls and generation" and len(chat) > 3:
            continue  # this template leaves out what comes later
        if name == "bos, eos, trim and tojson" and chat[-1][1].endswith("\n"):
            with pytest.raises(ApiError, match="changes the last message"):
                template.render_now(messages, end=PromptEnd.WITHIN_LAST_MESSAGE)
            continue  # JSON writes the ends of lines, which transformers does not see
        goes_on = oracle.apply_chat_template(plain, tokenize=False, continue_final_message=True)
        assert template.render_now(messages, end=PromptEnd.WITHIN_LAST_MESSAGE) == goes_on


@pytest.mark.parametrize("name", CHANGING)
def test_a_last_message_that_a_template_changes_cannot_go_on(tmp_path: Path, name: str) -> None:
    template = ChatTemplate(checkpoint_at(tmp_path, sentencepiece_like(), chat_template=TEMPLATES[name]))
    with pytest.raises(ApiError, match="changes the last message"):
        template.render_now([ChatMessage("user", "hi")], end=PromptEnd.WITHIN_LAST_MESSAGE)


def test_no_answer_goes_on_from_a_call(tmp_path: Path) -> None:
    template = ChatTemplate(checkpoint_at(tmp_path, sentencepiece_like(), chat_template="{{ messages[0].tool_calls }}"))
    last = ChatMessage("assistant", "", calls=(ToolCall("c", "f", "{}"),))
    with pytest.raises(ApiError, match="calls tools"):
        template.render_now([last], end=PromptEnd.WITHIN_LAST_MESSAGE)
