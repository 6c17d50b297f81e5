"""The files of Unix sockets: whose they are, what a killed process leaves behind, what stands in the way."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from coppice.addresses import UNIX_PATH_BYTES_MAX, Address, PortInUse, UnixAddress, parse_session_address
from coppice.edge import session_socket
from coppice.edge.session_listener import SessionListener
from coppice.errors import UsageError
from coppice.session.link import ServerLinks
from tests.fakes.link_ends import ClientEnd, ServerEnd
from tests.fakes.waiting import WAIT_S

Keep = Callable[[Any], Any]
LISTENS_UNTIL_KILLED = """
import sys, time
from coppice.addresses import UnixAddress
from coppice.edge.session_listener import SessionListener
listener = SessionListener(UnixAddress(sys.argv[1]))
print("listens", flush=True)
time.sleep(600)
"""


def refusal(path: Path) -> str:
    """Why nobody can listen there."""
    with pytest.raises(PortInUse) as refused:
        SessionListener(UnixAddress(str(path)))
    text = str(refused.value)
    assert text.startswith(f"cannot listen on unix:{path} for sessions: ")
    return text.partition(" for sessions: ")[2]


def leave_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()


def test_the_file_is_the_users_own_and_goes_with_the_listener(socket_dir: Path) -> None:
    path = socket_dir / "sessions"
    listener = SessionListener(UnixAddress(str(path)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    listener.close()
    assert not path.exists()
    path.touch()
    listener.close()
    assert path.exists(), "what lies there later is somebody else's"


def test_the_next_one_takes_the_path_of_one_that_was_killed(keep: Keep, socket_dir: Path) -> None:
    path = socket_dir / "sessions"
    command = [sys.executable, "-c", LISTENS_UNTIL_KILLED, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"listens\n"
            assert refusal(path) == "another process listens there"
            client = keep(ClientEnd(f"unix:{path}"))
        finally:
            process.kill()
    assert path.exists()
    keep(ServerEnd(ServerLinks(1, 1), f"unix:{path}"))
    client.wait_attached()


def test_of_two_that_find_a_stale_file_one_listens(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = socket_dir / "sessions"
    leave_stale(path)
    remove_stale, both = session_socket._remove_stale, threading.Barrier(2)

    def remove_and_wait_for_the_other(path: Path) -> None:
        remove_stale(path)
        with suppress(threading.BrokenBarrierError):  # the other one is kept out
            both.wait(0.3)

    monkeypatch.setattr(session_socket, "_remove_stale", remove_and_wait_for_the_other)
    listeners: list[SessionListener] = []
    refusals: list[str] = []

    def listen() -> None:
        try:
            listeners.append(SessionListener(UnixAddress(str(path))))
        except PortInUse as refused:
            refusals.append(str(refused))

    threads = [threading.Thread(target=listen) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert refusals == [f"cannot listen on unix:{path} for sessions: another process listens there"]
    session_socket.connect(listeners[0].address, WAIT_S).close()
    listeners[0].close()


def test_who_is_too_busy_to_accept_keeps_the_path(socket_dir: Path) -> None:
    path = socket_dir / "sessions"
    with ExitStack() as kept:
        busy = kept.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(str(path))
        busy.listen(0)
        waiting = 0
        while waiting < 1_000:
            caller = kept.enter_context(socket.socket(socket.AF_UNIX))
            caller.setblocking(False)
            if caller.connect_ex(str(path)):
                break
            waiting += 1
        assert refusal(path) == "another process listens there"
        assert path.exists()


def test_what_is_no_socket_stays(socket_dir: Path) -> None:
    path = socket_dir / "sessions"
    path.write_text("notes")
    assert refusal(path) == "what is there is no socket"
    assert path.read_text() == "notes"
    other = socket_dir / "link"
    other.symlink_to(path)
    assert refusal(other) == "what is there is no socket"


def test_a_missing_folder_is_named(socket_dir: Path) -> None:
    folder = socket_dir / "run"
    assert refusal(folder / "sessions") == f"there is no folder {folder}; make it with mkdir -m 700"


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o1777])
def test_a_folder_that_others_may_enter_is_refused(socket_dir: Path, mode: int) -> None:
    socket_dir.chmod(mode)
    expected = f"the folder {socket_dir} is open to other users (mode {mode:o}); close it with chmod 700"
    assert refusal(socket_dir / "sessions") == expected
    assert not list(socket_dir.iterdir())
    socket_dir.chmod(0o700)


def test_a_folder_of_another_user_is_refused(socket_dir: Path) -> None:
    folder = Path("/")
    if os.geteuid() == 0:
        folder = socket_dir / "theirs"
        folder.mkdir(mode=0o700)
        os.chown(folder, 12_345, -1)
    assert refusal(folder / "coppice-sessions") == f"the folder {folder} belongs to another user"


def test_paths_that_no_socket_can_have_are_refused() -> None:
    for text in ("unix:", "unix:sessions", "unix:./sessions", "unix:7081", "unix:/a\0b"):
        with pytest.raises(UsageError, match="names no absolute path") as refused:
            parse_session_address(text)
        assert refused.value.hint == "give unix:/PATH"
    longest = "/" + "s" * (UNIX_PATH_BYTES_MAX - 1)
    assert parse_session_address(f"unix:{longest}") == UnixAddress(longest)
    for path, num_bytes in ((longest + "s", len(longest) + 1), (longest[:-1] + "ü", len(longest) + 1)):
        with pytest.raises(UsageError, match=f"the path has {num_bytes} bytes, that of a Unix socket at most"):
            parse_session_address(f"unix:{path}")


def test_the_longest_path_can_be_listened_on(keep: Keep, socket_dir: Path) -> None:
    path = f"{socket_dir}/".ljust(UNIX_PATH_BYTES_MAX, "s")
    server = keep(ServerEnd(ServerLinks(1, 1), f"unix:{path}"))
    keep(ClientEnd(server.where)).wait_attached()


def test_either_form_is_read_and_written_the_same() -> None:
    assert parse_session_address("[::1]:7081") == Address("::1", 7081)
    for text in ("cache:7081", "[::1]:7081", "unix:/run/coppice/cache"):
        assert str(parse_session_address(text)) == text
    with pytest.raises(UsageError, match=re.escape("'cache' is no address")) as refused:
        parse_session_address("cache")
    assert refused.value.hint == "give HOST:PORT or unix:/PATH"
