"""`coppice certs`: a CA and certificates that the services take, and nothing that is there is overwritten."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coppice.errors import UsageError
from coppice.tls.certificates import Issued, issue
from coppice.tls.credentials import Credentials, TlsFiles
from coppice.tls.identity import Role, make_identity
from coppice_cli.app import app


def certs(folder: Path, *arguments: str) -> str:
    found = CliRunner().invoke(app, ["certs", *arguments, "--dir", str(folder)])
    if found.exception is not None:
        raise found.exception
    return found.output


def shown(path: Path) -> str:
    found = CliRunner().invoke(app, ["certs", "show", str(path)])
    if found.exception is not None:
        raise found.exception
    return found.output


def test_what_is_issued_is_taken_by_the_service(tmp_path: Path) -> None:
    certs(tmp_path, "init")
    flags = certs(tmp_path, "issue", "worker", "w0")
    files = TlsFiles(tmp_path / "worker-w0.pem", tmp_path / "worker-w0-key.pem", tmp_path / "ca.pem")
    assert flags.split() == [
        "--tls-cert",
        str(files.certificate),
        "--tls-key",
        str(files.key),
        "--tls-ca",
        str(files.ca),
    ]
    assert str(Credentials(files, Role.WORKER, "w0").identity) == "coppice://worker/w0"


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    certs(tmp_path, "init")
    certs(tmp_path, "issue", "cache", "c0")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*-key.pem")} == {0o600}


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    certs(tmp_path, "init")
    certs(tmp_path, "issue", "cache", "c0")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for again in (["init"], ["issue", "cache", "c0"]):
        with pytest.raises(UsageError, match="is there already"):
            certs(tmp_path, *again)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(("arguments", "said"), [(["king", "a"], "is no role"), (["worker", "a/b"], "is no name")])
def test_wrong_identities_are_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    certs(tmp_path, "init")
    with pytest.raises(UsageError, match=said):
        certs(tmp_path, "issue", *arguments)


def test_without_a_ca_nothing_is_issued(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        certs(tmp_path, "issue", "cache", "c0")
    assert "certs init" in refused.value.line()


def test_it_shows_whose_it_is_and_until_when(tmp_path: Path) -> None:
    certs(tmp_path, "init", "--days", "30")
    certs(tmp_path, "issue", "operator", "ann", "--days", "20")
    found = shown(tmp_path / "operator-ann.pem")
    assert "identity: coppice://operator/ann" in found
    assert "in 19 days" in found
    assert "a CA: CN=Coppice development CA" in shown(tmp_path / "ca.pem")
    ca = Issued((tmp_path / "ca.pem").read_bytes(), (tmp_path / "ca-key.pem").read_bytes())
    past = issue(ca, make_identity("cache", "old"), datetime.now(UTC), timedelta(minutes=-1))
    (tmp_path / "old.pem").write_bytes(past.certificate)
    assert "it has expired" in shown(tmp_path / "old.pem")


@pytest.mark.parametrize("content", [b"", b"no certificate"])
def test_what_is_no_certificate_is_said(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.pem"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="no certificate"):
        shown(path)
