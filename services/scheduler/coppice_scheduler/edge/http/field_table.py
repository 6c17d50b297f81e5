"""What becomes of each field of a body: read, taken without effect, refused by name, or unknown.

    supported    read by the API's parser
    no effect    taken: it changes no output here, and need not
    refused      400 that names the field, unless its value is one that changes nothing
    unknown      400 that names the nearest field there is, or taken, as the operator says (`--unknown-fields`)

Nothing is ignored in silence: a caller who sends `tools` and gets an answer believes that they were offered.
What was taken without effect is listed in a header of the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from coppice.settings import nearest
from coppice_scheduler.edge.base.errors import ApiError, invalid
from coppice_scheduler.edge.base.tenant_model import ContextLimit

NAMED_MAX = 16  # fields in the header that lists them
NAME_CHARS = 64
IGNORED_HEADER = "x-coppice-ignored-fields"
_NO_TOKEN = re.compile(r"[^A-Za-z0-9_.\[\]-]")


class UnknownFields(StrEnum):
    """What becomes of a field that nobody has heard of."""

    REFUSE = "refuse"
    WARN = "warn"  # taken; the log names it once
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a body is read against."""

    context: ContextLimit
    unknown_fields: UnknownFields = UnknownFields.REFUSE
    template_variables: frozenset[str] = frozenset()  # what a client may give the chat template


@dataclass(slots=True)
class Notes:
    """Names of the fields of one body that were taken without effect, in order, each once."""

    unknown: UnknownFields = UnknownFields.REFUSE
    ignored: dict[str, None] = field(default_factory=dict)

    def ignore(self, *names: str) -> None:
        self.ignored.update(dict.fromkeys(name[:NAME_CHARS] for name in names))


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field that would change the answer, and is not done."""

    instead: str  # a sentence: what the caller can do
    harmless: tuple[Any, ...] = ()  # values that change nothing; `null` is one for all fields

    def check(self, name: str, value: Any) -> None:
        """Raises ApiError, unless the value changes nothing."""
        if value is None or any(value == other and type(value) in _kin(other) for other in self.harmless):
            return
        accepted = f" or send {_shown(self.harmless, value)}" if self.harmless else ""
        message = f"{name} is not supported yet. Leave it out{accepted}. {self.instead}"
        raise invalid(message, param=name, code="unsupported_parameter")

    def described(self) -> dict[str, Any]:
        """As a JSON schema."""
        text = f"Not supported: only values that change nothing are taken. {self.instead}"
        return {"enum": [*self.harmless, None], "description": text}


@dataclass(frozen=True, slots=True)
class FieldTable:
    """The fields of one route."""

    supported: Set[str]
    no_effect: Set[str]  # any value is taken
    refused: Mapping[str, Refusal]
    elsewhere: Set[str] = field(default_factory=frozenset)  # fields of other routes, which are never taken

    def check(self, body: Mapping[str, Any], unknown: UnknownFields) -> tuple[str, ...]:
        """Names of the fields that were taken without effect.

        Raises ApiError for the first field that would have to be ignored and must not be.
        """
        ignored = []
        for name, value in body.items():
            if name in self.supported:
                continue
            refusal = self.refused.get(name)
            is_known = refusal is not None or name in self.no_effect
            if not is_known and (name in self.elsewhere or unknown is UnknownFields.REFUSE):
                raise unknown_field(name, self.supported)
            if refusal is not None:
                refusal.check(name, value)
            elif value is not None:
                ignored.append(name[:NAME_CHARS])
        return tuple(ignored)


def without_effect(
    values: Mapping[str, Any], known: Collection[str], no_effect: Collection[str], where: str, unknown: UnknownFields
) -> Iterator[str]:
    """Names of the fields of the inner object `where` that say something, and are taken without effect.

    Raises ApiError for the first field that is neither of those that are known nor of those that have no effect,
    unless such fields are taken.
    """
    for name, value in values.items():
        if name in known or value is None:
            continue
        if name not in no_effect and unknown is UnknownFields.REFUSE:
            raise unsupported_field(name, where)
        yield name


def unsupported_field(name: str, where: str) -> ApiError:
    """The refusal of a field of the inner object `where`."""
    param = f"{where}.{name[:100]}"
    return invalid(f"{param} is not supported.", param=param, code="unsupported_parameter")


def unknown_field(name: str, known: Iterable[str]) -> ApiError:
    """The refusal, with the nearest of those that are known."""
    message = f"Unknown field {name[:100]!r}; {nearest(name[:100], known)}"
    return invalid(message, param=name[:100], code="unknown_parameter")


def ignored_header(names: tuple[str, ...]) -> dict[str, str]:
    """The header that lists what was taken without effect; none where nothing was."""
    if not names:
        return {}
    shown = [_NO_TOKEN.sub("?", name) for name in names[:NAMED_MAX]]
    more = [f"and {len(names) - NAMED_MAX} more"] if len(names) > NAMED_MAX else []
    return {IGNORED_HEADER: ", ".join([*shown, *more])}


def _kin(value: Any) -> tuple[type, ...]:
    """Types that a value may have to count as equal: 0 and 0.0 do, 0 and false do not."""
    return (int, float) if type(value) in (int, float) else (type(value),)


def _shown(harmless: tuple[Any, ...], sent: Any) -> str:
    """A value that changes nothing, as JSON; of the type that was sent where there is one."""
    alike = [value for value in harmless if type(value) in _kin(sent)]
    return json.dumps((alike or harmless)[0])
