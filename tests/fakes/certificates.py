"""A CA in a folder, which issues what a test needs; two of them know nothing of each other."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from coppice.tls.certificates import Issued, issue, make_ca
from coppice.tls.credentials import Credentials, TlsFiles
from coppice.tls.identity import Role, make_identity

_DAY = timedelta(days=1)


class Authority:
    """`folder` exists and is empty."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._now = datetime.now(UTC)
        self._ca = make_ca("test", self._now, _DAY)
        (folder / "ca.pem").write_bytes(self._ca.certificate)

    def issue(self, role: str, name: str, *, lifetime: timedelta = _DAY) -> Issued:
        return issue(self._ca, make_identity(role, name), self._now, lifetime)

    def files(self, role: str, name: str, *, stem: str = "", lifetime: timedelta = _DAY) -> TlsFiles:
        """A fresh certificate in files; `stem` is that of the files to replace."""
        stem = stem or f"{role}-{name}"
        files = TlsFiles(self.folder / f"{stem}.pem", self.folder / f"{stem}-key.pem", self.folder / "ca.pem")
        issued = self.issue(role, name, lifetime=lifetime)
        replace(files.certificate, issued.certificate)
        replace(files.key, issued.key)
        return files

    def credentials(self, role: str, name: str) -> Credentials:
        return Credentials(self.files(role, name), Role(role), name)

    def flags(self, role: str, name: str) -> list[str]:
        """For the command line of a service."""
        files = self.files(role, name)
        return [f"--tls-cert={files.certificate}", f"--tls-key={files.key}", f"--tls-ca={files.ca}"]


def replace(path: Path, content: bytes) -> None:
    """As tools do it that renew certificates: in one piece."""
    beside = path.with_suffix(".new")
    beside.write_bytes(content)
    os.replace(beside, path)


def expired() -> timedelta:
    """A lifetime that is over already."""
    return timedelta(minutes=-1)
