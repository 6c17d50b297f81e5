"""The tables of docs/API.md that tell what the code's own tables say: `make api-tables` writes, `make check` compares.

<!-- table: routes -->
| ... |                    all that stands between the two is written by this script
<!-- end of table -->
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from coppice.messages.sampling import BEAMS_MAX, BIAS, CHOICES_MAX, LENGTH_PENALTY, LOGPROBS_MAX, RANGES
from coppice_scheduler.core.state.request import OutputError, OutputErrorCode, Refused, RefusedReason
from coppice_scheduler.edge.anthropic import fields as messages
from coppice_scheduler.edge.anthropic.errors import TYPES
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind, from_output, from_refused
from coppice_scheduler.edge.frontend import generation_spec as bounds
from coppice_scheduler.edge.grpc.errors import CODES
from coppice_scheduler.edge.http.field_table import FieldTable, Refusal
from coppice_scheduler.edge.openai.parsing import fields as openai
from coppice_scheduler.edge.openai.parsing.template_values import MAX_VALUES
from coppice_scheduler.edge.openai.responses import fields as responses
from coppice_scheduler.edge.rest_app import description_of
from coppice_scheduler.edge.text.output_format import MAX_FORMAT_CHOICES
from coppice_scheduler.edge.text.tools.tool import MAX_TOOLS
from tests.contract.openai.json_schema.keywords import KEYWORDS

DOCUMENT = Path(__file__).parents[1] / "docs" / "API.md"
_TABLE = re.compile(r"(<!-- table: ([a-z -]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
Row = tuple[str, ...]


def main(arguments: list[str]) -> str | None:
    """What is wrong; None where nothing is."""
    parser = argparse.ArgumentParser(prog="python -m scripts.api_tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    only_checks = parser.parse_args(arguments).check
    text = DOCUMENT.read_text()
    new = written(text)
    if only_checks:
        return drift(text, new)
    DOCUMENT.write_text(new)
    return None


def written(text: str) -> str:
    """The document with each of its tables as the code has it."""
    found = [match[2] for match in _TABLE.finditer(text)]
    assert sorted(found) == sorted(TABLES), f"tables of the document: {sorted(found)}, of the script: {sorted(TABLES)}"
    return _TABLE.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[4]}", text)


def drift(text: str, new: str) -> str | None:
    pairs = zip(_TABLE.finditer(text), _TABLE.finditer(new), strict=True)
    stale = ", ".join(old[2] for old, now in pairs if old[3] != now[3])
    return f"{DOCUMENT.name} differs from the code ({stale}): run make api-tables" if stale else None


def _table(head: Row, rows: Iterable[Row]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, *rows]).replace("\n", f"\n{'|---' * len(head)}|\n", 1)


def _code(*words: str) -> str:
    return ", ".join(f"`{word}`" for word in words)


# ---- what each table says


def _routes() -> str:
    paths: Mapping[str, Any] = description_of("m", frozenset(), has_metrics=False, has_tools=True)["paths"]
    rows = [
        (f"`{method.upper()} {path}`", route["summary"], " ".join(status for status in route["responses"]))
        for path, operations in paths.items()
        for method, route in operations.items()
    ]
    return _table(("route", "what it does", "statuses"), rows)


def _bounds() -> str:
    several = (
        ("`n`", f"from 1 to {CHOICES_MAX}; of a beam search to {BEAMS_MAX}"),
        ("`best_of`", f"from `n` to {CHOICES_MAX}; of a beam search to {BEAMS_MAX}"),
        ("`logprobs` of completions, `top_logprobs`, `prompt_logprobs`", f"from 0 to {LOGPROBS_MAX}"),
        ("`logit_bias`", f"{BIAS}; at most {bounds.MAX_LOGIT_BIASES} tokens"),
        ("`stop`", f"at most {bounds.MAX_STOPS} strings of {bounds.MAX_STOP_BYTES} bytes"),
        ("`stop_token_ids`", f"at most {bounds.MAX_STOP_TOKEN_IDS}"),
        ("`prompt`", f"at most {bounds.MAX_PROMPTS} prompts; prompts times answers at most {bounds.MAX_RUNS}"),
        ("`messages`, items of `input`", f"at most {bounds.MAX_MESSAGES}"),
        ("`tools`", f"at most {MAX_TOOLS}"),
        ("`guided_choice`, `choice`", f"at most {MAX_FORMAT_CHOICES} texts"),
        ("`chat_template_kwargs`", f"at most {MAX_VALUES} values, {bounds.MAX_TEMPLATE_BYTES // 1024} KiB as JSON"),
        ("`cache_salt`", f"from 1 to {bounds.MAX_CACHE_SALT} characters"),
        ("the body", f"at most {bounds.MAX_BODY_BYTES // 1024**2} MiB"),
    )
    ranges = [(f"`{name}`", str(allowed)) for name, allowed in {**RANGES, "length_penalty": LENGTH_PENALTY}.items()]
    return _table(("field", "what it may be"), [*ranges, *several])


def _errors() -> str:
    told = [from_refused(Refused(reason, "", 0)) for reason in RefusedReason]
    told += [from_output(OutputError(code, "")) for code in OutputErrorCode]
    rows = [
        (str(kind.http_status), CODES[kind].name, _code(kind.type_name), _code(TYPES[kind]), _codes(kind, told))
        for kind in ErrorKind
    ]
    return _table(("status", "gRPC code", "`type`", "`type` of messages", "`code`, of the scheduler"), rows)


def _codes(kind: ErrorKind, told: list[ApiError]) -> str:
    return _code(*sorted({str(error.code) for error in told if error.kind is kind}))


def _keywords() -> str:
    """Those of which there is the same to say are in one row."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, keyword in KEYWORDS.items():
        alike.setdefault((keyword.becomes.value, keyword.note), []).append(name)
    return _table(
        ("keyword", "what becomes of it", "bounds and notes"), [(_code(*names), *said) for said, names in alike.items()]
    )


def _no_effect(fields: Mapping[str, str]) -> Callable[[], str]:
    return lambda: _table(("taken without effect", "because"), [(f"`{name}`", why) for name, why in fields.items()])


def _refused(**routes: Mapping[str, Refusal]) -> Callable[[], str]:
    """Of one route or several, by their names."""
    has_several = len(routes) > 1
    head = ("refused", *(["of"] if has_several else []), "but for", "instead")
    return lambda: _table(head, _refusals(routes, has_several))


def _refusals(routes: Mapping[str, Mapping[str, Refusal]], has_several: bool) -> Iterator[Row]:
    for name in sorted({name for fields in routes.values() for name in fields}):
        left = {route: fields[name] for route, fields in routes.items() if name in fields}
        while left:
            refusal = next(iter(left.values()))
            alike = [route for route, other in left.items() if other == refusal]
            for route in alike:
                del left[route]
            allowed = _code(*(json.dumps(value) for value in refusal.harmless))
            yield (f"`{name}`", *([", ".join(alike)] if has_several else []), allowed, refusal.instead)


def _not_done(table: FieldTable) -> dict[str, Refusal]:
    more = {f"stream_options.{name}": refusal for name, refusal in openai.STREAM_OPTIONS_REFUSED.items()}
    return {name: refusal for name, refusal in {**table.refused, **more}.items() if name not in table.supported}


TABLES: Mapping[str, Callable[[], str]] = {
    "routes": _routes,
    "bounds": _bounds,
    "errors": _errors,
    "keywords of json schema": _keywords,
    "fields without effect": _no_effect(openai.NO_EFFECT),
    "refused fields": _refused(chats=_not_done(openai.CHAT), completions=_not_done(openai.COMPLETION)),
    "fields of responses without effect": _no_effect(responses.NO_EFFECT),
    "what include may name": _no_effect(responses.INCLUDE_NO_EFFECT),
    "refused fields of responses": _refused(responses=responses.REFUSED),
    "fields of messages without effect": _no_effect(messages.NO_EFFECT),
    "refused fields of messages": _refused(messages=messages.REFUSED),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
