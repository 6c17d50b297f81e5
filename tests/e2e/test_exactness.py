"""What the stack serves is what `transformers` generates, token for token: alone, together, warm, under pressure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.stack import Stack
from tests.fakes.cache.cached_tokens import cached_tokens
from tests.fakes.checkpoints import LLAMA3_ROPE, write_tiny_checkpoint
from tests.fakes.oracle import Oracle

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 100, 127, 128, 200, 255, 300, 431, 600)
NUM_TOKENS = 20
DEMO = Path(__file__).parents[2] / "shared" / "coppice" / "demo_model"


def checkpoint_of(kind: str, folder: Path) -> Path:
    if kind == "demo":
        return DEMO
    if kind == "qwen2":
        return write_tiny_checkpoint(folder / kind, "qwen2", seed=1, tie=True, sharded=True)
    return write_tiny_checkpoint(folder / kind, "llama", seed=2, rope_scaling=LLAMA3_ROPE)


def prompts_of(kind: str) -> list[list[int]]:
    """One prompt of every length; those of more than 100 tokens begin with the same 96."""
    rng = random.Random(kind)
    common = [rng.randrange(256) for _ in range(96)]
    longest = 480 if kind == "demo" else 600
    lengths = [min(length, longest) for length in LENGTHS]
    return [
        (common if length > 100 else []) + [rng.randrange(256) for _ in range(length - (96 if length > 100 else 0))]
        for length in lengths
    ]


class Case:
    """One checkpoint with its oracle and prompts."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.checkpoint = checkpoint_of(kind, folder)
        self.oracle = Oracle(self.checkpoint)
        self.prompts = prompts_of(kind)

    def check(self, stack: Stack, prompt: list[int]) -> int:
        """Serve one prompt, compare, and return its cached tokens."""
        answer = stack.complete(prompt, NUM_TOKENS)
        tokens = answer["choices"][0]["token_ids"]
        assert len(tokens) == NUM_TOKENS
        self.oracle.check(prompt, tokens)
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    def check_together(self, stack: Stack) -> None:
        with ThreadPoolExecutor(len(self.prompts)) as pool:
            list(pool.map(lambda prompt: self.check(stack, prompt), self.prompts))


WIDE = [pytest.param(kind, marks=pytest.mark.wide) for kind in ("llama", "demo")]


@pytest.fixture(scope="module", params=["qwen2", *WIDE])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def roomy(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(case.checkpoint, tmp_path_factory.mktemp("roomy"), num_blocks=512) as stack:
        yield stack


def test_cold_then_warm_alone(case: Case, roomy: Stack) -> None:
    roomy.forget()
    seen: list[list[int]] = []
    for prompt in case.prompts:
        cached = case.check(roomy, prompt)
        assert cached == max((shared(prompt, other) for other in seen), default=0)
        seen.append(prompt)
    before = roomy.tokens_computed()
    for prompt in case.prompts:
        assert case.check(roomy, prompt) == shared(prompt, prompt)
    computed = roomy.tokens_computed() - before
    expected = sum(len(prompt) - shared(prompt, prompt) + NUM_TOKENS - 1 for prompt in case.prompts)
    assert computed == expected, "cached tokens were computed again"


def shared(prompt: list[int], other: list[int]) -> int:
    """cached_tokens of a prompt after `other` and its answer."""
    common = 0
    while common < min(len(prompt), len(other)) and prompt[common] == other[common]:
        common += 1
    return cached_tokens(min(common, len(prompt) - 1), num_written=len(other) + NUM_TOKENS - 1)


def test_all_at_once(case: Case, roomy: Stack) -> None:
    case.check_together(roomy)
    roomy.wait_at_rest()


@pytest.mark.parametrize("case", [pytest.param("qwen2", marks=pytest.mark.wide), *WIDE], indirect=True)
def test_under_pressure_with_preemption(case: Case, tmp_path: Path) -> None:
    # The longest prompt and its output need 39 blocks of 16: all sixteen at once cannot fit into 60.
    with Stack(case.checkpoint, tmp_path, num_blocks=60, scheduler_args=["--max-chunk-tokens=64"]) as stack:
        case.check_together(stack)
        for _ in range(8):  # when they run short depends on who comes first
            case.check_together(stack)
            if stack.metric(stack.port, "vllm:num_preemptions_total"):
                break
        assert stack.metric(stack.port, "vllm:num_preemptions_total") > 0
        stack.wait_at_rest()
