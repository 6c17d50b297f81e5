"""What a checkpoint directory says about text: tokenizer, chat template, end tokens, sampling defaults.

tokenizer.json           required
tokenizer_config.json    bos/eos/... tokens, chat_template
chat_template.jinja      wins over the template in tokenizer_config.json
generation_config.json   eos_token_id, temperature, top_p, top_k, max_new_tokens
config.json              eos_token_id, where generation_config.json names none
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from coppice.errors import UsageError
from coppice.messages.sampling import RANGES

TEMPLATE_FILE = "chat_template.jinja"
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds where a request says nothing: generation_config.json, else OpenAI's values (as vLLM does it)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    max_new_tokens: int = 0  # for chats; 0 = as much as the context holds


@dataclass(frozen=True, slots=True)
class CheckpointText:
    """Facts read from files; `tokenizer.py` and `chat.py` act on them."""

    raw: RawTokenizer
    directory: str
    special_tokens: Mapping[str, str]  # bos_token, eos_token, ...
    eos_token_ids: frozenset[int]
    chat_template: str | None
    tool_template: str | None  # for chats with tools, where it is another one
    defaults: SamplingDefaults


def load_checkpoint_text(directory: str | Path) -> CheckpointText:
    """Read the files. Raises UsageError that names the file which is missing or wrong."""
    root = Path(directory)
    if not root.is_dir():
        raise UsageError(f"{root} is no directory; a checkpoint directory is needed")
    raw = _load_tokenizer(root / "tokenizer.json")
    tokenizer_config = _read_json(root / "tokenizer_config.json")
    generation_config = _read_json(root / "generation_config.json")
    config = _read_json(root / "config.json")
    special = _special_tokens(tokenizer_config)
    return CheckpointText(
        raw=raw,
        directory=root.name,
        special_tokens=special,
        eos_token_ids=_eos_token_ids(raw, generation_config, config, special),
        chat_template=_chat_template(root, tokenizer_config),
        tool_template=None if (root / TEMPLATE_FILE).is_file() else _named_templates(tokenizer_config).get("tool_use"),
        defaults=_defaults(root / "generation_config.json", generation_config),
    )


def _load_tokenizer(path: Path) -> RawTokenizer:
    if not path.is_file():
        raise UsageError(f"{path} is missing", hint="a checkpoint in the fast format with tokenizer.json is needed")
    try:
        raw = RawTokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception for every parse failure
        raise UsageError(f"{path} cannot be read: {error}", hint="is the file complete?") from error
    raw.no_truncation()
    raw.no_padding()
    return raw


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="is the file complete?") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} must hold a JSON object")
    return value


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_NAMES:
        value = tokenizer_config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _eos_token_ids(
    raw: RawTokenizer, generation_config: Mapping[str, Any], config: Mapping[str, Any], special: Mapping[str, str]
) -> frozenset[int]:
    """The first source that names any, in the order in which `generate` of transformers would find it."""
    for source in (generation_config, config):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found = frozenset(i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0)
        if found:
            return found
    eos = raw.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return frozenset() if eos is None else frozenset((eos,))


def _chat_template(root: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    path = root / TEMPLATE_FILE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error
    template = tokenizer_config.get("chat_template")
    return template if isinstance(template, str) else _named_templates(tokenizer_config).get("default")


def _named_templates(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Where a checkpoint has several; none where it has one."""
    entries = tokenizer_config.get("chat_template")
    pairs = (
        (entry.get("name"), entry.get("template"))
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, dict)
    )
    return {name: template for name, template in pairs if isinstance(name, str) and isinstance(template, str)}


def _defaults(path: Path, generation_config: Mapping[str, Any]) -> SamplingDefaults:
    ours = SamplingDefaults()

    def number(name: str, otherwise: float, low: float, high: float) -> float:
        value = generation_config.get(name)
        if value is None:
            return otherwise
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise UsageError(f"{path}: {name} is {value!r}; it must be a number from {low:g} to {high:g}")
        return value

    return SamplingDefaults(
        temperature=float(number("temperature", ours.temperature, 0, RANGES["temperature"].high)),
        top_p=float(number("top_p", ours.top_p, 0, RANGES["top_p"].high)) or 1.0,
        top_k=int(number("top_k", ours.top_k, 0, RANGES["top_k"].high)),
        max_new_tokens=int(number("max_new_tokens", ours.max_new_tokens, 0, 2**31)),
    )
