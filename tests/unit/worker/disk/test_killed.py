"""A process that is killed in the middle of its writes: what the next one finds is right, and within bounds."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.unit.worker.disk.files import EPOCH, block_files, content, host_memory, opened, seal

NUM_BLOCKS = 8
# Stores in a loop, one occupancy after the other; says what is there once it was told so.
WRITER = """
import sys, pathlib
from tests.unit.worker.disk.files import EPOCH, handles, host_memory, ids, opened, seals
_, pool = opened(pathlib.Path(sys.argv[1]), host_memory())
counter = int(sys.argv[2])
if not pool.epoch:
    pool.begin(EPOCH)
print("begun", flush=True)
while True:
    counter += 1
    for block in range(0, 8, 2):
        numbers = (counter + block) % 16, (counter + block + 1) % 16
        assert pool.store(EPOCH, ids(*numbers), handles(block, block + 1, counter=counter), seals(*numbers)).all()
        print(block, counter, *numbers, flush=True)
"""


@pytest.mark.parametrize("seed", range(3))
def test_what_was_said_to_be_there_is_there_unless_a_newer_one_was_being_written(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    for life in range(2):
        said = _killed_writer(tmp_path, life * 1_000_000, rng.random() * 0.05)
        host = host_memory()
        folder, pool = opened(tmp_path, host)
        _, generations, seals = pool.reported()
        assert len(block_files(tmp_path)) == int(np.count_nonzero(generations)) <= NUM_BLOCKS
        for block in np.flatnonzero(generations).tolist():
            handle = np.array([(int(generations[block]) << 24) | block], np.uint64)
            raw = seals[block].tobytes()
            number = next(number for number in range(16) if seal(number) == raw)
            assert pool.load(EPOCH, handle, raw, np.array([0], np.int32))[0].all(), "a name without its block"
            assert (host[0] == content(number)).all()
            counter = int(generations[block]) & 0xFFFFFF
            assert counter >= said.get(block, (0, 0))[0], "older than what was said to be there"
        missing = [block for block in said if not generations[block]]
        assert len(missing) <= 2, "only those that were being written may be gone"
        folder.close()


def _killed_writer(path: Path, counter: int, after_s: float) -> dict[int, tuple[int, int]]:
    """Per block the last counter and content that it was told of."""
    command = [sys.executable, "-c", WRITER, str(path), str(counter)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "begun\n"
        time.sleep(after_s)
        writer.kill()
        lines = writer.stdout.read().split("\n")[:-1]
    said: dict[int, tuple[int, int]] = {}
    for block, count, first, second in (map(int, line.split()) for line in lines):
        said[block], said[block + 1] = (count, first), (count, second)
    return said
