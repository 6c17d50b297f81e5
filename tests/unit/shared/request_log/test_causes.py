"""What a request's stages are summed up to."""

from __future__ import annotations

import pytest

from coppice.request_log.causes import causes_of, main_cause, told
from coppice.request_log.stages import Preemption, Stage, StageKind

MS = 1_000_000


def stages(*parts: tuple[StageKind, int] | tuple[StageKind, int, str, int]) -> list[Stage]:
    """(kind, milliseconds, blocker, amount), one after another."""
    found, at_ns = [], 10**12
    for kind, length_ms, *of in parts:
        found.append(Stage(kind, at_ns, at_ns + length_ms * MS, *of))  # type: ignore[arg-type]
        at_ns += length_ms * MS
    return found


def test_waiting_of_one_kind_for_one_blocker_is_one_cause() -> None:
    life = stages(
        (StageKind.QUEUED, 100, "", 3),
        (StageKind.POOL_FULL, 200, "search", 412),
        (StageKind.ASKED_BACK, 0, "search", 100),
        (StageKind.POOL_FULL, 900, "search", 400),
        (StageKind.ACQUIRE, 1),
        (StageKind.PREFILL, 50, "w0", 512),
        (StageKind.DECODE, 700, "w0", 0),
    )
    found = [(cause.kind, cause.blocker, cause.length_ns // MS) for cause in causes_of(life) if cause.length_ns]
    assert found[0] == (StageKind.POOL_FULL, "search", 1100)
    assert sum(length_ms for *_, length_ms in found) == 1951
    main = main_cause(life)
    assert main is not None
    assert (main.kind, main.amount) == (StageKind.POOL_FULL, 400)
    assert told(life)[0] == (
        "waited 1.10 s for blocks: search held 400; 100 of search's were asked back at +0.30 s; it had them at +1.20 s"
    )


@pytest.mark.parametrize("kind", [StageKind.PREEMPTED, StageKind.RESTARTED])
def test_what_follows_a_loss_is_the_losss_until_the_answer_goes_on(kind: StageKind) -> None:
    life = stages(
        (StageKind.PREFILL, 20, "w0", 64),
        (StageKind.DECODE, 30, "w0", 0),
        (kind, 0, Preemption.POOL.value, 0),
        (StageKind.QUEUED, 400, "", 0),
        (StageKind.ACQUIRE, 2),
        (StageKind.PREFILL, 100, "w1", 80),
        (StageKind.DECODE, 30, "w1", 0),
    )
    main = main_cause(life)
    assert main is not None
    assert (main.kind, main.blocker, main.length_ns) == (kind, Preemption.POOL.value, 502 * MS)
    assert causes_of(life)[1].kind is StageKind.DECODE
    assert causes_of(life)[1].length_ns == 60 * MS


def test_one_that_hardly_waited_is_as_long_as_its_work() -> None:
    life = stages((StageKind.QUEUED, 5), (StageKind.PREFILL, 10, "w", 9), (StageKind.DECODE, 900, "w", 0))
    main = main_cause(life)
    assert main is not None
    assert main.kind is StageKind.DECODE
    assert main_cause([]) is None
    assert told([]) == []


@pytest.mark.parametrize("kind", list(StageKind))
def test_each_kind_has_words(kind: StageKind) -> None:
    (text,) = told(stages((kind, 1500, "search", 7))) or ["1.50 s"]
    assert "1.50 s" in text
