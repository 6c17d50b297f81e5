"""A history tells a whole life: stages without a gap and without an overlap, however many there were."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coppice.request_log.stages import FIRST_STAGES, LAST_STAGES, History, Stage, StageKind

EVENTS = (StageKind.PREEMPTED, StageKind.RESTARTED, StageKind.ASKED_BACK)
LASTING = [kind for kind in StageKind if kind not in (*EVENTS, StageKind.OMITTED, StageKind.SLOW_STEP)]


@st.composite
def moves(draw: st.DrawFn) -> list[tuple[str, StageKind, int]]:
    """(what, kind, nanoseconds since the move before)"""
    count = draw(st.integers(0, 120))
    found = []
    for _ in range(count):
        what = draw(st.sampled_from(["becomes", "becomes", "happened", "was"]))
        kinds = EVENTS if what == "happened" else LASTING if what == "becomes" else (StageKind.SLOW_STEP,)
        found.append((what, draw(st.sampled_from(list(kinds))), draw(st.integers(0, 5))))
    return found


@given(moves(), st.integers(0, 5))
def test_stages_follow_one_another_from_the_first_moment_to_the_last(
    moves: list[tuple[str, StageKind, int]], rest: int
) -> None:
    history, now_ns, num_events = History(StageKind.QUEUED, 7), 7, 0
    for what, kind, after_ns in moves:
        before_ns, now_ns = now_ns, now_ns + after_ns
        if what == "becomes":
            history.becomes(kind, now_ns)
        elif what == "happened":
            num_events += 1
            history.happened(kind, now_ns, "who", num_events)
        else:
            history.was(Stage(kind, before_ns - 3, now_ns, "worker"))
    told = history.told(now_ns + rest)
    at_ns = 7
    for stage in told:
        assert stage.start_ns == at_ns
        at_ns = stage.end_ns
        assert stage.length_ns > 0 or stage.kind in (*EVENTS, StageKind.OMITTED, StageKind.SLOW_STEP)
    assert at_ns == now_ns + rest
    assert len(told) <= FIRST_STAGES + LAST_STAGES + 1
    if not any(stage.kind is StageKind.OMITTED for stage in told):
        assert sum(stage.kind in EVENTS for stage in told) == num_events


def test_of_too_many_the_first_and_the_last_are_told() -> None:
    history = History(StageKind.QUEUED, 0)
    for at_ns in range(1, 201):
        history.becomes((StageKind.PREFILL, StageKind.DECODE)[at_ns % 2], at_ns)
    told = history.told(201)
    (omitted,) = [stage for stage in told if stage.kind is StageKind.OMITTED]
    assert (told[0].kind, told[0].start_ns, told[-1].end_ns) == (StageKind.QUEUED, 0, 201)
    assert (omitted.start_ns, omitted.end_ns) == (FIRST_STAGES, 201 - LAST_STAGES)
    assert omitted.amount == 201 - FIRST_STAGES - LAST_STAGES


def test_who_asks_in_vain_waits_on_for_the_same() -> None:
    history = History(StageKind.QUEUED, 0)
    history.becomes(StageKind.POOL_FULL, 5, "search", 412)
    for at_ns in range(10, 100, 10):
        history.becomes(StageKind.ACQUIRE, at_ns)
        history.becomes(StageKind.POOL_FULL, at_ns + 2, "other", 1)
    history.becomes(StageKind.ACQUIRE, 100)
    history.becomes(StageKind.PREFILL, 103)
    assert history.told(110) == (
        Stage(StageKind.QUEUED, 0, 5),
        Stage(StageKind.POOL_FULL, 5, 100, "search", 412),
        Stage(StageKind.ACQUIRE, 100, 103),
        Stage(StageKind.PREFILL, 103, 110),
    )


def test_what_happens_splits_what_lasts() -> None:
    history = History(StageKind.POOL_FULL, 0, "search", 412)
    history.happened(StageKind.ASKED_BACK, 4, "search", 100)
    assert history.told(9) == (
        Stage(StageKind.POOL_FULL, 0, 4, "search", 412),
        Stage(StageKind.ASKED_BACK, 4, 4, "search", 100),
        Stage(StageKind.POOL_FULL, 4, 9, "search", 412),
    )
