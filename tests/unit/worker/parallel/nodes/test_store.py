"""gloo meets through the store over links, which keeps bytes as they are and has bounds; nothing of it is pickled."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from coppice.edge.wire import Wire
from coppice_worker.parallel.errors import LinkLost
from coppice_worker.parallel.gloo_group import GlooGroup
from coppice_worker.parallel.nodes import store as module
from coppice_worker.parallel.nodes.link import Kind, Link
from coppice_worker.parallel.nodes.store import MeetingStore, MeetingValues, StoreFull, StoreOverLink
from tests.unit.worker.parallel.test_groups import check_group

WAIT_S = 60.0
BYTES = bytes(range(256))


@contextmanager
def stores() -> Iterator[tuple[MeetingStore, MeetingStore, list[str]]]:
    """Rank 0's, another rank's, and how the latter's link was lost."""
    values = MeetingValues()
    lost: list[str] = []
    links = [Link(Wire(one), "somebody", WAIT_S) for one in socket.socketpair()]
    values.serve(links[0])
    over = StoreOverLink(links[1])

    def run(link: Link) -> None:
        try:
            link.run()
        except LinkLost as error:
            lost.append(str(error))

    threads = [threading.Thread(target=run, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    try:
        yield MeetingStore(values.ask), MeetingStore(over.ask), lost
    finally:
        for link in links:
            link.abort()
        for thread in threads:
            thread.join(WAIT_S)


def test_what_one_gives_the_other_gets_byte_for_byte() -> None:
    with stores() as (zero, other, _):
        zero.set("a", BYTES)
        assert other.get("a") == BYTES
        other.set("b", "text")
        assert zero.get("b") == b"text"
        assert other.check(["a", "b"])
        assert not zero.check(["a", "c"])
        assert (zero.add("n", 2), other.add("n", 3), zero.get("n")) == (2, 5, b"5")
        assert other.num_keys() == 3
        assert other.delete_key("a")
        assert not zero.delete_key("a")


def test_compare_set_is_as_torch_has_it() -> None:
    with stores() as (zero, other, _):
        assert other.compare_set("k", "old", "new") == b"old"
        assert other.compare_set("k", "", "first") == b"first"
        assert zero.compare_set("k", b"first", b"second") == b"second"
        assert other.compare_set("k", "first", "third") == b"second"


def test_one_waits_for_what_another_gives_later() -> None:
    with stores() as (zero, other, _):
        found: list[bytes] = []
        waiting = threading.Thread(target=lambda: found.append(other.get("late")))
        waiting.start()
        zero.set("else", b"")
        assert other.check(["else"]), "one that waits keeps no other ask"
        zero.set("late", BYTES)
        waiting.join(WAIT_S)
        assert found == [BYTES]
        other.wait(["late", "else"])


def test_what_nobody_gives_is_not_waited_for_for_ever() -> None:
    with stores() as (_, other, _), pytest.raises(TimeoutError, match="no rank gave"):
        other.wait(["never"], timedelta(seconds=0.05))


@pytest.mark.parametrize("size", [2, 3])
def test_gloo_meets_through_it(size: int) -> None:
    """Ranks that are threads, each on a loopback address of its own."""
    values = MeetingValues()
    failures: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            group = GlooGroup(number, size, MeetingStore(values.ask), f"127.0.0.{2 + number}")
            check_group(group)
            narrow = torch.full((3, 4), float(number), dtype=torch.bfloat16)
            assert group.add_up(narrow).tolist() == [[float(sum(range(size)))] * 4] * 3
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not failures


def test_gloo_listens_where_it_is_told_alone() -> None:
    before = listening()
    values = MeetingValues()
    made: list[GlooGroup] = []

    def rank(number: int) -> None:
        made.append(GlooGroup(number, 2, MeetingStore(values.ask), f"127.0.0.{7 + number}"))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(made) == 2
    assert {host for host, _ in listening() - before} == {"127.0.0.7", "127.0.0.8"}


def listening() -> set[tuple[str, int]]:
    """Addresses on which sockets of this process listen."""
    own = {line.split("socket:[")[1].rstrip("]") for line in links_of_descriptors() if "socket:[" in line}
    found = set()
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[9] in own:
            host, port = words[1].split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


def links_of_descriptors() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        (["set", "k", bytes(module.VALUE_BYTES_MAX + 1)], "bytes under a key"),
        (["set", "k" * 2000, b""], "bytes under a key"),
        (["run", "what"], "'run' is no operation of the store"),
        (["set", 1, 2], "'set' is no operation of the store"),
    ],
)
def test_what_cannot_be_had_is_refused(asked: list[Any], fault: str) -> None:
    operation, *operands = asked
    with pytest.raises((StoreFull, ValueError), match=fault):
        MeetingValues().ask(operation, operands, lambda _: None)


def test_it_holds_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEYS_MAX", 2)
    monkeypatch.setattr(module, "WAITING_MAX", 1)
    values = MeetingValues()
    for key in ("a", "b", "a"):
        values.ask("set", [key, b""], lambda _: None)
    with pytest.raises(StoreFull, match="2 values are there"):
        values.ask("set", ["c", b""], lambda _: None)
    values.ask("get", [["d"]], lambda _: None)
    with pytest.raises(StoreFull, match="1 asks wait"):
        values.ask("get", [["d"]], lambda _: None)


@pytest.mark.parametrize("message", [b"", b"\0\0\0\0\xc1", b"\0\0\0\0\x80", b"\0\0\0\0\x91\xa3run"])
def test_garbage_ends_the_link_it_came_on(message: bytes) -> None:
    with stores() as (zero, other, lost):
        other._ask.__self__._link.send(Kind.ASK, message)  # type: ignore[attr-defined]
        with pytest.raises(TimeoutError):
            other.wait(["never"], timedelta(seconds=0.2))
        assert any("it asked the store for what cannot be had" in text for text in lost)
        zero.set("still", b"here")
