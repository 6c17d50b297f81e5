"""Chats as tokens: what `explain --messages` and `pin --messages` ask for is what the front door computes."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.processors import TemplateProcessing

from coppice.errors import UsageError
from coppice_cli.cache.token_lists import read_tokens
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.base.tenant_model import ContextLimit
from coppice_scheduler.edge.frontend.admission import PromptReader
from coppice_scheduler.edge.frontend.text_work import TextWork
from coppice_scheduler.edge.http.field_table import Reading
from coppice_scheduler.edge.openai.parsing.schema import parse_chat
from coppice_scheduler.edge.text.chat import ChatTemplate
from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text
from coppice_scheduler.edge.text.tokenizer import Tokenizer, unpack_tokens
from coppice_up.checkpoint import demo_model_folder

SYSTEM = {"role": "system", "content": "You answer questions about the standard library of Python. " * 3}
USER = {"role": "user", "content": "What does sorted do?"}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
CONTEXT = ContextLimit(4096)


def written(folder: Path, content: Any) -> Path:
    file = folder / "messages.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def computed(body: dict[str, Any], folder: Path | None = None) -> list[int]:
    """By the front door's own prompt reader."""
    text = load_checkpoint_text(folder or demo_model_folder())
    template = ChatTemplate(text)
    spec = parse_chat(json.dumps({"model": "m", **body}).encode(), Reading(CONTEXT)).spec
    reader = PromptReader(Tokenizer(text), template, ModelInfo("m", CONTEXT.num_tokens, 1), 0, TextWork())
    return unpack_tokens(asyncio.run(reader.tokens_of("t", spec.prompts[0], "messages", CONTEXT)))


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [SYSTEM, USER]},
        {"messages": [SYSTEM, USER], "tools": TOOLS, "temperature": 0, "max_tokens": 9},
        {"messages": [SYSTEM, USER, {"role": "assistant", "content": "It"}], "continue_final_message": True},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "in parts"}]}]},
    ],
)
def test_a_body_has_the_tokens_that_its_chat_computes(tmp_path: Path, body: dict[str, Any]) -> None:
    assert read_tokens("", "", "", written(tmp_path, body)) == computed(body)


def test_a_chat_has_the_special_tokens_of_its_template_alone(tmp_path: Path) -> None:
    """Many tokenizers add one to each text."""
    folder = tmp_path / "model"
    shutil.copytree(demo_model_folder(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    first = tokenizer.id_to_token(0)
    tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert read_tokens("", "x", str(folder))[0] == 0, "a text has it"
    chat = read_tokens("", "", str(folder), written(tmp_path, [SYSTEM, USER]))
    assert chat == computed({"messages": [SYSTEM, USER]}, folder)
    assert chat == computed({"messages": [SYSTEM, USER]})


def test_a_list_of_messages_is_a_chat(tmp_path: Path) -> None:
    assert read_tokens("", "", "", written(tmp_path, [SYSTEM, USER])) == computed({"messages": [SYSTEM, USER]})


def test_what_is_pinned_begins_every_chat_that_begins_so(tmp_path: Path) -> None:
    pinned = read_tokens("", "", "", written(tmp_path, [SYSTEM]), whole_chat=False)
    assert len(pinned) > 48
    for question in (USER, {"role": "user", "content": "And what does reversed do?"}):
        assert computed({"messages": [SYSTEM, question]})[: len(pinned)] == pinned
    whole = read_tokens("", "", "", written(tmp_path, [SYSTEM]))
    assert computed({"messages": [SYSTEM, USER]})[: len(whole)] != whole, "an answer's beginning is not in common"
    said = {"messages": [SYSTEM], "add_generation_prompt": True}
    assert read_tokens("", "", "", written(tmp_path, said), whole_chat=False) == whole, "unless the body says so"


def test_a_text_alone_is_not_what_a_chat_computes(tmp_path: Path) -> None:
    """Why there is --messages."""
    chat = read_tokens("", "", "", written(tmp_path, [USER]))
    assert read_tokens("", USER["content"], "") != chat[: len(chat) - 1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no JSON"),
        ('"hello"', "has no messages"),
        ('{"prompt": "hello"}', "has no messages"),
        ("[]", "messages is empty"),
        ('[{"role": "clown", "content": "x"}]', "messages[0].role"),
        ('{"messages": [{"role": "user", "content": "x"}], "cache_salt": "s"}', "has a cache_salt"),
    ],
)
def test_what_is_no_chat_is_told(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_tokens("", "", "", written(tmp_path, content))
    assert words in caught.value.line()


def test_the_prompt_is_given_once(tmp_path: Path) -> None:
    file = written(tmp_path, [USER])
    for tokens, text, messages in (("1", "", file), ("", "x", file), ("", "", None), ("1", "x", None)):
        with pytest.raises(UsageError, match="give the prompt, once"):
            read_tokens(tokens, text, "", messages)
    with pytest.raises(UsageError, match=r"--messages .*No such file"):
        read_tokens("", "", "", tmp_path / "nowhere.json")
