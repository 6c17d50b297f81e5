"""What measurements of several servers share: one load, run whole and summed up, and how figures of rounds spread."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from coppice_bench.serve.fleet import Gathered, run_part
from coppice_bench.serve.load.client import Part
from coppice_bench.serve.options import ServeOptions
from coppice_bench.serve.preflight import look
from coppice_bench.serve.report import summary

_SALT_BITS = 62


def prepared(options: ServeOptions) -> Part:
    """A load with prompts that nobody sent before. Raises CoppiceError when the server does not answer."""
    options.check()
    return Part(options, look(options), secrets.randbits(_SALT_BITS))


def run_load(part: Part) -> tuple[dict[str, Any], Gathered]:
    """The summary, whose `errors` says what failed, and what it was made of."""
    gathered = Gathered()
    run_part(part, gathered, lambda record: None)
    return summary(gathered.records, part.options, gathered.start_s), gathered


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and ends."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    ends = {"min": min(values), "max": max(values)}
    return {"median": float(middle), "p25": float(low), "p75": float(high), **ends}
