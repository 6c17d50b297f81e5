"""`coppice certs ...`: a CA for development, and certificates of processes from it."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from coppice.errors import UsageError
from coppice_cli.variables import Command

Folder = Annotated[Path, typer.Option("--dir", help="Folder of the CA and of what it issues.")]
Role = Annotated[str, typer.Argument(help="scheduler, worker, cache, operator or monitor.", show_default=False)]
Name = Annotated[str, typer.Argument(help="Of a worker: its --worker-id.", show_default=False)]
FOLDER = Path("certs")
DAYS_MAX = 3_650


def add_to(certs: typer.Typer) -> None:
    """Hang the commands up under `coppice certs`."""
    for command in (init, issue, show):
        certs.command(cls=Command)(command)


def init(
    folder: Folder = FOLDER,
    days: Annotated[int, typer.Option(min=1, max=DAYS_MAX, help="Until the CA expires.")] = 365,
) -> None:
    """Make a CA for development: ca.pem for all services, and ca-key.pem, which only `issue` needs."""
    from coppice.tls.certificates import make_ca

    certificate, key = _paths(folder, "ca")
    made = make_ca("Coppice development CA", datetime.now(UTC), timedelta(days=days))
    _write_pair(certificate, made.certificate, key, made.key)
    typer.echo(f"{certificate} is the CA; keep {key} where no service runs", err=True)


def issue(
    role: Role,
    name: Name,
    folder: Folder = FOLDER,
    days: Annotated[int, typer.Option(min=1, max=DAYS_MAX, help="Until it expires.")] = 90,
) -> None:
    """Issue a certificate and its key to one process: ROLE-NAME.pem and ROLE-NAME-key.pem."""
    from coppice.tls.certificates import Issued
    from coppice.tls.certificates import issue as issue_certificate
    from coppice.tls.identity import NoIdentity, make_identity

    try:
        identity = make_identity(role, name)
    except NoIdentity as error:
        raise UsageError(str(error)) from error
    ca_path, ca_key_path = _paths(folder, "ca")
    ca = Issued(_read(ca_path), _read(ca_key_path))
    try:
        made = issue_certificate(ca, identity, datetime.now(UTC), timedelta(days=days))
    except ValueError as error:
        raise UsageError(f"{ca_path} and {ca_key_path} are no CA: {error}") from error
    certificate, key = _paths(folder, f"{role}-{name}")
    _write_pair(certificate, made.certificate, key, made.key)
    typer.echo(f"--tls-cert {certificate} --tls-key {key} --tls-ca {ca_path}")


def show(file: Annotated[Path, typer.Argument(help="A certificate in PEM.", show_default=False)]) -> None:
    """Whose certificate it is, who issued it, and until when."""
    from coppice.tls.certificates import describe
    from coppice.tls.identity import NoIdentity

    try:
        found = describe(_read(file))
    except NoIdentity as error:
        raise UsageError(f"{file}: {error}") from error
    left = (found.expires - datetime.now(UTC)).days
    typer.echo(f"identity: {found.identity or 'a CA: ' + found.subject}")
    typer.echo(f"issuer: {found.issuer}")
    typer.echo(f"expires: {found.expires:%Y-%m-%d %H:%M} UTC ({f'in {left} days' if left >= 0 else 'it has expired'})")


def _paths(folder: Path, stem: str) -> tuple[Path, Path]:
    return folder / f"{stem}.pem", folder / f"{stem}-key.pem"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="coppice certs init makes a CA") from error


def _write_pair(certificate_path: Path, certificate: bytes, key_path: Path, key: bytes) -> None:
    """Neither replaces a file. Raises UsageError."""
    for path in (certificate_path, key_path):
        if path.exists():
            raise UsageError(f"{path} is there already", hint="move it away first, or name another --dir")
    certificate_path.parent.mkdir(parents=True, exist_ok=True)
    _write(key_path, key, 0o600)
    _write(certificate_path, certificate, 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
