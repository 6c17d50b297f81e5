"""Short pauses of the garbage collector, in processes that answer.

A collection of the oldest generation looks at every object that there is: 50 ms for the 140,000 of a front door, longer
where torch is loaded. Python starts one when a quarter more has come, so a burst of requests stops everybody's.
"""

from __future__ import annotations

import gc

# Of new objects, net of those that are freed: some 0.5 ms for the youngest, 5 ms for the next; the oldest each million.
THRESHOLDS = (2_000, 10, 50)


def shorten_pauses() -> None:
    """Call it when everything is loaded: what is there now is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
