"""What a token of a prompt and a copied block cost on this worker: the cache service weighs one against the other."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from coppice.ids import TOKEN_BYTES
from coppice.messages.registration import CopiesDone, Direction
from coppice.messages.step import StepResult

CHUNK_TOKENS_MIN = 16  # of a step that says something: a smaller one is mostly what any step costs
NUM_UNUSUAL = 4  # steps, and copies, at first that touch memory or files for the first time, or compile kernels
NEWS = 1.25  # a change by this factor is said at once; else with the next answer
_KEPT = 7 / 8  # of the steps before, with each new one
_SLOWER = 1.02  # by which the time of a block grows with each copy that took longer: it may have waited for a step
_NS_PER_US = 1_000
_U32_MAX = (1 << 32) - 1


class MeasuredCosts:
    """Tokens by time and number of the steps of late; blocks by the fastest copies of late. Steps are noted on one
    thread, copies on another."""

    def __init__(self) -> None:
        self.on_news: Callable[[], None] = lambda: None
        self._num_steps = 0
        self._num_tokens = self._tokens_ns = 0.0
        self._copies = _Fastest()  # between device and host
        self._stores, self._loads = _Fastest(), _Fastest()  # between host and disk
        self._said_ns = 0.0  # of a token

    def computed(self, result: StepResult) -> None:
        """A step is done. One that mostly decodes says nothing: its time goes into weights, not into tokens."""
        num_sampled = len(result.sampled_tokens) // TOKEN_BYTES
        if result.num_tokens - num_sampled < max(CHUNK_TOKENS_MIN, result.num_tokens // 2):
            return
        self._num_steps += 1
        if self._num_steps > NUM_UNUSUAL:
            self._num_tokens = self._num_tokens * _KEPT + result.num_tokens
            self._tokens_ns = self._tokens_ns * _KEPT + result.duration_us * _NS_PER_US
            if not self._said_ns / NEWS <= self._token_ns <= self._said_ns * NEWS:
                self.on_news()

    def copied(self, direction: Direction, num_blocks: int, duration_ns: int) -> None:
        block_ns = duration_ns / num_blocks
        if direction is Direction.STORE:
            self._stores.note(block_ns)
        elif direction is Direction.LOAD:
            self._loads.note(block_ns)
        else:
            self._copies.note(block_ns)

    def added_to(self, answer: CopiesDone) -> CopiesDone:
        """0 for what is not known yet. What a disk costs is what loads take, as who asks wants to load: stores are
        synced, and count until there were loads."""
        self._said_ns = self._token_ns
        return replace(
            answer,
            prefill_ns_per_token=_u32(self._said_ns),
            copy_ns_per_block=_u32(self._copies.known_ns),
            disk_ns_per_block=_u32(self._loads.known_ns or self._stores.known_ns),
        )

    @property
    def _token_ns(self) -> float:
        return self._tokens_ns / self._num_tokens if self._num_tokens else 0.0


class _Fastest:
    """The time of a block by the fastest copies of late."""

    def __init__(self) -> None:
        self.block_ns = 0.0
        self._num_noted = 0

    def note(self, block_ns: float) -> None:
        self.block_ns = min(block_ns, self.block_ns * _SLOWER or block_ns)
        self._num_noted += 1

    @property
    def known_ns(self) -> float:
        """0 after few of them."""
        return self.block_ns if self._num_noted >= NUM_UNUSUAL else 0.0


def _u32(value: float) -> int:
    return min(_U32_MAX, round(value))
