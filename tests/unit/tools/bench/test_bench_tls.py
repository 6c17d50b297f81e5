"""What the benchmark of TLS makes of its rounds."""

from __future__ import annotations

import pytest

from benchmarks.stack.tls_cost import Rounds, compared


def test_rounds_are_compared_with_the_one_beside_them() -> None:
    """The machine became slower from round to round; what TLS adds is the same in each."""
    none = Rounds([1.0, 2.0, 9.0], [2.0, 4.0, 18.0], [1000.0, 500.0, 100.0])
    tls = Rounds([1.2, 2.2, 9.2], [3.0, 5.0, 19.0], [990.0, 495.0, 99.0])
    found = compared(none, tls)
    assert found["idle"]["added_ms"] == pytest.approx({"median": 0.2, "p25": 0.2, "p75": 0.2, "min": 0.2, "max": 0.2})
    assert found["fresh"]["added_ms"]["median"] == pytest.approx(1.0)
    assert found["load"]["ratio"] == pytest.approx({"median": 0.99, "p25": 0.99, "p75": 0.99, "min": 0.99, "max": 0.99})
    assert (found["idle"]["none_ms"], found["load"]["none_output_tok_s"]) == (2.0, 500.0)
    assert found["within"] == {"idle": True, "load": True}


@pytest.mark.parametrize(("added_ms", "share", "within"), [(0.31, 1.0, "idle"), (0.0, 0.96, "load")])
def test_what_is_beyond_a_limit_is_said(added_ms: float, share: float, within: str) -> None:
    none = Rounds([1.0] * 3, [1.0] * 3, [100.0] * 3)
    tls = Rounds([1.0 + added_ms] * 3, [1.0] * 3, [100.0 * share] * 3)
    found = compared(none, tls)["within"]
    assert [name for name, is_within in found.items() if not is_within] == [within]
