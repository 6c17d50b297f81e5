"""Tokens on a command line: numbers, a file of numbers, or a text or chat and the checkpoint that it is for."""

from __future__ import annotations

import json
from pathlib import Path

from coppice.errors import UnavailableError, UsageError


def read_tokens(
    tokens: str, text: str, model: str, messages: Path | None = None, *, whole_chat: bool = True
) -> list[int]:
    """`tokens` is `1,2,3` or `@FILE`; `messages` a file of a chat, of which `whole_chat` takes the prompt of an answer,
    else what chats that begin so have in common. Raises UsageError, UnavailableError."""
    if [bool(tokens), bool(text), messages is not None].count(True) != 1:
        raise UsageError(
            "give the prompt, once", hint="--tokens 1,2,3, --tokens @FILE, --text TEXT or --messages FILE, with --model"
        )
    if messages is not None:
        from coppice_cli.cache.chats import chat_tokens

        return chat_tokens(messages, model, whole=whole_chat)
    if text:
        return tokenize(text, model)
    if model:
        raise UsageError("--model is for --text and --messages; tokens need no tokenizer")
    return parse_tokens(_content(tokens[1:]) if tokens.startswith("@") else tokens)


def parse_tokens(text: str) -> list[int]:
    """Numbers with commas or spaces between them, in brackets or not. Raises UsageError."""
    found: list[int] = []
    for word in text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split():
        if not (word.isascii() and word.isdigit()) or int(word) >= 1 << 32:
            raise UsageError(f"{word[:40]!r} is no token", hint="tokens are numbers from 0 to 4294967295: 1,2,3")
        found.append(int(word))
    if not found:
        raise UsageError("there is not one token", hint="1,2,3")
    return found


def tokenize(text: str, model: str) -> list[int]:
    """As the front door reads a completion's prompt. No model: the demo's."""
    from coppice_up.checkpoint import find_checkpoint

    file = find_checkpoint(model).folder / "tokenizer.json"
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise UnavailableError(
            f"{error.name} is not installed", hint="pip install 'coppice[scheduler]', or give --tokens"
        ) from error
    if not file.exists():
        raise UsageError(f"{file} is missing", hint="point --model at a checkpoint, or give --tokens")
    return list(Tokenizer.from_file(str(file)).encode(text).ids)


def _content(name: str) -> str:
    try:
        content = Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--tokens @{name}: {getattr(error, 'strerror', None) or error}") from None
    try:
        found = json.loads(content)
    except ValueError:
        return content
    return json.dumps(found) if isinstance(found, list) else content
