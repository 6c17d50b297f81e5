"""Edits of the tenants file as text: only what changes is written, so comments, order and quotes of the rest stay.

    compose --> nodes with their places in the text --> (start, end, new text) --> text

Where YAML is written in a form that cannot be edited so, a person is told to edit it by hand, and nothing is lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from coppice.errors import UsageError

Field = str | int | float | Mapping[str, str] | list[str]


@dataclass(frozen=True, slots=True)
class _Change:
    start: int
    end: int
    text: str


def time_text(time: datetime) -> str:
    """RFC 3339, in UTC."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class TenantsText:
    """The text of one tenants file that was found to be right. Methods return the new text; raise UsageError."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._text = text
        self._root: Any = yaml.compose(text, Loader=yaml.SafeLoader)  # types of nodes are known after the parse only

    def add(self, fields: Mapping[str, Field]) -> str:
        """One more tenant, behind the others."""
        if self._root is None:
            return self._text + "tenants:\n" + _entry("  ", fields)
        tenants = self._tenants()
        indent = " " * tenants.start_mark.column
        return self._apply([self._lines_behind(tenants, _entry(indent, fields))])

    def set_keys(self, tenant_id: str, expiries: Mapping[int, datetime], dropped: set[int], added: str = "") -> str:
        """Give the keys at these places an expiry, drop those, add one (in flow form)."""
        tenant = self._tenant(tenant_id)
        name, value = self._child(tenant, "api_key_sha256")
        if isinstance(value, yaml.SequenceNode) and not value.flow_style and (added or len(dropped) < len(value.value)):
            return self._apply(self._changes_of_lines(value, expiries, dropped, added))
        items = value.value if isinstance(value, yaml.SequenceNode) else [value]
        kept = [_flow(item, expiries.get(at)) for at, item in enumerate(items) if at not in dropped]
        kept += [added] if added else []
        if isinstance(value, yaml.SequenceNode) and not value.flow_style:
            colon = self._text.index(":", name.end_mark.index) + 1
            return self._apply([_Change(colon, colon, " []"), *(self._without(item) for item in items)])
        if "#" in self._text[value.start_mark.index : _end_of(value)]:
            raise self._by_hand(value, "a comment stands between these keys, and would be lost")
        if tenant.flow_style or not kept:
            return self._apply([_Change(value.start_mark.index, _end_of(value), f"[{', '.join(kept)}]")])
        colon = self._text.index(":", name.end_mark.index) + 1
        lines = "".join(f"\n{' ' * (name.start_mark.column + 2)}- {item}" for item in kept)
        return self._apply([_Change(colon, _end_of(value), lines)])

    def _changes_of_lines(
        self, keys: yaml.SequenceNode, expiries: Mapping[int, datetime], dropped: set[int], added: str
    ) -> list[_Change]:
        """Of keys that have a line each, or several."""
        changes = []
        for at, item in enumerate(keys.value):
            if at in dropped:
                changes.append(self._without(item))
            elif at in expiries:
                changes.append(self._expire(item, expiries[at]))
        if added:
            changes.append(self._lines_behind(keys, f"{' ' * keys.start_mark.column}- {added}\n"))
        return changes

    def _expire(self, item: yaml.Node, time: datetime) -> _Change:
        if isinstance(item, yaml.MappingNode) and not item.flow_style:
            for key, value in item.value:
                if key.value == "expires":
                    return _Change(value.start_mark.index, value.end_mark.index, time_text(time))
            return self._lines_behind(item, f"{' ' * item.start_mark.column}expires: {time_text(time)}\n")
        return _Change(item.start_mark.index, _end_of(item), _flow(item, time))

    def _without(self, item: yaml.Node) -> _Change:
        """The lines from an item's dash to its end."""
        start = self._text.rindex("\n", 0, item.start_mark.index) + 1
        return _Change(start, self._end_of_line(_end_of(item)), "")

    def _lines_behind(self, node: yaml.Node, lines: str) -> _Change:
        """Behind the line in which a node ends; the file's last one may lack its newline."""
        end = self._end_of_line(_end_of(node))
        return _Change(end, end, lines if self._text[:end].endswith("\n") else f"\n{lines}")

    def _end_of_line(self, at: int) -> int:
        newline = self._text.find("\n", at)
        return len(self._text) if newline < 0 else newline + 1

    def _tenants(self) -> yaml.SequenceNode:
        tenants = self._child(self._root, "tenants")[1]
        if self._root.flow_style or tenants.flow_style:
            raise self._by_hand(tenants, "tenants stand in brackets; write each on lines of its own, after a dash")
        assert isinstance(tenants, yaml.SequenceNode)
        return tenants

    def _tenant(self, tenant_id: str) -> yaml.MappingNode:
        tenants = self._child(self._root, "tenants")[1].value
        found = next(tenant for tenant in tenants if self._child(tenant, "id")[1].value == tenant_id)
        assert isinstance(found, yaml.MappingNode)
        return found

    def _child(self, node: yaml.MappingNode, name: str) -> Any:
        """(key, value); YAML's merge key may have brought it from elsewhere."""
        for key, value in node.value:
            if key.value == name:
                return key, value
        raise self._by_hand(node, f"{name} is not written here")

    def _apply(self, changes: list[_Change]) -> str:
        """Of two changes at one place the earlier stands first."""
        parts, at = [], 0
        for change in sorted(changes, key=lambda change: change.start):
            parts += [self._text[at : change.start], change.text]
            at = change.end
        return "".join(parts) + self._text[at:]

    def _by_hand(self, node: yaml.Node, why: str) -> UsageError:
        return UsageError(f"{self._path}:{node.start_mark.line + 1}: {why}", hint="nothing was written; edit by hand")


def _end_of(node: yaml.Node) -> int:
    """Where the last thing of a node ends; the end of a block collection is behind the comments that follow it."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return int(node.end_mark.index)


def flow_key(digest: str, name: str | None = None, expires: datetime | None = None) -> str:
    """A key as one line of YAML."""
    if not name and not expires:
        return f'"{digest}"'
    parts = [f'sha256: "{digest}"']
    parts += [f"name: {scalar(name)}"] if name else []
    parts += [f"expires: {time_text(expires)}"] if expires else []
    return "{" + ", ".join(parts) + "}"


def _flow(item: yaml.Node, expires: datetime | None) -> str:
    """A key that is there, as one line, with another expiry where one is given."""
    if isinstance(item, yaml.ScalarNode):
        return flow_key(item.value, expires=expires)
    assert isinstance(item, yaml.MappingNode)
    found: dict[str, Any] = {key.value: value.value for key, value in item.value}
    text = found.get("expires")
    before = yaml.safe_load(text) if text else None
    before = datetime.fromisoformat(before) if isinstance(before, str) else before
    return flow_key(found["sha256"], found.get("name"), expires or before)


def _entry(indent: str, fields: Mapping[str, Field]) -> str:
    lines: list[str] = []
    for name, value in fields.items():
        lines.append(f"{indent}{'  ' if lines else '- '}{name}: {_value(value)}\n")
    return "".join(lines)


def _value(value: Field) -> str:
    """Keys come as YAML already; a group's mode is a mapping, names of models are a list."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {scalar(text)}" for key, text in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(json.dumps(text, ensure_ascii=False) for text in value)}]"
    return value if isinstance(value, str) else json.dumps(value)


def scalar(text: str) -> str:
    """Quoted where YAML would take it for something else than a text, such as `on`."""
    return str(yaml.safe_dump(text, width=1000)).split("\n", 1)[0]
