"""Services are replaced one by one by builds of the next session protocol, and back, while requests come."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from coppice.session.versions import PROTOCOL_VERSION_MIN
from tests.e2e.stack import STOP_S, Service, Stack
from tests.fakes.oracle import Oracle
from tests.fakes.waiting import wait_for

OLDER = ["-m", "tests.fakes.messages.older_process", str(PROTOCOL_VERSION_MIN)]
NUM_TOKENS = 24
SPEAKS_OLDER = f"protocol {PROTOCOL_VERSION_MIN}, as "


class Load:
    """Clients that ask one thing after the other, until the end of the block; each answer is checked then."""

    def __init__(self, stack: Stack, oracle: Oracle, seed: int) -> None:
        self._stack = stack
        self._oracle = oracle
        self._seed = seed
        self._ending = threading.Event()
        self.answers: list[tuple[list[int], int, Any]] = []
        self._threads = [threading.Thread(target=self._ask, args=(client,), daemon=True) for client in range(3)]

    def _ask(self, client: int) -> None:
        number = 0
        while not self._ending.is_set():
            prompt = [1 + (self._seed * 31 + client * 7 + number + place) % 90 for place in range(40)]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0,
                    "ignore_eos": True, "return_token_ids": True}  # fmt: skip
            self.answers.append((prompt, *self._stack.post("/v1/completions", body)))
            number += 1

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        wait_for(lambda: len(self.answers) >= 3, "the first answers")
        return self

    def __exit__(self, *_: object) -> None:
        seen = len(self.answers)
        wait_for(lambda: len(self.answers) >= seen + 6, "answers of what runs now")
        self._ending.set()
        for thread in self._threads:
            thread.join(STOP_S)
        for prompt, status, answer in self.answers:
            assert status == 200, (status, answer)
            self._oracle.check(prompt, answer["choices"][0]["token_ids"])


def as_older(service: Service) -> None:
    python, dash_m, *rest = service.argv
    assert dash_m == "-m"
    service.argv = [python, *OLDER, *rest]


def as_newest(service: Service) -> None:
    assert service.argv[1 : 1 + len(OLDER)] == OLDER
    service.argv = [service.argv[0], "-m", *service.argv[1 + len(OLDER) :]]


class OlderStack(Stack):
    """All services are of the older build at first."""

    def _add(self, name: str, module: str, *args: str) -> None:
        super()._add(name, module, *args)
        as_older(self.services[name])


@pytest.fixture
def older(checkpoint: Path, tmp_path: Path) -> Iterator[OlderStack]:
    with OlderStack(checkpoint, tmp_path, num_blocks=512, num_workers=2) as stack:
        stack.restore()
        yield stack


@pytest.mark.wide
def test_no_request_fails_while_services_are_upgraded_and_rolled_back(older: OlderStack, oracle: Oracle) -> None:
    read = dict.fromkeys(older.services, 0)

    def replaced(name: str, change: Any) -> None:
        service = older.services[name]
        change(service)
        assert service.stop() == 0
        service.start()
        older.wait_all_open()

    def wait_for_a_word_of(name: str) -> None:
        """The service, which is of the newest build, says anew that a peer speaks the older protocol."""
        log = older.services[name].log
        wait_for(lambda: SPEAKS_OLDER in log.read_text()[read[name] :], f"a word of {name} about an older peer")
        read[name] = len(log.read_text())

    with Load(older, oracle, 1):
        replaced("cache", as_newest)
    wait_for_a_word_of("cache")  # about the scheduler and the workers
    with Load(older, oracle, 2):
        replaced("worker-0", as_newest)
        replaced("worker-1", as_newest)
    wait_for_a_word_of("worker-0")  # about the scheduler
    with Load(older, oracle, 3):
        replaced("cache", as_older)
    wait_for_a_word_of("worker-0")  # about the cache
    replaced("scheduler", as_newest)  # there is one: what it runs is given time, what comes while it starts is refused
    wait_for_a_word_of("scheduler")  # about the cache
    with Load(older, oracle, 4):
        replaced("worker-0", as_older)
    wait_for_a_word_of("scheduler")  # about the worker
