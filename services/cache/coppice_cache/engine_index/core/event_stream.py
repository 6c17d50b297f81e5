"""The sequence of one publisher of KV events: what was lost, said twice, said again, or said by a new incarnation.

                     gap, disconnect                       all there, or given up
        FOLLOWING ----------------------> RECOVERING ------------------------------> FOLLOWING
          apply                     withheld; live ones are held                 apply what was held
                                    while a replay is awaited

A replay is asked from the last message that we know, not from the first that we miss: if the publisher tells that one
differently, or not at all, it is another incarnation and nothing of before counts. Without this a worker that restarted
and got beyond our number while we were away would keep the blocks of its former life. What stays lost costs the state:
`Clear`, and the source is built up from what follows. Entries are withheld then, never wrong.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from coppice.messages.kv_events import KvEventBatch


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """recent_max: messages whose repetition is recognised. held_*: what comes live while a replay is awaited."""

    recent_max: int = 1_024
    held_max: int = 10_000
    held_bytes_max: int = 64 << 20
    replay_timeout_ns: int = 2_000_000_000
    attempts_max: int = 5


@dataclass(frozen=True, slots=True)
class Message:
    """digest: of the payload, to tell a repetition from another message. batch: None where it cannot be read."""

    sequence: int
    digest: int
    num_bytes: int
    batch: KvEventBatch | None


class ClearReason(Enum):
    LOST = "lost"
    RESTARTED = "restarted"
    UNREADABLE = "unreadable"
    DISCONNECTED = "disconnected"


@dataclass(frozen=True, slots=True)
class Apply:
    batch: KvEventBatch


@dataclass(frozen=True, slots=True)
class Clear:
    reason: ClearReason


@dataclass(frozen=True, slots=True)
class AskReplay:
    """A new request; what is still under way for an older one is to be dropped."""

    start: int


Effect = Apply | Clear | AskReplay


@dataclass(slots=True)
class StreamCounts:
    messages: int = 0
    gaps: int = 0
    restarts: int = 0
    duplicates: int = 0
    unreadable: int = 0
    replays: int = 0
    clears: int = 0
    held_over: int = 0


class EventStream:
    """Effects are to be carried out in order. `is_trusted` says whether what was applied so far may be believed."""

    def __init__(self, limits: StreamLimits, *, can_replay: bool) -> None:
        self._limits = limits
        self._can_replay = can_replay
        self.next = 0
        self.is_trusted = True
        self.counts = StreamCounts()
        self._recent: dict[int, int] = {}
        self._order: deque[int] = deque()
        self._held: dict[int, Message] = {}
        self._held_bytes = 0
        self._farthest = -1
        self._asked = 0
        self._attempts = 0
        self._num_answers = 0
        self._is_verified = True
        self._takes_any_base = False
        self._began_anywhere = False
        self._deadline_ns = 0  # 0: no replay is under way

    # ---- what happens ----

    def live(self, message: Message, now_ns: int) -> list[Effect]:
        """A message came from the publisher, in whatever order."""
        self.counts.messages += 1
        self.counts.unreadable += message.batch is None
        if self._is_known(message):
            self.counts.duplicates += 1
            return []
        if not self.is_trusted:
            return self._live_while_recovering(message, now_ns)
        if self._takes_any_base:
            self._takes_any_base, self._began_anywhere, self.next = False, True, message.sequence
            return self._take(message)
        if message.sequence < self.next:
            self.counts.restarts += 1
            return self._forget(ClearReason.RESTARTED) + self._beyond(message, now_ns)
        return self._beyond(message, now_ns)

    def replayed(self, message: Message, now_ns: int) -> list[Effect]:
        """The publisher sent a message again, in order, because we asked for it."""
        if self.is_trusted:
            return []
        self._deadline_ns = now_ns + self._limits.replay_timeout_ns
        if self._is_known(message):
            self._is_verified |= message.sequence == self.next - 1
            self._num_answers += self._is_verified
            return []
        if message.sequence < self.next:
            return self._restarted(now_ns)
        if message.sequence > self.next and self._num_answers and self._attempts < self._limits.attempts_max:
            return [self._ask(now_ns)]  # a hole within a replay: the publisher's socket was full
        cleared: list[Effect] = []
        if not self._is_verified or message.sequence > self.next:
            cleared = self._forget(ClearReason.LOST)
            self.next = message.sequence
        self._attempts, self._num_answers = 1, self._num_answers + 1  # there is progress
        return cleared + self._take(message)

    def replay_ended(self, now_ns: int) -> list[Effect]:
        """The publisher has nothing more to send again."""
        if self.is_trusted:
            return []
        if not self._is_verified:  # it does not know the last message that we have of it
            if self._asked or self._farthest >= 0:
                return self._restarted(now_ns)
            self.counts.restarts += 1  # and the new one has said nothing yet
            self._trust()
            return self._forget(ClearReason.RESTARTED)
        effects = self._drain()
        if self._farthest < self.next:
            self._trust()
            return effects
        return effects + self._again(now_ns)

    def expire(self, now_ns: int) -> list[Effect]:
        """Time went by. A replay that does not come is asked for again, and given up in the end."""
        if self.is_trusted or not self._deadline_ns or now_ns < self._deadline_ns:
            return []
        return self._again(now_ns)

    def disconnected(self) -> list[Effect]:
        """The connection is gone, and perhaps the publisher: nothing is believed until it was asked.

        What came over the connection must have been handed in before: later it would be taken for the successor's.
        """
        if self._can_replay:
            self._distrust()
            self._drop_held()
            self._deadline_ns = 0
            return []
        return self._forget(ClearReason.DISCONNECTED)

    def connected(self, now_ns: int) -> list[Effect]:
        """There is a connection (again)."""
        return self._recover(now_ns) if self._can_replay else []

    # ---- decisions ----

    def _is_known(self, message: Message) -> bool:
        return self._recent.get(message.sequence) == message.digest

    def _live_while_recovering(self, message: Message, now_ns: int) -> list[Effect]:
        held = self._held.get(message.sequence)
        if message.sequence < self.next or (held is not None and held.digest != message.digest):
            return self._restarted(now_ns)
        self._hold(message)
        return [] if self._deadline_ns else [self._ask(now_ns)]

    def _beyond(self, message: Message, now_ns: int) -> list[Effect]:
        """A message at or after the next one."""
        if message.sequence == self.next and message.batch is not None:
            return self._take(message)
        self.counts.gaps += 1
        if not self._can_replay:
            cleared = self._forget(ClearReason.LOST if message.batch is not None else ClearReason.UNREADABLE)
            self.next = message.sequence
            return cleared + self._take(message)
        effects = self._recover(now_ns)
        self._hold(message)
        return effects

    def _recover(self, now_ns: int) -> list[Effect]:
        cleared = self._forget(ClearReason.LOST) if self._began_anywhere else []  # now it may tell us everything
        self._distrust()
        return [*cleared, self._ask(now_ns)]

    def _take(self, message: Message) -> list[Effect]:
        self._remember(message)
        self.next = message.sequence + 1
        if message.batch is None:
            return self._clear(ClearReason.UNREADABLE)
        return [Apply(message.batch)]

    def _restarted(self, now_ns: int) -> list[Effect]:
        """There is another incarnation. What is held may be of either; the new one tells its own again."""
        self.counts.restarts += 1
        effects = self._forget(ClearReason.RESTARTED)
        self._drop_held()
        return effects + self._again(now_ns)

    def _drain(self) -> list[Effect]:
        """Applies held messages as far as they go on from what we have."""
        effects: list[Effect] = []
        while self.next in self._held:
            effects += self._take(self._held[self.next])
        self._held = {sequence: message for sequence, message in self._held.items() if sequence >= self.next}
        self._held_bytes = sum(message.num_bytes for message in self._held.values())
        return effects

    def _again(self, now_ns: int) -> list[Effect]:
        """Asks once more; after some times without progress, what is missing stays lost and the next message begins."""
        if self._attempts < self._limits.attempts_max:
            return [self._ask(now_ns)]
        effects = self._forget(ClearReason.LOST)
        self._trust()
        self._takes_any_base = True
        return effects

    # ---- state ----

    def _distrust(self) -> None:
        self.is_trusted = False
        self._takes_any_base = False
        self._attempts = 0

    def _trust(self) -> None:
        self.is_trusted = True
        self._deadline_ns = 0
        self._drop_held()

    def _drop_held(self) -> None:
        self._held, self._held_bytes, self._farthest = {}, 0, -1

    def _ask(self, now_ns: int) -> AskReplay:
        self._attempts += 1
        self._num_answers = 0
        self.counts.replays += 1
        self._asked = max(self.next - 1, 0)
        self._is_verified = self.next == 0
        self._deadline_ns = now_ns + self._limits.replay_timeout_ns
        return AskReplay(self._asked)

    def _hold(self, message: Message) -> None:
        """Over the limit all that is held is dropped: the publisher is asked for it after this replay."""
        self._farthest = max(self._farthest, message.sequence)
        if message.batch is None or message.sequence in self._held:
            return
        limits = self._limits
        self._held[message.sequence] = message
        self._held_bytes += message.num_bytes
        if len(self._held) > limits.held_max or self._held_bytes > limits.held_bytes_max:
            self.counts.held_over += 1
            self._held, self._held_bytes = {}, 0

    def _remember(self, message: Message) -> None:
        self._recent[message.sequence] = message.digest
        self._order.append(message.sequence)
        if len(self._order) > self._limits.recent_max:
            self._recent.pop(self._order.popleft(), None)

    def _forget(self, reason: ClearReason) -> list[Effect]:
        """Nothing is known of the publisher any more."""
        self.next = 0
        self._recent.clear()
        self._order.clear()
        self._is_verified = True
        self._began_anywhere = False
        return self._clear(reason)

    def _clear(self, reason: ClearReason) -> list[Effect]:
        self.counts.clears += 1
        return [Clear(reason)]
