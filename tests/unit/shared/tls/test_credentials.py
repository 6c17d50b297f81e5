"""Three files make credentials; they are read again when they change, and bad ones never replace good ones."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from coppice.errors import UsageError
from coppice.tls.channel import TlsChannel
from coppice.tls.credentials import Credentials, TlsFiles
from coppice.tls.identity import Role, identity_of
from coppice.tls.settings import ListeningSettings
from tests.fakes.certificates import Authority, replace


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def talk(server: TlsChannel, client: TlsChannel) -> None:
    """Carry bytes to and fro until both have shaken hands."""
    while not (server.is_open and client.is_open):
        for one, other in ((client, server), (server, client)):
            if not one.is_open:
                one.shake_hands()
            other.feed(one.outgoing())


def serial(credentials: Credentials, client: Credentials) -> object:
    """Of the certificate that a new connection shows."""
    ends = credentials.channel(is_server=True), client.channel(is_server=False)
    talk(*ends)
    assert ends[1].certificate is not None
    return ends[1].certificate["serialNumber"]


def test_both_ends_know_each_other(authority: Authority) -> None:
    server = authority.credentials("cache", "c0").channel(is_server=True)
    client = authority.credentials("worker", "w0").channel(is_server=False)
    talk(server, client)
    assert str(identity_of(server.certificate)) == "coppice://worker/w0"
    assert str(identity_of(client.certificate)) == "coppice://cache/c0"


@pytest.mark.parametrize("what", ["certificate", "key", "ca"])
@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN nothing-----"])
def test_a_file_that_is_not_right_is_named(authority: Authority, what: str, content: bytes | None) -> None:
    files = authority.files("cache", "c0")
    path: Path = getattr(files, what)
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UsageError, match=str(path)):
        Credentials(files, Role.CACHE)


def test_a_key_of_another_certificate_is_refused(authority: Authority) -> None:
    files, other = authority.files("cache", "c0"), authority.files("cache", "c1")
    with pytest.raises(UsageError, match="is not the key of"):
        Credentials(TlsFiles(files.certificate, other.key, files.ca), Role.CACHE)


@pytest.mark.parametrize(("role", "name"), [(Role.CACHE, ""), (Role.WORKER, "w1")])
def test_a_certificate_of_another_process_is_refused(authority: Authority, role: Role, name: str) -> None:
    with pytest.raises(UsageError, match="is for coppice://worker/w0; this is"):
        Credentials(authority.files("worker", "w0"), role, name)


def test_changed_files_count_for_the_next_connection(authority: Authority) -> None:
    client = authority.credentials("worker", "w0")
    credentials = authority.credentials("cache", "c0")
    first = serial(credentials, client)
    assert serial(credentials, client) == first
    authority.files("cache", "c0")
    assert serial(credentials, client) != first


def test_a_bad_file_keeps_the_old_ones_and_is_told_once(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    client = authority.credentials("worker", "w0")
    files = authority.files("cache", "c0")
    credentials = Credentials(files, Role.CACHE)
    first = serial(credentials, client)
    with caplog.at_level(logging.ERROR):
        replace(files.key, b"half a ke")
        assert [serial(credentials, client) for _ in range(3)] == [first] * 3
    assert caplog.text.count("the old ones stay") == 1
    renewed = authority.issue("cache", "c0")
    replace(files.certificate, renewed.certificate)
    replace(files.key, renewed.key)
    assert serial(credentials, client) != first


def test_files_of_somebody_else_do_not_replace_ours(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    credentials = authority.credentials("cache", "c0")
    authority.files("worker", "w0", stem="cache-c0")
    assert credentials.pem() == credentials.pem()
    assert "is for coppice://worker/w0; this is coppice://cache/c0" in caplog.text


def test_missing_files_are_waited_for(authority: Authority) -> None:
    client, files = authority.credentials("worker", "w0"), authority.files("cache", "c0")
    credentials = Credentials(files, Role.CACHE)
    first = serial(credentials, client)
    files.certificate.unlink()
    assert serial(credentials, client) == first


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_public_listener_needs_tls_or_a_word(host: str) -> None:
    with pytest.raises(UsageError, match="can be reached from other machines"):
        ListeningSettings(host=host).check_listening()
    ListeningSettings(host=host, insecure_network=True).check_listening()
    ListeningSettings(host=host, tls_cert="a", tls_key="b", tls_ca="c").check_listening()
    ListeningSettings().check_listening()


def test_so_does_a_public_address_of_sessions() -> None:
    with pytest.raises(UsageError, match=r"--session-address 0\.0\.0\.0 can be reached from other machines"):
        ListeningSettings(session_address="0.0.0.0:7081").check_listening()
    for address in ("127.0.0.1:7081", "unix:/run/coppice/cache"):
        ListeningSettings(session_address=address).check_listening()


def test_files_come_together() -> None:
    with pytest.raises(ValueError, match="belong together"):
        ListeningSettings(tls_cert="a", tls_ca="c")
    assert ListeningSettings().credentials(Role.CACHE) is None
