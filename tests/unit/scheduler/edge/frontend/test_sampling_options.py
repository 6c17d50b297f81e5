"""Penalties, bias, min_tokens and min_p say what their definitions say, from the sequence's own tokens only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from coppice.ids import SequenceId
from coppice.messages.sampling import LIKELY_MAX
from coppice.messages.step import SamplingParams, SequenceStart, StepPlan
from coppice_worker.core.batch.sampling import SamplingTable
from coppice_worker.core.batch.step_batch import SampleRows
from coppice_worker.core.batch.steps import MalformedPlanError
from coppice_worker.core.worker import WorkerCore
from coppice_worker.kernels.torch_arithmetic import TorchArithmetic
from coppice_worker.model.decoder.logits import change_logits
from coppice_worker.model.decoder.sampler import sample
from coppice_worker.model.executor import TorchExecutor
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.oracle import model_of
from tests.fakes.worker.worker_plans import EPOCH, compute, h, handles, lease, ready_core, settings, u32

VOCAB = 40
TORCH = TorchArithmetic()


@dataclass(frozen=True)
class Asked:
    """One sequence: what it wants, its tokens, and how many of them are its prompt."""

    sampling: SamplingParams
    tokens: tuple[int, ...]
    num_prompt: int


def bias(**pairs: float) -> bytes:
    """bias(t3=1.5) adds 1.5 to the logit of token 3."""
    packed = [u32(int(name[1:])) + np.float32(value).tobytes() for name, value in pairs.items()]
    return b"".join(packed)


def expected_logits(logits: list[float], asked: Asked) -> list[float]:
    """The definitions, one token at a time."""
    wanted = asked.sampling
    output = Counter(asked.tokens[asked.num_prompt :])
    changed = []
    for token, logit in enumerate(logits):
        if token in asked.tokens:
            logit = logit / wanted.repetition_penalty if logit > 0 else logit * wanted.repetition_penalty
        logit -= output[token] * wanted.frequency_penalty
        logit -= wanted.presence_penalty if output[token] else 0.0
        changed.append(logit)
    for at in range(0, len(wanted.logit_bias), 8):
        token = int.from_bytes(wanted.logit_bias[at : at + 4], "little")
        if token < len(changed):
            changed[token] += float(np.frombuffer(wanted.logit_bias[at + 4 : at + 8], "<f4")[0])
    if len(asked.tokens) - asked.num_prompt < wanted.min_tokens:
        for token in np.frombuffer(wanted.stop_token_ids, "<u4").tolist():
            if token < len(changed):
                changed[token] = float("-inf")
    return changed


def sample_rows(sequences: list[Asked]) -> SampleRows:
    """Of a table whose slots are used from the last to the first, so that rows and slots differ."""
    table, tokens = SamplingTable(len(sequences)), np.zeros((len(sequences), 64), np.uint32)
    slots = np.arange(len(sequences), dtype=np.int32)[::-1].copy()
    for slot, asked in zip(slots, sequences, strict=True):
        table.put(slot, asked.sampling, asked.num_prompt)
        tokens[slot, : len(asked.tokens)] = asked.tokens
        tokens[slot, len(asked.tokens) :] = 7  # nobody's
    position = np.array([len(asked.tokens) for asked in sequences], np.int64)
    return table.sample_rows(slots, np.arange(len(sequences), dtype=np.int32), position, tokens)


penalties = st.floats(-2, 2).map(lambda value: round(value, 2))
options = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7]),
    top_k=st.sampled_from([0, 5]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**64 - 1),
    frequency_penalty=st.just(0.0) | penalties,
    presence_penalty=st.just(0.0) | penalties,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6]),
    logit_bias=st.sampled_from([b"", bias(t3=5.0, t39=-100.0), bias(t40=9.0), bias(t4000000000=1.0, t1=-1.0)]),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.sampled_from([b"", u32(3, 9), u32(3, 4_000_000_000)]),
)


@st.composite
def asked_sequences(draw: st.DrawFn) -> Asked:
    tokens = tuple(draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)))
    return Asked(draw(options), tokens, draw(st.integers(1, len(tokens))))


@hypothesis_settings(max_examples=150, deadline=None)
@given(st.lists(asked_sequences(), min_size=1, max_size=5), st.integers(0, 1000))
def test_changes_are_those_of_the_definitions(sequences: list[Asked], seed: int) -> None:
    logits = torch.randn(len(sequences), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    expected = torch.tensor([expected_logits(row.tolist(), a) for row, a in zip(logits, sequences, strict=True)])
    rows = sample_rows(sequences)
    changed = logits.clone()
    if rows.changes is not None:
        change_logits(changed, rows.changes)
    torch.testing.assert_close(changed, expected, atol=1e-5, rtol=1e-5)


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.lists(asked_sequences(), min_size=2, max_size=5), st.integers(0, 1000))
def test_batch_mates_change_nothing(sequences: list[Asked], seed: int) -> None:
    logits = torch.randn(len(sequences), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    together = sample(logits.clone(), sample_rows(sequences), TORCH).tolist()
    alone = [int(sample(logits[[row]], sample_rows([asked]), TORCH)) for row, asked in enumerate(sequences)]
    assert together == alone


def test_rows_without_options_stand_in_no_list() -> None:
    plain = Asked(SamplingParams(temperature=0.5), (1, 2, 3), 2)
    assert sample_rows([plain, plain]).changes is None
    changes = sample_rows([plain, replace(plain, sampling=SamplingParams(presence_penalty=1.0))]).changes
    assert changes is not None
    assert (changes.token_rows.tolist(), changes.token_ids.tolist()) == ([1], [3]), "its output, and nothing else"
    assert changes.bias_rows.size == 0


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_of_transformers(penalty: float) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    tokens = (1, 4, 4, 30, 8)
    changes = sample_rows([Asked(SamplingParams(repetition_penalty=penalty), tokens, 2)]).changes
    assert changes is not None
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits.clone())
    change_logits(logits, changes)
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("min_p", [0.01, 0.2, 1.0])
def test_min_p_of_transformers(min_p: float) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4)) * 2
    kept = torch.isfinite(MinPLogitsWarper(min_p)(torch.zeros(1, 1), logits.clone()))[0]
    rows = [Asked(SamplingParams(temperature=1.0, min_p=min_p, seed=seed), (1,), 1) for seed in range(3000)]
    seen = set(sample(logits.expand(3000, VOCAB), sample_rows(rows), TORCH).tolist())
    assert seen <= set(kept.nonzero()[:, 0].tolist())
    common = torch.softmax(logits.masked_fill(~kept, float("-inf"))[0], 0) * 3000 > 18
    assert set(common.nonzero()[:, 0].tolist()) <= seen


def test_greedy_is_greedy_over_the_changed_logits() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 2.0, 1.5
    wanted = SamplingParams(temperature=0.0, presence_penalty=1.0)
    in_prompt, in_output = (sample_rows([Asked(wanted, (1, 5), num_prompt)]) for num_prompt in (2, 1))
    assert int(sample(logits.clone(), in_prompt, TORCH)) == 5, "a prompt's token is not output"
    assert int(sample(logits.clone(), in_output, TORCH)) == 6


# -- through the core and the model


class Served:
    """A core and a tiny model; sequence n has four blocks of its own."""

    def __init__(self, checkpoint: Path) -> None:
        self.core: WorkerCore = ready_core(settings(num_blocks=16))
        self.executor = TorchExecutor(checkpoint, num_blocks=16, block_size=4)
        self._step = 0
        self._generation = 0

    def plan(self, **fields: object) -> list[int]:
        self._step += 1
        result = compute(self.core, self.executor, StepPlan(self._step, **fields))  # type: ignore[arg-type]
        return np.frombuffer(result.sampled_tokens, "<u4").tolist()

    def attach(self, sampling: SamplingParams, tokens: list[int], num_prompt: int) -> list[int]:
        self._generation += 1
        owned = handles(*[h(block, self._generation) for block in range(4)])
        sequence = SequenceStart(
            SequenceId(1), lease(1), u32(*tokens), 0, b"", b"", owned, sampling, num_prompt_tokens=num_prompt
        )
        return self.plan(detach=u32(1), attach=(sequence,), rows=u32(1), row_tokens=u32(len(tokens)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("options"), eos_token_id=None)


PROMPT = [5, 9, 200, 9]


@pytest.mark.parametrize("bursts", [(9,), (1,) * 9, (4, 1, 4)])
def test_generation_with_a_repetition_penalty_is_that_of_transformers(
    checkpoint: Path, bursts: tuple[int, ...]
) -> None:
    model = model_of(checkpoint)
    prompt = torch.tensor([PROMPT])
    generate = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        plain = model.generate(prompt, attention_mask=torch.ones_like(prompt), **generate)[0, 4:].tolist()
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), repetition_penalty=1.8, **generate)[
            0, 4:
        ].tolist()
    assert plain != expected
    served = Served(checkpoint)
    tokens = served.attach(SamplingParams(temperature=0.0, repetition_penalty=1.8), PROMPT, 0)
    for count in bursts:
        tokens += served.plan(repeat_rows=True, num_decode_steps=count)
    assert tokens == expected


def test_a_preempted_sequence_goes_on_with_its_own_penalties(checkpoint: Path) -> None:
    wanted = SamplingParams(
        temperature=0.9,
        seed=3,
        frequency_penalty=1.5,
        presence_penalty=0.5,
        min_tokens=6,
        stop_token_ids=u32(*range(0, 320, 2)),
        logit_bias=bias(t7=3.0),
    )
    whole = Served(checkpoint)
    tokens = whole.attach(wanted, PROMPT, 4)
    for _ in range(9):
        tokens += whole.plan(repeat_rows=True)
    assert all(token % 2 for token in tokens[:6]), "stop tokens are out of reach before min_tokens"
    assert not all(token % 2 for token in tokens)
    for cut in (1, 5, 8):
        resumed = Served(checkpoint)
        assert resumed.attach(wanted, PROMPT + tokens[:cut], 4) == tokens[cut : cut + 1]
        assert resumed.plan(repeat_rows=True, num_decode_steps=9 - cut) == tokens[cut + 1 :]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (SamplingParams(temperature=float("nan")), "impossible temperature;"),
        (SamplingParams(frequency_penalty=float("inf")), "impossible frequency_penalty;"),
        (SamplingParams(repetition_penalty=0.0), "impossible repetition_penalty;"),
        (SamplingParams(min_p=-0.1), "impossible min_p;"),
        (SamplingParams(logit_bias=b"1234"), "impossible logit_bias;"),
        (SamplingParams(logit_bias=bias(t1=float("nan"))), "impossible logit_bias;"),
        (SamplingParams(stop_token_ids=b"123"), "impossible stop_token_ids;"),
        (SamplingParams(num_logprobs=LIKELY_MAX + 1), "impossible num_logprobs;"),
    ],
)
def test_options_that_mean_nothing_are_refused(wrong: SamplingParams, problem: str) -> None:
    core = ready_core()
    sequence = SequenceStart(SequenceId(1), lease(1), u32(1, 2), 0, b"", b"", handles(h(1)), wrong)
    with pytest.raises(MalformedPlanError, match=problem):
        core.apply(EPOCH, StepPlan(1, attach=(sequence,)))
    good = msgspec.structs.replace(sequence, sampling=SamplingParams(), num_prompt_tokens=3)
    with pytest.raises(MalformedPlanError, match="num_prompt_tokens"):
        core.apply(EPOCH, StepPlan(1, attach=(good,)))
