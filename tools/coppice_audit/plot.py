"""The distributions of the times as SVG: controls and claim side by side, and the places of the order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coppice.errors import UsageError
from coppice_audit.core.judge import Verdict
from coppice_audit.core.plan import NUM_GUESSES, Arm
from coppice_audit.core.samples import Samples
from coppice_bench.serve.plot import Panel, Series, draw

_SHOWN_SHARE = 0.99  # of the times; the slowest ones would press the others into a corner
_POINTS_MAX = 400


def write_plot(path: Path, samples: Samples, verdict: Verdict, model: str) -> None:
    """Raises UsageError when the file cannot be written."""
    title = f"{model}: {verdict}, {samples.num_trials} trials"
    try:
        path.write_text(draw(title, panels(samples)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--plot {path} cannot be written: {error.strerror}") from None


def panels(samples: Samples) -> list[Panel]:
    """Shares of answers by time, one scale for all; shares of rounds by place, a straight line where it is chance."""
    pairs = [
        ("positive control", (Arm.OWN_HIT, Arm.OWN_MISS)),
        ("negative control", (Arm.NOISE_A, Arm.NOISE_B)),
        ("claim", (Arm.VICTIM_HIT, Arm.VICTIM_MISS)),
    ]
    times = [sample.ttft_ms for sample in samples.measured if not sample.arm.is_faulty]
    largest = float(np.quantile(times, _SHOWN_SHARE)) if times else 0.0
    found = [
        Panel(
            f"{name}: share of answers",
            "first token within, ms",
            tuple(_steps(arm, samples.ttft_ms(arm), largest) for arm in arms),
            legend_below=True,
        )
        for name, arms in pairs
    ]
    places = tuple(_places(arm, samples.places[arm]) for arm in (Arm.ORDER_OWN, Arm.ORDER_VICTIM))
    label = f"first token within place, of {NUM_GUESSES} sent at once"
    return [*found, Panel("order: share of rounds", label, places, legend_below=True)]


def _steps(arm: Arm, times_ms: Sequence[float], largest: float) -> Series:
    """The empirical distribution up to `largest`, with the corners of its steps, thinned where they are many."""
    ordered = np.sort(np.asarray(times_ms, float))
    shares = np.arange(1, len(ordered) + 1) / max(1, len(ordered))
    kept = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), _POINTS_MAX)).astype(int))
    x, y = [0.0], [0.0]
    for place in kept:
        if ordered[place] <= largest:
            x += [float(ordered[place])] * 2
            y += [y[-1], float(shares[place])]
    return Series(str(arm), [*x, largest], [*y, y[-1]], is_line=True)


def _places(arm: Arm, places: Sequence[int]) -> Series:
    counts = np.bincount(np.asarray(places, int), minlength=NUM_GUESSES)
    shares = np.cumsum(counts) / max(1, len(places))
    return Series(str(arm), [float(place) for place in range(NUM_GUESSES + 1)], [0.0, *shares.tolist()], is_line=True)
