"""Options of commands that speak to a service over TLS. Their variables are the same for all commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coppice.errors import UsageError
from coppice.tls.credentials import TlsFiles

TlsCert = Annotated[
    Path | None, typer.Option("--tls-cert", envvar="COPPICE_TLS_CERT", help="PEM file of our certificate.")
]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", envvar="COPPICE_TLS_KEY", help="PEM file of its key.")]
TlsCa = Annotated[Path | None, typer.Option("--tls-ca", envvar="COPPICE_TLS_CA", help="PEM file of the CA.")]


def files_of(cert: Path | None, key: Path | None, ca: Path | None) -> TlsFiles | None:
    """None without TLS. Raises UsageError."""
    if cert is None or key is None or ca is None:
        if cert or key or ca:
            raise UsageError("--tls-cert, --tls-key and --tls-ca belong together", hint="give all three, or none")
        return None
    return TlsFiles(cert, key, ca)
