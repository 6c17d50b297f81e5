"""The tokens of a chat, as the front door makes them: its own parser, the checkpoint's chat template, its tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from coppice.errors import UnavailableError, UsageError

_FORM = "a list of chat messages, or a whole body of /v1/chat/completions"


def chat_tokens(file: Path, model: str, *, whole: bool) -> list[int]:
    """`file` holds JSON. No model: the demo's. `whole`: the prompt of an answer, else only what every chat that begins
    with these messages has in common, unless the body itself says where its prompt ends.

    Raises UsageError, UnavailableError.
    """
    body = _body(file)
    try:
        return _tokens(body, model, whole=whole)
    except ModuleNotFoundError as error:
        raise UnavailableError(
            f"{error.name} is not installed", hint="pip install 'coppice[scheduler]', or give --tokens"
        ) from error


def _body(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--messages {file}: {getattr(error, 'strerror', None) or error}") from None
    except ValueError as error:
        raise UsageError(f"--messages {file} is no JSON: {error}", hint=f"give {_FORM}") from None
    if isinstance(found, list):
        found = {"messages": found}
    if not isinstance(found, dict) or "messages" not in found:
        raise UsageError(f"--messages {file} has no messages", hint=f"give {_FORM}")
    if found.get("cache_salt") is not None:
        raise UsageError(
            f"--messages {file} has a cache_salt: what it caches is found by those who know the salt alone",
            hint="leave it out to see what is cached without one",
        )
    return {"model": "any", **found}


def _tokens(body: dict[str, Any], model: str, *, whole: bool) -> list[int]:
    from coppice_scheduler.edge.base.errors import ApiError
    from coppice_scheduler.edge.base.tenant_model import ContextLimit
    from coppice_scheduler.edge.frontend.admission import check_messages
    from coppice_scheduler.edge.frontend.generation_spec import ChatPrompt
    from coppice_scheduler.edge.http.field_table import Reading, UnknownFields
    from coppice_scheduler.edge.openai.parsing.schema import parse_chat
    from coppice_scheduler.edge.text.chat import MAX_RENDERED_CHARS, ChatTemplate, PromptEnd
    from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text
    from coppice_scheduler.edge.text.tokenizer import Tokenizer, unpack_tokens
    from coppice_up.checkpoint import find_checkpoint

    text = load_checkpoint_text(find_checkpoint(model).folder)
    template = ChatTemplate(text)
    reading = Reading(ContextLimit(MAX_RENDERED_CHARS), UnknownFields.IGNORE, template.variables)
    try:
        (chat,) = parse_chat(json.dumps(body).encode(), reading).spec.prompts
        assert isinstance(chat, ChatPrompt), "parse_chat makes chats"
        if not whole and chat.end is PromptEnd.ANSWER and body.get("add_generation_prompt") is None:
            chat = replace(chat, end=PromptEnd.LAST_MESSAGE)
        check_messages(chat)
        prompt = template.render_now(chat.messages, chat.template_values, chat.tools, chat.end)
        return unpack_tokens(Tokenizer(text).encode_now(prompt, add_special_tokens=False))
    except ApiError as error:
        raise UsageError(f"--messages: {error.message}") from None
