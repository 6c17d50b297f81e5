"""Follows the event streams of other engines: one thread reads the sockets and feeds the fleet, anybody asks it.

A SUB socket per feed and, where there is a replay endpoint, a DEALER for the request that is under way. The SUB socket
is watched: a broken connection may mean another incarnation of the engine. What came over it is handed in first.
"""

from __future__ import annotations

import errno
import logging
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from coppice.edge.kv_events.frames import EventFrame, ReplayEnd, read_event_frames, read_replay_answer, replay_request
from coppice.edge.kv_events.payloads import MAX_PAYLOAD_BYTES, MalformedEvents, decode_batch
from coppice.errors import UnavailableError, UsageError
from coppice_cache.engine_index.core.event_stream import Message
from coppice_cache.engine_index.core.fleet import Delivery, FeedId, Fleet, FleetLimits, FleetMatch, SourceStatus

_log = logging.getLogger("coppice.ingest")
TICK_MS = 100
TURN_MESSAGES = 512
TURN_COLLECT = 5_000
MESSAGE_BYTES_MAX = 2 * MAX_PAYLOAD_BYTES  # above it the connection is cut before the message is in memory
HIGH_WATER = 100_000
UNREACHED_S = 5.0
_ENDPOINT = re.compile(r"(tcp://\S+:(?P<port>\d{1,6})|ipc://\S+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class FeedSpec:
    """endpoint: tcp://HOST:PORT to connect to, with HOST = * to bind. replay: of the same publisher, empty for none."""

    name: str
    endpoint: str
    replay: str = ""


class _Feed:
    """The sockets of one feed. Used by the reading thread only, but for being made."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: FeedSpec, topic: str) -> None:
        self.spec = spec
        self._context = context
        self.num_peers = 0
        self.has_complained = False
        self.dealer: zmq.Socket[bytes] | None = None
        self.sub: zmq.Socket[bytes] = context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.LINGER, 0)
        self.sub.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self.sub.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        self.sub.setsockopt(zmq.IPV6, 1)
        self.sub.setsockopt(zmq.HEARTBEAT_IVL, 5_000)  # a peer that vanished without a word is noticed
        self.sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
        self.sub.subscribe(topic)
        self.monitor = self.sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            _attach(self.sub, spec.endpoint, "--zmq")
            if spec.replay:
                self._new_dealer()
        except Exception:
            self.close()
            raise

    def ask(self, start: int) -> None:
        """What is still under way for an older request goes with its socket."""
        self._new_dealer().send_multipart(replay_request(start))

    def _new_dealer(self) -> zmq.Socket[bytes]:
        if self.dealer is not None:
            self.dealer.close(linger=0)
        self.dealer = self._context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.LINGER, 0)
        self.dealer.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self.dealer.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        self.dealer.setsockopt(zmq.IPV6, 1)
        _attach(self.dealer, self.spec.replay, "--replay")
        return self.dealer

    def close(self) -> None:
        self.sub.disable_monitor()
        self.monitor.close(linger=0)  # of its own: the context would wait for it
        self.sub.close(linger=0)
        if self.dealer is not None:
            self.dealer.close(linger=0)


def _attach(sock: zmq.Socket[bytes], endpoint: str, flag: str) -> None:
    """Connects, or binds where the host is `*`. Raises UsageError, UnavailableError."""
    form = "tcp://HOST:PORT, tcp://*:PORT to be connected to, or ipc://PATH"
    parts = _ENDPOINT.fullmatch(endpoint)
    if parts is None or int(parts["port"] or 1) not in range(1, 65536):  # some of it libzmq would take and be silent
        raise UsageError(f"{flag}: {endpoint!r} is no endpoint", hint=f"expected {form}")
    try:
        if "*" in endpoint and flag == "--zmq":
            sock.bind(endpoint)
        else:
            sock.connect(endpoint)
    except zmq.ZMQError as error:
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
            raise UnavailableError(
                f"{flag}: cannot listen on {endpoint}: {error}", hint="choose another port"
            ) from error
        raise UsageError(f"{flag}: {endpoint!r} is no endpoint: {error}", hint=f"expected {form}") from error


class Ingest:
    """Binds and connects when it is made, reads after `start`."""

    def __init__(self, specs: Iterable[FeedSpec], *, topic: str = "", limits: FleetLimits | None = None) -> None:
        self._lock = threading.Lock()
        self._fleet = Fleet(limits)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._feeds: dict[FeedId, _Feed] = {}
        self._stopping = threading.Event()
        self._started_s = time.monotonic()
        self.num_malformed_frames = 0
        self._thread = threading.Thread(target=self._run, name="ingest", daemon=True)
        self.failure: BaseException | None = None
        try:
            for spec in specs:
                feed = _Feed(self._context, spec, topic)
                self._feeds[self._fleet.add_feed(spec.name, can_replay=bool(spec.replay))] = feed
        except Exception:
            self._close()
            raise

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._close()

    # ---- questions ----

    def match(self, tokens: bytes, lora: bytes, salt: bytes, only: Iterable[str] | None) -> list[FleetMatch]:
        with self._lock:
            return self._fleet.match(tokens, lora, salt, only)

    def sources(self) -> list[SourceStatus]:
        with self._lock:
            return self._fleet.sources()

    def problems(self) -> list[str]:
        """What is not as it should be, for a person."""
        found = [f"the reading thread broke: {self.failure!r}"] if self.failure else []
        for feed in self._feeds.values():
            if not feed.num_peers:
                found.append(f"{feed.spec.name}: no connection to {feed.spec.endpoint}")
        for source in self.sources():
            if source.is_connected and not source.is_trusted:
                found.append(f"{source.source}: recovering; its blocks are withheld")
        if self._fleet.num_refused_streams:
            count = self._fleet.num_refused_streams
            found.append(f"{count} messages were left out: an endpoint has more publishers than are followed")
        return found

    @property
    def num_nodes(self) -> int:
        return self._fleet.num_nodes

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._wait()
                for feed_id, feed in self._feeds.items():
                    self._turn(feed_id, feed)
                with self._lock:
                    self._fleet.collect(TURN_COLLECT)
                self._complain_of_unreached()
        except Exception as error:
            self.failure = error
            _log.exception("the reading thread broke")

    def _wait(self) -> None:
        poller = zmq.Poller()
        for feed in self._feeds.values():
            for sock in (feed.sub, feed.monitor, feed.dealer):
                if sock is not None:
                    poller.register(sock, zmq.POLLIN)
        poller.poll(TICK_MS)

    def _turn(self, feed_id: FeedId, feed: _Feed) -> None:
        # Taken before the messages and handled after them: all that came over a broken connection is among these.
        happened = _monitor_events(feed.monitor)
        while self._read_live(feed_id, feed) and happened:
            pass
        for event in happened:
            self._connection(feed_id, feed, event)
        self._read_replay(feed_id, feed)
        now_ns = time.monotonic_ns()
        with self._lock:
            asked = self._fleet.expire(feed_id, now_ns)
        self._ask(feed, asked)

    def _connection(self, feed_id: FeedId, feed: _Feed, event: int) -> None:
        with self._lock:
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                feed.num_peers += 1
                asked = self._fleet.connected(feed_id, time.monotonic_ns())
            else:
                feed.num_peers = max(feed.num_peers - 1, 0)
                asked = self._fleet.disconnected(feed_id)
        _log.info("%s: %s %s", feed.spec.name, "connected to" if feed.num_peers else "lost", feed.spec.endpoint)
        self._ask(feed, asked)

    def _read_live(self, feed_id: FeedId, feed: _Feed) -> bool:
        """Whether there may be more."""
        for _ in range(TURN_MESSAGES):
            try:
                frames = feed.sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                frame = read_event_frames(frames)
            except MalformedEvents as error:
                self._malformed(feed, str(error))
                continue
            delivery = self._delivery(feed, frame)
            with self._lock:
                asked = self._fleet.live(feed_id, delivery, time.monotonic_ns())
            self._ask(feed, asked)
        return True

    def _read_replay(self, feed_id: FeedId, feed: _Feed) -> None:
        dealer = feed.dealer
        for _ in range(TURN_MESSAGES):
            if dealer is None or feed.dealer is not dealer:  # another request was made: its answers come later
                return
            try:
                answer = read_replay_answer(dealer.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            except MalformedEvents as error:
                self._malformed(feed, str(error))
                continue
            delivery = None if isinstance(answer, ReplayEnd) else self._delivery(feed, answer)
            now_ns = time.monotonic_ns()
            with self._lock:
                if delivery is None:
                    asked = self._fleet.replay_ended(feed_id, now_ns)
                else:
                    asked = self._fleet.replayed(feed_id, delivery, now_ns)
            self._ask(feed, asked)

    def _delivery(self, feed: _Feed, frame: EventFrame) -> Delivery:
        try:
            batch = decode_batch(frame.payload)
        except MalformedEvents as error:
            batch = None
            self._complain(feed, f"message {frame.sequence} cannot be read and counts as lost: {error}")
        return Delivery(frame.topic, Message(frame.sequence, hash(frame.payload), len(frame.payload), batch))

    def _malformed(self, feed: _Feed, text: str) -> None:
        self.num_malformed_frames += 1
        self._complain(feed, f"a message was ignored: {text}")

    def _complain(self, feed: _Feed, text: str) -> None:
        if not feed.has_complained:
            feed.has_complained = True
            _log.warning("%s: %s (further ones are only counted)", feed.spec.name, text)

    def _complain_of_unreached(self) -> None:
        if self._started_s and time.monotonic() - self._started_s > UNREACHED_S:
            self._started_s = 0.0
            for feed in self._feeds.values():
                if not feed.num_peers:
                    _log.warning("%s: nobody at %s yet; trying on", feed.spec.name, feed.spec.endpoint)

    def _ask(self, feed: _Feed, asked: list[int]) -> None:
        if asked:
            feed.ask(asked[-1])

    def _close(self) -> None:
        for feed in self._feeds.values():
            feed.close()
        self._context.term()


def _monitor_events(monitor: zmq.Socket[bytes]) -> list[int]:
    found: list[int] = []
    while monitor.poll(0):
        found.append(int(recv_monitor_message(monitor)["event"]))
    return found
