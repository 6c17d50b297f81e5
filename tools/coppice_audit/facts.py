"""What an answer says beside its text: status, headers, ids, usage, errors, each under a name of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from coppice_bench.serve.load.answer import Answer

_ID_CHARS_MIN = 16  # shorter words are equal by chance, or because the prompts are


def facts_of(answer: Answer) -> dict[str, str]:
    """Of any answer, whole or streamed, good or bad. What the model said is left out: it follows from the prompt."""
    found = {"status": str(answer.status)}
    found |= {f"header {name.decode('latin-1')}": value.decode("latin-1") for name, value in answer.headers.items()}
    if answer.is_stream:
        events = answer.events()
        for name, value in (events[0] if events else {}).items():
            found |= _flat(name, value)
        found |= _flat("usage", answer.usage())
        found["events"] = str(len(events))
    else:
        found |= _flat("body", _json_of(answer))
    return found


def beside(facts: Mapping[str, str], first: Mapping[str, str]) -> dict[str, str]:
    """`facts`, and which of their ids equal those of the answer to the prompt that was sent first.

    An id that is made of the prompt is new each time, and tells all the same.
    """
    same = {
        f"{name} as the victim's": "yes" if first.get(name) == value else "no"
        for name, value in facts.items()
        if len(value) >= _ID_CHARS_MIN
    }
    return {**facts, **same}


def _json_of(answer: Answer) -> Any:
    try:
        return answer.json()
    except ValueError:
        return "not JSON"


def _flat(name: str, value: Any) -> dict[str, str]:
    return dict(_leaves(name, value))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if name.endswith("choices") and isinstance(value, list):
        yield f"{name} fields", " ".join(sorted({key for choice in value for key in choice}))
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)
