"""How long a client wants its prompt cached, and whether it expects it again.

prompt_cache_options     {"ttl": "30m"}          at least so long; other times than OpenAI's are taken, too
                         {"reuse": "unlikely"}   ours: nobody will ask for it again; "likely": somebody will
prompt_cache_retention   "24h"                   the older one; "in_memory" is as long as there is room, as without it
prompt_cache_key         "agent-7"               prompts with a key are expected again

Of two times the longer one counts, and the operator's limit caps it.
"""

from __future__ import annotations

import re

from coppice.messages.reuse import Reuse
from coppice_scheduler.edge.base.errors import ApiError, invalid
from coppice_scheduler.edge.http.json_body import Fields

_TTL = re.compile(r"([0-9]{1,6})([smh])\Z")
_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000}
_OPTIONS = ("mode", "ttl", "reuse")
REUSE = {"likely": Reuse.LIKELY, "unlikely": Reuse.UNLIKELY}
_RETENTION_MS = {"in_memory": 0, "in-memory": 0, "24h": 24 * 3_600_000}


def retain_ms_of(fields: Fields) -> int:
    """Raises ApiError."""
    return max(_options_ms(fields), _retention_ms(fields))


def reuse_of(fields: Fields) -> Reuse:
    """What the options say counts more than a key. Raises ApiError."""
    has_key = fields.text("prompt_cache_key") is not None
    said = _options(fields).text("reuse")
    if said is None:
        return Reuse.LIKELY if has_key else Reuse.UNKNOWN
    if said not in REUSE:
        raise invalid(
            f'prompt_cache_options.reuse is {said[:50]!r}; it must be "likely" or "unlikely".',
            param="prompt_cache_options",
        )
    return REUSE[said]


def _options(fields: Fields) -> Fields:
    options = fields.get("prompt_cache_options")
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise fields.wrong("prompt_cache_options", "an object")
    for name in options:
        if name not in _OPTIONS:
            raise _unsupported(f"prompt_cache_options.{name[:100]} is not known; known: {', '.join(_OPTIONS)}.")
    return Fields(options, "prompt_cache_options.")


def _options_ms(fields: Fields) -> int:
    inner = _options(fields)
    if inner.text("mode") not in (None, "implicit"):
        raise _unsupported("prompt_cache_options.mode must be implicit: every prompt is cached as far as it goes.")
    ttl = inner.text("ttl")
    if ttl is None:
        return 0
    found = _TTL.match(ttl)
    if found is None:
        raise invalid(
            f'prompt_cache_options.ttl is {ttl[:50]!r}; it must be a time such as "90s", "30m" or "2h".',
            param="prompt_cache_options",
        )
    return int(found[1]) * _UNIT_MS[found[2]]


def _retention_ms(fields: Fields) -> int:
    retention = fields.text("prompt_cache_retention")
    if retention is None:
        return 0
    if retention not in _RETENTION_MS:
        raise invalid(
            f'prompt_cache_retention is {retention[:50]!r}; it must be "in_memory" or "24h".',
            param="prompt_cache_retention",
        )
    return _RETENTION_MS[retention]


def _unsupported(message: str) -> ApiError:
    return invalid(message, param="prompt_cache_options", code="unsupported_parameter")
