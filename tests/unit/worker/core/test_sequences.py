"""The table of a worker's sequences is as large as its context, and takes the memory of what is in it."""

from __future__ import annotations

import resource
from pathlib import Path

from coppice.ids import DomainId, LeaseId, SequenceId
from coppice.messages.step import SamplingParams, SequenceStart
from coppice_worker.core.sequences import SequenceTable

CONTEXT = 1 << 19
MANY = 64


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def start(number: int) -> SequenceStart:
    return SequenceStart(
        sequence_id=SequenceId(number),
        lease_id=LeaseId(number.to_bytes(16, "little")),
        tokens=b"\1\0\0\0" * 30,
        num_computed_tokens=0,
        shared=b"",
        shared_seals=b"",
        owned=b"",
        sampling=SamplingParams(),
        domain=DomainId("d"),
    )


def test_short_sequences_of_a_long_context_take_little_memory() -> None:
    """With huge pages each would take 2 MiB, and the time to fill them in the step in which it comes."""
    table = SequenceTable(MANY, CONTEXT, 16)
    before = resident_bytes()
    for number in range(1, MANY + 1):
        table.add(start(number))
    assert resident_bytes() - before < MANY * (1 << 18)
    assert table.tokens[:, :30].all()
    assert not table.tokens[:, 30:64].any()
