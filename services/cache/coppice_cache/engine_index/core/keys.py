"""From an engine's event to keys: what a block's content is, and which namespace it is in.

Every part says what it is, so that an adapter named X, a salt X and an image X never meet. A key of tokens has a length
that 4 divides; one with anything else has not, and no prompt of plain tokens can meet it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coppice.messages.kv_events import BlockStored

TIER_OF_OLD_ENGINES = "GPU"


def lora_tag(lora_name: str | None, lora_id: int | None = None) -> bytes:
    """The adapter, by its name where there is one: an id is a number of one engine only. Empty: none."""
    if lora_name is not None:
        return b"name:" + lora_name.encode("utf-8", "surrogatepass")
    return b"id:%d" % lora_id if lora_id is not None else b""


def salt_tag(salt: str | None) -> bytes:
    """Empty: none."""
    return b"salt:" + salt.encode("utf-8", "surrogatepass") if salt is not None else b""


def content_key(lora: bytes, salt: bytes) -> bytes:
    """Both tags, the first one after its length."""
    return len(lora).to_bytes(4, "little") + lora + salt


def tier_of(medium: str | None, locality: str | None) -> str:
    name = (medium or TIER_OF_OLD_ENGINES).upper()[:32]
    return f"REMOTE:{name}" if locality is not None and locality.upper() == "REMOTE" else name


def namespace_of(event: BlockStored) -> tuple[bytes, bytes]:
    """Tags of adapter and salt. vLLM tells a salt with the first block of a prompt, SGLang with every event."""
    lora = lora_tag(event.lora_name, event.lora_id)
    if event.cache_salt is not None:
        return lora, salt_tag(event.cache_salt)
    if event.parent_block_hash is None and event.extra_keys:
        return lora, salt_tag(_salt_of(event, event.extra_keys[0]))
    return lora, b""


def block_keys(event: BlockStored) -> list[bytes] | None:
    """One key per block; None where the event does not say which tokens belong to which block."""
    width, tokens, hashes = event.block_size * 4, event.tokens, event.block_hashes
    if len(tokens) != width * len(hashes):
        return None
    keys = [tokens[start : start + width] for start in range(0, len(tokens), width)]
    if event.lookahead is not None:
        if len(event.lookahead) != len(keys):
            return None
        keys = [key + beyond for key, beyond in zip(keys, event.lookahead, strict=True)]
    if event.extra_keys is None or not any(event.extra_keys):
        return keys
    if len(event.extra_keys) != len(keys):
        return None
    salt = event.cache_salt
    if salt is None and event.parent_block_hash is None:
        salt = _salt_of(event, event.extra_keys[0])
    extras = [event.extra_keys[0], *event.extra_keys[1:]]
    left = [_without(event, extra, salt if index == 0 else None) for index, extra in enumerate(extras)]
    return [key + _tail(rest, width) if rest else key for key, rest in zip(keys, left, strict=True)]


def _salt_of(event: BlockStored, extra: tuple[Any, ...] | None) -> str | None:
    """The one text among the extra keys of a first block that is not the adapter's name, if it is one."""
    texts = [_salt_text(key) for key in _without(event, extra, None)]
    found = [text for text in texts if text is not None]
    return found[0] if len(found) == 1 else None


def _salt_text(key: Any) -> str | None:
    if isinstance(key, str):
        return key
    if _typed(key) == "cache_salt":
        salt = dict(key).get("salt")
        return salt if isinstance(salt, str) else None
    return None


def _without(event: BlockStored, extra: tuple[Any, ...] | None, salt: str | None) -> tuple[Any, ...]:
    """Extra keys less what the namespace says already: the adapter's name, which comes first, and the salt."""
    if not extra:
        return ()
    left = list(extra)
    if event.lora_name is not None and _is_lora(left[0], event.lora_name):
        del left[0]
    if salt is not None:
        for index, key in enumerate(left):
            if _salt_text(key) == salt:
                del left[index]
                break
    return tuple(left)


def _is_lora(key: Any, name: str) -> bool:
    return bool(key == name or (_typed(key) == "lora" and dict(key).get("name") == name))


def _typed(key: Any) -> str | None:
    """The type of an extra key that was a map, which came as sorted pairs of field and value."""
    if not isinstance(key, tuple) or not key:
        return None
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in key):
        return None
    kind = dict(key).get("type")
    return kind if isinstance(kind, str) else None


def _tail(extra: Iterable[Any], width: int) -> bytes:
    """Whatever a block depends on, written so that different things differ, and 1 byte longer than a multiple of 4."""
    text = repr(tuple(extra)).encode("utf-8", "surrogatepass") + b"|%d" % width
    return text + b"\0" * ((1 - len(text)) % 4)
