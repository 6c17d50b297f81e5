"""Grammars are compiled beside the steps: domains take turns and share nothing, and what fails is told by the guide."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from llguidance import LLMatcher

from coppice.grammar import GrammarError, Grammars
from coppice.ids import DomainId
from coppice.telemetry.logs import configure_logging
from coppice_bench.split.byte_tokenizer import EOS_ID, NUM_TOKENS, write_byte_tokenizer
from coppice_worker.model.config.info import ModelInfo
from coppice_worker.model.config.rope_config import RopeConfig
from coppice_worker.model.guides import (
    DOMAINS_MAX,
    GRAMMAR_OVERHEAD,
    UNUSED_BYTES_MAX,
    USED_BYTES_MAX,
    Compiled,
    GrammarGuide,
    GuideMaker,
    grammars_of,
)
from tests.fakes.waiting import WAIT_S, wait_for

A, B, C = DomainId("a"), DomainId("b"), DomainId("c")
VOCAB = 320


class Panic(BaseException):
    """As the library's own are: no Exception."""


class FakeMatcher:
    def copy(self) -> FakeMatcher:
        return self

    def take(self, tokens: np.ndarray) -> None: ...

    def fill(self, words: np.ndarray) -> None:
        words[:] = 5


class FakeGrammars:
    """Compiles at once, unless the text says something else: hold:..., bad:..., broken:..., panic:..."""

    def __init__(self) -> None:
        self.begun: list[str] = []  # in order
        self.threads: set[int] = set()
        self.holding: SimpleQueue[str] = SimpleQueue()  # those that are held just now
        self.release = threading.Event()

    def compile(self, grammar: str) -> FakeMatcher:
        self.begun.append(grammar)
        self.threads.add(threading.get_ident())
        match grammar.partition(":")[0]:
            case "hold":
                self.holding.put(grammar)
                assert self.release.wait(WAIT_S)
            case "bad":
                raise GrammarError("it has no end")
            case "broken":
                raise KeyError("a fault of ours")
            case "panic":
                raise Panic("a fault of the library's")
        return FakeMatcher()


class Making:
    """A maker over fake grammars, which loads them when `load` is set."""

    def __init__(self) -> None:
        self.grammars = FakeGrammars()
        self.load = threading.Event()
        self.num_loads = 0
        self.maker = GuideMaker(self._load)  # type: ignore[arg-type]

    def _load(self) -> FakeGrammars:
        self.num_loads += 1
        assert self.load.wait(WAIT_S)
        return self.grammars

    def open(self, domain: DomainId, *grammars: str) -> list[GrammarGuide]:
        return [self.maker.open(domain, grammar) for grammar in grammars]

    def compiled(self, *guides: GrammarGuide) -> None:
        wait_for(lambda: all(guide.is_ready for guide in guides), "all grammars are compiled")

    def use(self, *guides: GrammarGuide) -> None:
        """As a step does: asks each."""
        self.compiled(*guides)
        assert all(fill(guide) for guide in guides)


def fill(guide: GrammarGuide, output: tuple[int, ...] = (), words: np.ndarray | None = None) -> bool:
    """What it says, with words that nobody looks at unless they are given."""
    words = np.zeros(VOCAB // 32, np.uint32) if words is None else words
    return guide.fill(np.array(output, np.uint32), words)


@contextmanager
def made(*, loaded: bool = True) -> Iterator[Making]:
    making = Making()
    if loaded:
        making.load.set()
    try:
        yield making
    finally:  # its thread goes on with nothing to do
        making.load.set()
        making.grammars.release.set()


# --- turns


def test_domains_take_turns() -> None:
    with made(loaded=False) as making:
        guides = making.open(A, "a1", "a2", "a3") + making.open(B, "b1", "b2") + making.open(C, "c1")
        assert not any(guide.is_ready for guide in guides)
        making.load.set()
        making.compiled(*guides)
    assert making.grammars.begun == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert making.num_loads == 1
    assert making.grammars.threads.isdisjoint({threading.get_ident()})


def test_a_domain_that_comes_later_waits_for_one_grammar_of_each_other_at_most() -> None:
    with made() as making:
        guides = making.open(A, "hold:a1", "a2", "a3", "a4")
        assert making.grammars.holding.get(timeout=WAIT_S) == "hold:a1"
        guides += making.open(B, "b1", "b2")
        assert not any(guide.is_ready for guide in guides)
        making.grammars.release.set()
        making.compiled(*guides)
    assert making.grammars.begun == ["hold:a1", "a2", "b1", "a3", "b2", "a4"]


def test_a_guide_is_ready_when_its_own_grammar_is_compiled() -> None:
    with made() as making:
        (first,) = making.open(A, "first")
        making.compiled(first)
        held, last = making.open(A, "hold:second", "third")
        making.grammars.holding.get(timeout=WAIT_S)
        assert (first.is_ready, held.is_ready, last.is_ready) == (True, False, False)
        making.grammars.release.set()
        making.use(first, held, last)


# --- what is kept


def test_a_domains_grammar_is_compiled_once_and_another_domains_for_itself() -> None:
    with made(loaded=False) as making:
        guides = making.open(A, "same", "same") + making.open(B, "same") + making.open(A, "other")
        making.load.set()
        making.use(*guides)
        guides = making.open(A, "same") + making.open(B, "same", "same")
        assert all(guide.is_ready for guide in guides)
        making.use(*guides)
        making.use(*making.open(C, "same"))
    assert sorted(making.grammars.begun) == ["other", "same", "same", "same"]


def texts(count: int, num_bytes: int, prefix: str = "") -> list[str]:
    """Which count for so many bytes each."""
    return [f"{prefix}{number}".ljust(num_bytes - GRAMMAR_OVERHEAD) for number in range(count)]


def test_used_grammars_are_kept_up_to_a_bound_and_the_least_recently_asked_for_goes_first() -> None:
    size = 1 << 16
    count = USED_BYTES_MAX // size
    all_texts = texts(count + 2, size)
    with made() as making:
        for text in all_texts[:count]:
            making.use(*making.open(A, text))
        making.use(*making.open(A, all_texts[0]))  # so the second one is the first to go
        for text in all_texts[count:]:
            making.use(*making.open(A, text))
        making.grammars.begun.clear()
        making.use(*making.open(A, all_texts[0], *all_texts[2:]))
        assert making.grammars.begun == []
        making.use(*making.open(A, all_texts[1]))
        assert making.grammars.begun == [all_texts[1]]


def test_grammars_that_nobody_used_yet_stay_until_somebody_comes_back_for_them() -> None:
    """Many requests at a time, each with a grammar of its own: none pushes out another's."""
    size = 1 << 16
    all_texts = texts(3 * USED_BYTES_MAX // size, size)
    with made() as making:
        making.compiled(*making.open(A, *all_texts))
        making.use(*making.open(A, *all_texts))
        assert making.grammars.begun == all_texts


def test_grammars_that_nobody_comes_back_for_are_bounded_too() -> None:
    size = 1 << 16
    count = UNUSED_BYTES_MAX // size
    all_texts = texts(count + 3, size)
    with made() as making:
        making.compiled(*making.open(A, *all_texts))
        making.grammars.begun.clear()
        making.compiled(*making.open(A, *all_texts[3:]))
        assert making.grammars.begun == []
        making.compiled(*making.open(A, all_texts[0]))
        assert making.grammars.begun == [all_texts[0]]


def test_a_domains_bound_is_its_own() -> None:
    size = 1 << 16
    with made() as making:
        making.use(*making.open(B, "small"))
        for text in texts(2 * USED_BYTES_MAX // size, size):
            making.use(*making.open(A, text))
        making.grammars.begun.clear()
        making.use(*making.open(B, "small"))
        assert making.grammars.begun == []


def test_the_smallest_grammars_are_bounded_by_their_number() -> None:
    all_texts = [str(number) for number in range(USED_BYTES_MAX // GRAMMAR_OVERHEAD + 1)]
    with made() as making:
        making.use(*making.open(A, *all_texts))
        making.use(*making.open(A, "one more"))
        making.grammars.begun.clear()
        making.use(*making.open(A, all_texts[0]))
        assert making.grammars.begun == ["0"]


def test_domains_with_grammars_are_bounded_and_the_least_recently_served_goes_first() -> None:
    domains = [DomainId(f"d{number}") for number in range(DOMAINS_MAX + 1)]
    with made() as making:
        for domain in domains[:-1]:
            making.use(*making.open(domain, "same"))
        making.use(*making.open(domains[0], "same"))  # so the second one is the first to go
        making.use(*making.open(domains[-1], "same"))
        making.grammars.begun.clear()
        for domain in (domains[0], *domains[2:]):
            making.use(*making.open(domain, "same"))
        assert making.grammars.begun == []
        making.use(*making.open(domains[1], "same"))
        assert making.grammars.begun == ["same"]


def test_a_guide_outlives_what_was_kept_for_others() -> None:
    with made() as making:
        (guide,) = making.open(A, "mine")
        for number in range(DOMAINS_MAX):
            making.open(DomainId(f"d{number}"), "same")
        making.use(guide)


# --- what fails


@pytest.mark.parametrize("grammar", ["bad:", "broken:", "panic:"])
def test_a_grammar_that_cannot_be_compiled_is_told_by_its_guide_and_the_next_is_compiled(grammar: str) -> None:
    with made() as making:
        failed, other = making.open(A, grammar, "good")
        making.compiled(failed, other)
        assert not fill(failed)
        assert not fill(failed)
        assert fill(other)
        (again,) = making.open(A, grammar)
        assert again.is_ready
        assert not fill(again)


def test_the_log_says_whose_grammar_cannot_be_followed(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning")
    with made() as making:
        guides = [making.maker.open(A, "bad:", request_id) for request_id in ("chatcmpl-job-7", "")]
        making.compiled(*guides)
        assert [fill(guide) for guide in guides] == [False, False]
    first, second = (line.partition(" coppice.worker: ")[2] for line in capfd.readouterr().err.splitlines())
    assert first == "[request chatcmpl-job-7] a grammar cannot be followed: it has no end"
    assert second == "a grammar cannot be followed: it has no end"


@pytest.mark.parametrize("error", [GrammarError("no end token"), OSError("no such file"), Panic("panic")])
def test_grammars_that_cannot_be_loaded_fail_every_guide(error: BaseException) -> None:
    def load() -> Grammars:
        raise error

    maker = GuideMaker(load)
    guides = [maker.open(domain, grammar) for domain in (A, B) for grammar in ("first", "second")]
    wait_for(lambda: all(guide.is_ready for guide in guides), "all guides are ready")
    assert [fill(guide) for guide in guides] == [False] * 4


# --- real grammars


def info(vocab_size: int = VOCAB, ends: tuple[int, ...] = (EOS_ID,)) -> ModelInfo:
    return ModelInfo("llama", "", "float32", RopeConfig(kind="default", theta=10000.0), vocab_size, 128, ends)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(path, 128)
    return path


def ids(folder: Path, text: str) -> tuple[int, ...]:
    vocabulary: dict[str, int] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return tuple(vocabulary[character] for character in text)


def regex(pattern: str) -> str:
    return str(LLMatcher.grammar_from_regex(pattern))


@pytest.fixture
def guide_of(folder: Path) -> Callable[[str], GrammarGuide]:
    maker = GuideMaker(lambda: grammars_of(folder, info()))

    def open_guide(grammar: str) -> GrammarGuide:
        guide = maker.open(A, grammar)
        wait_for(lambda: guide.is_ready, "the grammar is compiled")
        return guide

    return open_guide


def allowed(guide: GrammarGuide, output: tuple[int, ...]) -> tuple[int, ...]:
    words = np.zeros(VOCAB // 32, np.uint32)
    assert fill(guide, output, words)
    return tuple(int(token) for token in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")))


def test_guides_of_one_grammar_follow_each_their_own_output(
    folder: Path, guide_of: Callable[[str], GrammarGuide]
) -> None:
    first, second, resumed = (guide_of(regex("ab(?:c|d)|ba")) for _ in range(3))
    a, b, c, d = ids(folder, "abcd")
    assert allowed(first, ()) == (a, b)
    assert allowed(first, (a,)) == (b,)
    assert allowed(second, ()) == (a, b)
    assert allowed(resumed, (a, b)) == (c, d), "a sequence that was preempted brings all of its output at once"
    assert allowed(second, (b,)) == (a,)
    assert allowed(first, (a, b)) == (c, d)
    assert allowed(first, (a, b)) == (c, d), "asked twice"
    assert allowed(first, (a, b, c)) == (EOS_ID,)
    assert allowed(first, (a, b, c, EOS_ID)) == tuple(range(VOCAB))


def test_output_that_the_grammar_forbids_breaks_its_guide_alone(
    folder: Path, guide_of: Callable[[str], GrammarGuide]
) -> None:
    first, second = guide_of(regex("ab+")), guide_of(regex("ab+"))
    a, b = ids(folder, "ab")
    assert allowed(first, ()) == allowed(second, ()) == (a,)
    assert not fill(first, (b,))
    assert not fill(first, (a,))
    assert not fill(first, (b, b))
    assert allowed(second, (a,)) == (b,)


def test_a_grammar_that_meets_a_limit_breaks_its_guide(folder: Path, guide_of: Callable[[str], GrammarGuide]) -> None:
    guide = guide_of(str(LLMatcher.grammar_from_lark('start: "a" start')))  # all that it says is forced, without end
    (a,) = ids(folder, "a")
    assert allowed(guide, ()) == (a,)
    assert not fill(guide, (a,))


@pytest.mark.parametrize(
    ("what", "message"), [("nothing", "cannot be read"), ("nonsense", "cannot be used"), ("no text", "cannot be read")]
)
def test_a_checkpoint_without_a_fit_tokenizer_has_no_grammars(tmp_path: Path, what: str, message: str) -> None:
    if what != "nothing":
        (tmp_path / "tokenizer.json").write_bytes(b"{}" if what == "nonsense" else b"\xff\xfe{}")
    with pytest.raises(GrammarError, match=message):
        grammars_of(tmp_path, info())


def test_a_checkpoints_grammars_are_for_its_logits_and_its_end_tokens(folder: Path) -> None:
    with pytest.raises(GrammarError, match="no end token"):
        grammars_of(folder, info(ends=()))
    with pytest.raises(GrammarError, match="too small"):
        grammars_of(folder, info(vocab_size=100))
    compiled = Compiled(regex("a"))
    compiled.matcher.set_result(grammars_of(folder, info(ends=(NUM_TOKENS - 1,))).compile(compiled.grammar))
    assert allowed(GrammarGuide(compiled), ids(folder, "a")) == (NUM_TOKENS - 1,)
