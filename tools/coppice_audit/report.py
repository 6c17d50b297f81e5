"""What an audit says: a table for people, JSON with every sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coppice.errors import UsageError
from coppice_audit.core.judge import Check, Verdict
from coppice_audit.core.samples import Samples
from coppice_audit.options import AuditOptions
from coppice_audit.preflight import Target
from coppice_bench.report import describe_run

_MEANINGS = {
    Verdict.ISOLATED: "nothing that the attacker sees tells what the victim has sent",
    Verdict.LEAK: "the attacker can tell what the victim has sent, unless both keys are of one tenant or share group",
    Verdict.INCONCLUSIVE: "the audit could not see enough to say",
}
_WORDS = {Verdict.ISOLATED: "passed"}


def lines(checks: Sequence[Check], verdict: Verdict) -> list[str]:
    """The table, and the verdict below it."""
    rows = [(check.name, _WORDS.get(check.verdict, str(check.verdict)), check.seen) for check in checks]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    table = [f"{name:{widths[0]}}  {word:{widths[1]}}  {seen}" for name, word, seen in rows]
    return [*table, "", f"{verdict}: {_MEANINGS[verdict]}"]


def as_json(
    options: AuditOptions, target: Target, seed: int, samples: Samples, checks: Sequence[Check], verdict: Verdict
) -> dict[str, Any]:
    """No key, prompt or id."""
    return {
        "audit": "isolation",
        "verdict": str(verdict),
        "url": options.base_url,
        "model": target.model,
        "prompt_tokens": target.prompt_tokens,
        "samples_asked": options.samples,
        "seed": seed,
        "checks": [asdict(check) for check in checks],
        "failures": dict(samples.failures),
        **({"stopped": samples.stopped} if samples.stopped else {}),
        "order": {arm.name.lower(): places for arm, places in samples.places.items()},
        "samples": [sample.as_dict() for sample in samples.measured],
        **describe_run(),
    }


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Raises UsageError when the file cannot be written."""
    try:
        path.write_text(json.dumps(found) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json {path} cannot be written: {error.strerror}") from None
