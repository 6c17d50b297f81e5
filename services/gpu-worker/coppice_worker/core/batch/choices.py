"""How a step's rows choose their tokens, in one array, so that it travels to a device in one copy.

The noise that a token is drawn by is a hash: it is the same wherever and whenever it is asked for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice_worker.core.batch.step_batch import SampleRows

CHOICE_COLUMNS = 5  # temperature, logarithm of min_p, top_k, top_p, noise

Float64 = npt.NDArray[np.float64]


def pack_choices(rows: SampleRows) -> Float64:
    """[R, CHOICE_COLUMNS]. A row of zeros is a greedy one."""
    with np.errstate(divide="ignore"):
        floor = np.log(rows.min_p)
    noise = uniform_noise(rows.seed, rows.position)
    return np.stack([rows.temperature, floor, rows.top_k, rows.top_p, noise], axis=1)


def uniform_noise(seed: npt.NDArray[np.uint64], position: npt.NDArray[np.int64]) -> Float64:
    """[R] uniform in (0, 1), a hash of (seed, position); 40 bits, so that noise * total < total in float64.

    The mixing steps and constants are those of SplitMix64 (Steele, Lea, Flood 2014).
    """
    counter = _mix(seed) + position.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits: Float64 = (_mix(counter) >> np.uint64(24)).astype(np.float64)
    return (bits + 0.5) * 2.0**-40


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
