"""Content blocks of messages: objects with a type. Raises ApiError only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from coppice_scheduler.edge.anthropic.fields import CACHE_CONTROL
from coppice_scheduler.edge.base.errors import ApiError, invalid
from coppice_scheduler.edge.http.field_table import Notes, UnknownFields, without_effect
from coppice_scheduler.edge.http.json_body import Fields

TTL_MS = {"5m": 5 * 60_000, "1h": 60 * 60_000}
SCOPE = "scope"  # who may share what is cached: the tenants file says it
MAX_BLOCKS = 4096  # of one message


@dataclass(slots=True)
class MessageNotes(Notes):
    """What a body says beside its content: how long to cache it, and what has no effect."""

    retain_ms: int = 0
    comes_again: bool = False

    def saw_cache_control(self, fields: Fields, where: str) -> None:
        """A breakpoint says that what is before it will come again; how far it is cached, the tree knows better."""
        value = fields.get(CACHE_CONTROL)
        if value is None:
            return
        name = f"{where}{CACHE_CONTROL}"
        if not isinstance(value, dict) or value.get("type") != "ephemeral":
            raise invalid(f'{name} must be {{"type": "ephemeral"}}, with a ttl or without.', param=name)
        ttl = Fields(value, f"{name}.").text("ttl") or "5m"
        if ttl not in TTL_MS:
            raise invalid(f"{name}.ttl is {ttl[:50]!r}; it must be {' or '.join(TTL_MS)}.", param=f"{name}.ttl")
        for key in value.keys() - {"type", "ttl"}:
            if value[key] is None:
                continue
            if key != SCOPE and self.unknown is UnknownFields.REFUSE:
                raise invalid(f"{name}.{key[:100]} is not supported.", param=name, code="unsupported_parameter")
            self.ignore(f"{CACHE_CONTROL}.{key}")
        self.retain_ms = max(self.retain_ms, TTL_MS[ttl])
        self.comes_again = True


@dataclass(frozen=True, slots=True)
class Block:
    kind: str
    where: str  # `messages[2].content[0]`
    pattern: str  # the same of any such block: `messages[].content[]`
    fields: Fields
    values: dict[str, Any]

    def only(self, known: Collection[str], no_effect: Collection[str], notes: MessageNotes) -> None:
        """Refuse, or note, every other field; where a breakpoint is known, note it."""
        if CACHE_CONTROL in known:
            notes.saw_cache_control(self.fields, f"{self.where}.")
        for name in without_effect(self.values, ("type", *known), no_effect, self.where, notes.unknown):
            notes.ignore(f"{self.pattern}.{name}")

    def not_supported(self, supported: Iterable[str]) -> ApiError:
        return invalid(
            f"{self.where} has the type {self.kind[:50]!r}; supported are {', '.join(supported)}.",
            param=self.where,
            code="unsupported_parameter",
        )


def blocks_of(fields: Fields, name: str, where: str, pattern: str) -> Iterator[Block]:
    """Of a field that is a text or a list of blocks; a text is one block."""
    value = fields.at_most(name, MAX_BLOCKS, "blocks")
    if isinstance(value, str):
        whole = {"type": "text", "text": value}
        yield Block("text", where, pattern, Fields(whole, f"{where}."), whole)
        return
    if not isinstance(value, list):
        raise fields.wrong(name, "a string or a list of content blocks")
    for place, entry in enumerate(value):
        at = f"{where}[{place}]"
        if not isinstance(entry, dict):
            raise invalid(f"{at} must be an object with a type.", param=at)
        inner = Fields(entry, f"{at}.")
        yield Block(inner.required_text("type"), at, f"{pattern}[]", inner, entry)


def text_of(block: Block, notes: MessageNotes) -> str:
    """Of a block of type text. Sources that a text cites are not told to the model."""
    text = block.fields.required_text("text")
    block.only(("text", CACHE_CONTROL), ("citations",), notes)
    return text


def texts_of(fields: Fields, name: str, where: str, pattern: str, notes: MessageNotes) -> Iterator[str]:
    """Of a field that is a text or a list of text blocks."""
    for block in blocks_of(fields, name, where, pattern):
        if block.kind != "text":
            raise block.not_supported(("text",))
        yield text_of(block, notes)
