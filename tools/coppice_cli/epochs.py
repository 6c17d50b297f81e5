"""Epochs as people can read them. Whole ones are in `--json`."""

from __future__ import annotations

_DIGITS = 4


def start_of(cache_epoch: int) -> str:
    """A cache epoch counts starts: `3rd start`."""
    last_two, last = cache_epoch % 100, cache_epoch % 10
    ending = "th" if 11 <= last_two <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(last, "th")
    return f"{cache_epoch}{ending} start"


def short_of(epoch: int) -> str:
    """The end of one that begins anywhere, as those of workers and sessions do: the next one differs in it, and logs
    can be searched for it."""
    digits = str(epoch)
    return digits if len(digits) <= _DIGITS else f"...{digits[-_DIGITS:]}"
