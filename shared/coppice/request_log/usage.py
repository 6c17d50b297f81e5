"""What was used: records summed up by tenant, key, model or day."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from coppice.request_log.record import RequestRecord

GROUPS = ("tenant", "key", "model", "day", "month", "api")


class Usage(msgspec.Struct):
    """Sums of one group, to the token."""

    group: tuple[str, ...]
    num_requests: int = 0
    num_failed: int = 0  # of the requests, those that were refused or failed
    tokens_in: int = 0
    tokens_cached: int = 0
    tokens_out: int = 0

    def add(self, record: RequestRecord) -> None:
        self.num_requests += 1
        self.num_failed += record.status >= 400
        self.tokens_in += record.tokens_in
        self.tokens_cached += record.tokens_cached
        self.tokens_out += record.tokens_out


def summed(records: Iterable[RequestRecord], by: Sequence[str]) -> list[Usage]:
    """One for each group that there is, in order of their names. `by`: of `GROUPS`."""
    found: dict[tuple[str, ...], Usage] = {}
    for record in records:
        group = tuple(_value(record, name) for name in by)
        found.setdefault(group, Usage(group)).add(record)
    return [found[group] for group in sorted(found)]


def _value(record: RequestRecord, name: str) -> str:
    if name == "day":
        return record.at[:10]
    if name == "month":
        return record.at[:7]
    return str(getattr(record, name))
