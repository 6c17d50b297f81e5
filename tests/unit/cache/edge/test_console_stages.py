"""The console knows the stages that the request log has, each by the same name, and what of them is a wait."""

from __future__ import annotations

import json
import re
from importlib.resources import files

from coppice.request_log.causes import Cause
from coppice.request_log.stages import WAITING, StageKind

TEXT = files("coppice_cache.edge").joinpath("console", "parts", "stages.js").read_text()
ROWS = re.findall(r"^  (\w+): (\[.*\]),$", TEXT, re.MULTILINE)
STAGES = {name: json.loads(row) for name, row in ROWS}


def test_every_stage_is_told_by_its_name_and_no_other_is() -> None:
    assert [name for name, _ in ROWS] == [kind.value for kind in StageKind], "in one order, so that none is forgotten"
    assert all(words for words, _, _ in STAGES.values())


def test_what_waits_waits_for_somebody_and_a_slow_step_for_its_worker() -> None:
    waits = {name for name, (_, _, others) in STAGES.items() if others}
    assert waits == {kind.value for kind in WAITING | {StageKind.SLOW_STEP}}


def test_work_is_what_causes_call_so() -> None:
    found = re.search(r"^export const WORK = (\[.*\]);$", TEXT, re.MULTILINE)
    assert found is not None
    assert set(json.loads(found[1])) == {kind.value for kind in StageKind if Cause(kind, "", 0).is_work}
