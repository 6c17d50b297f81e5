"""What is kept of each request."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from coppice_bench.serve.load.answer import Answer

OK = "ok"


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Moments in seconds of the machine's monotonic clock; counts as the server's usage reports them.

    `outcome` is `ok`, the status of a refusal, or `unreachable`, `timeout`, `cut`, `stream error`, `no answer`.
    """

    sender: int
    outcome: str
    message: str
    due_s: float
    sent_s: float
    first_s: float
    last_s: float
    end_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def is_ok(self) -> bool:
        return self.outcome == OK

    @property
    def ttft_ms(self) -> float:
        return (self.first_s - self.sent_s) * 1e3

    @property
    def tpot_ms(self) -> float:
        """Between tokens after the first; 0 where there is no second."""
        return (self.last_s - self.first_s) * 1e3 / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def e2e_ms(self) -> float:
        return (self.end_s - self.sent_s) * 1e3

    def as_list(self) -> list[Any]:
        return list(astuple(self))


def record_of(answer: Answer, *, sender: int, due_s: float, sent_s: float, now_s: float, failure: str = "") -> Record:
    """`failure` is what kept the request from being answered, where something did."""
    usage = answer.usage() if not failure else {}
    outcome, message = _outcome(answer, failure, has_usage=bool(usage))
    details = usage.get("prompt_tokens_details") or {}
    return Record(
        sender=sender,
        outcome=outcome,
        message=message,
        due_s=due_s,
        sent_s=sent_s,
        first_s=answer.first_s,
        last_s=answer.last_s,
        end_s=answer.end_s or now_s,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_tokens=int(details.get("cached_tokens") or 0),
        output_tokens=int(usage.get("completion_tokens") or 0),
    )


def _outcome(answer: Answer, failure: str, *, has_usage: bool) -> tuple[str, str]:
    if failure:
        return failure.partition(":")[0], failure
    if answer.status and answer.status != 200:
        return str(answer.status), answer.message()
    if answer.failure:
        outcome = "stream error" if answer.failure.startswith("error in the stream") else "cut"
        return outcome, answer.failure
    if not answer.is_stream:
        return "no answer", "the answer was no event stream"
    if not answer.is_done:
        return "cut", "the stream ended without [DONE]"
    if not has_usage or not answer.first_s:
        return "no answer", "the stream had no tokens or no usage"
    return OK, ""
