"""Inputs that nobody would send, made of those that somebody sent: a corpus, edited at random.

What a target raises beyond what it documents fails the test, with the smallest input that Hypothesis finds for it; put
it into the folder of the target in `corpus`, with its fix. `make test` tries the corpus and some hundred edits of it,
`make test-long` goes on for a minute with other seeds, and looks whether memory grows.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, given, seed, settings

CORPUS = Path(__file__).parent / "corpus"
LONG_S = 60.0
EXAMPLES = 200  # of one seed
GROWTH_KIB_MAX = 64 << 10  # of a minute, beside what the first seed took; the input itself may be some MiB
MEMORY_MAX = 4 << 30  # beside what the process has
_EDITS_MAX = 6
# What parsers stumble over: numbers at their ends, nesting, text that is none, names of other worlds.
_PIECES = (
    *(b"0", b"-1", b"1e999", b"NaN", b"18446744073709551616", b"99999999999999999999999999999", b"0.1", b"null"),
    *(b"true", b'""', b"[]", b"{}", b"[" * 2000, b'{"a":' * 2000, b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800"),
    *(b"&a ", b"*a", b"<<: ", b"!!python/object:os.system ", b"../../x", b"%s", b"\n", b": ", b"- ", b'"', b","),
    *(b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x80" * 11, b"A" * 5000),
)


# In the place of a value of JSON.
_VALUES = st.one_of(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(width=32),
    st.sampled_from((0, 1, -1, 1 << 31, 1 << 63, 1e308, 5e-324, "", "a" * 3000, "\ud800", "\x00", "../x")),
    st.text(max_size=8),
    st.recursive(st.none() | st.integers(-9, 9) | st.text(max_size=2), lambda inner: st.lists(inner, max_size=4)),
    st.dictionaries(st.text(max_size=3), st.integers(-9, 9), max_size=2),
    st.integers(1, 3000).map(lambda length: [1] * length),
)


def corpus(folder: str) -> list[bytes]:
    found = [path.read_bytes() for path in sorted((CORPUS / folder).iterdir())]
    assert found
    return found


@st.composite
def edited(draw: st.DrawFn, entries: Sequence[bytes]) -> bytes:
    """One entry in which some places are cut, doubled, overwritten or grown."""
    content = draw(st.sampled_from(entries))
    for _ in range(draw(st.integers(1, _EDITS_MAX))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 40)))
        other = draw(st.sampled_from(entries))[start : start + 60]
        pieces = st.sampled_from((*_PIECES, other, content[start:end] * 2))
        piece = draw(pieces | st.binary(max_size=8))
        content = content[:start] + piece + content[end:]
    return content


@st.composite
def edited_json(draw: st.DrawFn, documents: Sequence[Any]) -> bytes:
    """One document in which some values are others, are gone or have another name."""
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(document))
        if not places:
            break
        parent, key = draw(st.sampled_from(places))
        edit = draw(st.sampled_from(("replace", "replace", "remove", "double")))
        if edit == "replace":
            parent[key] = draw(_VALUES)
        elif edit == "remove":
            del parent[key]
        elif isinstance(parent, dict):
            parent[draw(st.text(max_size=3))] = parent[key]
        else:
            parent.append(parent[key])
    return json.dumps(document).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Containers within a value with each of their keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def fuzz(target: Callable[[bytes], None], entries: Sequence[bytes], *, for_s: float = 0.0) -> None:
    """The entries, edits of them of one seed, and of more seeds until `for_s` have passed."""
    with memory_bounded():
        _fuzz(target, entries, for_s)


@contextmanager
def memory_bounded() -> Iterator[None]:
    """What an input would take beyond that is a MemoryError, and not the end of some process of the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, ((_memory_kib("VmSize") << 10) + MEMORY_MAX, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _fuzz(target: Callable[[bytes], None], entries: Sequence[bytes], for_s: float) -> None:
    for entry in entries:
        target(entry)
    inputs = edited(entries)
    if documents := [document for entry in entries if (document := _parsed(entry)) is not None]:
        inputs |= edited_json(documents)
    deadline_s = time.monotonic() + for_s
    before_kib = 0
    for number in itertools.count():
        run = given(inputs)(target)
        run = settings(
            max_examples=EXAMPLES,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )(run)
        seed(number)(run)()
        gc.collect()  # in a large process the collector comes late, and what waits for it looks like growth
        if number == 0:
            before_kib = _memory_kib()
        if time.monotonic() >= deadline_s:
            break
    grown_kib = _memory_kib() - before_kib
    assert grown_kib <= GROWTH_KIB_MAX, f"{grown_kib} KiB more than after the first seed, after {number + 1} seeds"


def _parsed(entry: bytes) -> Any:
    try:
        return json.loads(entry)
    except (ValueError, RecursionError):
        return None


def _memory_kib(of: str = "VmRSS") -> int:
    """Of this process; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{of}:"))
