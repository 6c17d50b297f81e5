"""Text, stop strings and log-probabilities of one answer, however its tokens arrive."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.ids import SequenceId
from coppice.messages.step import TokenLogprobs
from coppice_scheduler.core.state.request import Finish, Output
from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.text.detokenizer import DetokenizerFactory, TokenTexts
from coppice_scheduler.edge.text.logprobs import LEAST_LOGPROB, LogprobTrack, MeanLogprob, PromptLogprobs, TokenLogprob
from coppice_scheduler.edge.text.stops import StopScanner
from coppice_scheduler.edge.text.text_stream import Delta, Echo, TextOptions, TextStream
from tests.fakes.api.engine import logprob_of, pack, rank_of, report
from tests.unit.scheduler.edge.frontend.test_frontdoor_text import TOKENIZERS

NUM_PROMPT = 5
FACTORIES = {name: DetokenizerFactory(raw) for name, raw in TOKENIZERS.items()}
TEXTS = {name: TokenTexts(raw) for name, raw in TOKENIZERS.items()}
PROMPT = "東 the"


@dataclass(frozen=True)
class Case:
    tokenizer: str
    ids: list[int]
    sizes: list[int]
    stops: tuple[str, ...]
    min_tokens: int
    keeps_stop: bool
    wants_logprobs: bool
    echoes: bool

    def stream(self) -> TextStream:
        factory = FACTORIES[self.tokenizer]
        echo = Echo(PROMPT, [0, 1, 2, 3, 4], 2) if self.echoes else None
        return TextStream(
            0,
            NUM_PROMPT,
            factory.start([]),
            StopScanner(self.stops, keeps_stop=self.keeps_stop) if self.stops else None,
            lambda: None,
            track=LogprobTrack(NUM_PROMPT, len(PROMPT) if self.echoes else 0) if self.wants_logprobs else None,
            prompt=PromptLogprobs(pack([9] * NUM_PROMPT)) if self.echoes and self.wants_logprobs else None,
            options=TextOptions(min_tokens=self.min_tokens, shows_stop_token=self.keeps_stop, echo=echo),
        )

    def play(self) -> list[Delta]:
        """As an engine would tell it, which goes on for a while after a stop string was found."""
        stream, deltas, place = self.stream(), [], 0
        sizes = [*self.sizes, *[1] * len(self.ids)]
        while place < len(self.ids):
            new = self.ids[place : place + sizes.pop(0)]
            told = [report(new, NUM_PROMPT + place, 2)] if self.wants_logprobs else []
            if not place and self.wants_logprobs:
                told.append(report([9] * (NUM_PROMPT - 1), 1, 2))
            place += len(new)
            deltas.append(stream.take(Output("r", pack(new), logprobs=tuple(told), num_output_tokens=place)))
        deltas.append(stream.take(Output("r", b"", finish=Finish.LENGTH, num_output_tokens=place)))
        return [delta for delta in deltas if delta is not None]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    raw = TOKENIZERS[name]
    written = raw.encode(draw(st.text("abs 東é🌲", min_size=1, max_size=12)), add_special_tokens=False).ids
    noise = draw(st.lists(st.integers(0, raw.get_vocab_size() - 1), max_size=4))
    ids = draw(st.permutations([*written, *noise])) if draw(st.booleans()) else [*written, *noise]
    return Case(
        tokenizer=name,
        ids=ids,
        sizes=draw(st.lists(st.integers(1, 5), max_size=8)),
        stops=tuple(draw(st.lists(st.text("abs 東é🌲", min_size=1, max_size=3), max_size=3))),
        min_tokens=draw(st.integers(0, 3)),
        keeps_stop=draw(st.booleans()),
        wants_logprobs=draw(st.booleans()),
        echoes=draw(st.booleans()),
    )


def expected_text(case: Case) -> str:
    """Slow and plain: one token at a time, every stop string looked for in all text after `min_tokens`."""
    detokenizer = FACTORIES[case.tokenizer].start([])
    pieces = [detokenizer.feed([token_id]) for token_id in case.ids] + [detokenizer.flush()]
    passed = "".join(pieces[: case.min_tokens])
    rest = ""
    for piece in pieces[case.min_tokens :] if len(case.ids) > case.min_tokens else []:
        for character in piece:
            rest += character
            ended = [stop for stop in case.stops if rest.endswith(stop)]
            if ended:
                return passed + (rest if case.keeps_stop else rest[: -max(map(len, ended))])
    return passed + rest if len(case.ids) > case.min_tokens else "".join(pieces)


def shown_bytes(case: Case, entries: list[TokenLogprob]) -> bytes:
    """Special tokens have names, but no text."""
    special = set(TOKENIZERS[case.tokenizer].get_added_tokens_decoder())
    return b"".join(TEXTS[case.tokenizer].bytes_of(e.token_id) for e in entries if e.token_id not in special)


@settings(max_examples=400, deadline=None)
@given(cases())
def test_text_does_not_depend_on_how_it_came_or_on_what_is_told_beside_it(case: Case) -> None:
    deltas = case.play()
    prefix = PROMPT if case.echoes else ""
    assert "".join(delta.text for delta in deltas) == prefix + expected_text(case)
    assert [delta.ending is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    sent = ""
    for delta in deltas:
        sent += delta.text
        assert (prefix + expected_text(case)).startswith(sent), "the beginning of a stop string leaked"


@settings(max_examples=400, deadline=None)
@given(cases())
def test_log_probabilities_show_no_token_before_its_text(case: Case) -> None:
    deltas = case.play()
    sent, entries = "", list[TokenLogprob]()
    for delta in deltas:
        sent += delta.text
        entries += delta.all_logprobs
        if not case.wants_logprobs:
            assert not entries
            continue
        output = [entry for entry in entries if entry.logprob is not None][NUM_PROMPT - 1 if case.echoes else 0 :]
        if case.tokenizer == "byte-level":
            shown = shown_bytes(case, output).decode("utf-8", "replace")
            text = sent[len(PROMPT) :] if case.echoes else sent
            assert text.startswith(shown), "a token was shown before its text"
        assert [entry.token_id for entry in output] == case.ids[: len(output)]
    if case.wants_logprobs and deltas[-1].ending is not None and deltas[-1].ending.stop is None:
        assert len(entries) == len(case.ids) + (NUM_PROMPT if case.echoes else 0)
        offsets = [entry.text_offset for entry in entries]
        assert offsets == sorted(offsets)
        assert all(0 <= offset <= len(sent) for offset in offsets)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_no_delta_has_half_a_character(case: Case) -> None:
    whole = FACTORIES[case.tokenizer].start([])
    text = whole.feed(case.ids) + whole.flush()
    if "�" not in text:
        assert not any("�" in delta.text for delta in case.play())


def test_minus_infinity_becomes_a_number_that_json_has() -> None:
    track = LogprobTrack(1)
    values = np.array([-np.inf, -0.5], dtype="<f4").tobytes()
    track.add(TokenLogprobs(SequenceId(1), 1, 2, values[:4], pack([3, 4]), values))
    track.saw(7, 1, is_open=False)
    (entry,) = track.release_all()
    assert (entry.logprob, entry.top) == (LEAST_LOGPROB, ((3, LEAST_LOGPROB), (4, -0.5)))


def test_a_log_probability_that_never_came_is_an_error_not_a_guess() -> None:
    track = LogprobTrack(1)
    track.saw(7, 0, is_open=True)
    with pytest.raises(ApiError, match="no log-probability at 1"):
        track.release_all()


def test_the_mean_log_probability_is_that_of_the_tokens_which_count() -> None:
    score = MeanLogprob(4)
    for first, values in ((1, [-9.0, -9.0, -9.0]), (4, [-1.0, -2.0]), (6, [-np.inf, -50.0])):
        score.add(TokenLogprobs(SequenceId(1), first, 0, np.array(values, dtype="<f4").tobytes()))
    assert score.of(0) == 0
    assert score.of(2) == -1.5
    assert score.of(3) == pytest.approx((-3 + LEAST_LOGPROB) / 3)


def test_a_prompt_is_told_from_parts_with_ranks_and_no_more_than_asked() -> None:
    prompt = PromptLogprobs(pack([5, 6, 7, 8]))
    for part in (report([6], 1, 3, ranks=True), report([7, 8], 2, 3, ranks=True), report([9], 4, 3)):
        prompt.add(part)
    first, *rest = prompt.entries(2)
    assert (first.token_id, first.logprob, first.rank, first.top) == (5, None, None, ())
    assert [(entry.token_id, entry.logprob, entry.rank) for entry in rest] == [
        (token_id, logprob_of(token_id), rank_of(token_id)) for token_id in (6, 7, 8)
    ]
    assert all(len(entry.top) == 2 for entry in rest)
    missing = PromptLogprobs(pack([5, 6, 7, 8]))
    missing.add(report([6], 1, 0, ranks=True))
    with pytest.raises(ApiError, match="no log-probability at 2"):
        list(missing.entries(0))
