"""Certificate, key and CA of this process: read from three files, and read again when they change.

Connections that are open keep what they were opened with.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from coppice.errors import UsageError
from coppice.tls.channel import TlsChannel
from coppice.tls.identity import Identity, NoIdentity, Role
from coppice.tls.reloaded import Reloaded


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files. `certificate` has the chain below the CA, `ca` those that peers' certificates come from."""

    certificate: Path
    key: Path
    ca: Path


@dataclass(frozen=True, slots=True)
class _Loaded:
    identity: Identity
    server: ssl.SSLContext
    client: ssl.SSLContext
    pem: tuple[bytes, bytes, bytes]  # certificate, key, CA


class Credentials:
    """Any thread. Raises UsageError when the files are not right at the start, or not for this role and name."""

    def __init__(self, files: TlsFiles, role: Role | None = None, name: str = "") -> None:
        """`role` and `name`: those that the certificate must have; empty for any."""
        self._files = files
        self._identity: Identity | None = None
        self._loaded = Reloaded("TLS files", (files.certificate, files.key, files.ca), self._load)
        self.identity = identity = self._loaded.now().identity
        if role is not None and (identity.role is not role or (name and identity.name != name)):
            raise UsageError(
                f"{files.certificate} is for {identity}; this is {Identity(role, name or 'NAME')}",
                hint=f"issue one with: coppice certs issue {role} {name or 'NAME'}",
            )
        self._identity = identity

    def channel(self, *, is_server: bool) -> TlsChannel:
        """For one connection, with the files as they are now."""
        loaded = self._loaded.now()
        return TlsChannel(loaded.server if is_server else loaded.client, is_server=is_server)

    def client_context(self) -> ssl.SSLContext:
        """It compares no host names: look at the identity."""
        return self._loaded.now().client

    def listening_context(self) -> ssl.SSLContext:
        """For a listener that keeps one context: each connection gets the present one."""

        def swap(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = self._loaded.now().server

        context = _context(self._files, ssl.PROTOCOL_TLS_SERVER)
        context.sni_callback = swap
        return context

    def pem(self) -> tuple[bytes, bytes, bytes]:
        """Certificate, key, CA."""
        return self._loaded.now().pem

    def _load(self) -> _Loaded:
        loaded = _load(self._files)
        if self._identity not in (None, loaded.identity):
            raise UsageError(f"{self._files.certificate} is for {loaded.identity}; this is {self._identity}")
        return loaded


def _load(files: TlsFiles) -> _Loaded:
    """Raises UsageError."""
    from coppice.tls.certificates import identity_in  # 15 MiB that a process without TLS need not have

    path = files.certificate
    try:
        pem = []
        for path in (files.certificate, files.key, files.ca):
            pem.append(path.read_bytes())
        identity = identity_in(pem[0])
    except NoIdentity as error:
        raise UsageError(f"{files.certificate}: {error}", hint="issue one with: coppice certs issue") from error
    except OSError as error:
        raise UsageError(f"{error.filename or path} cannot be read: {error.strerror}") from error
    server, client = _context(files, ssl.PROTOCOL_TLS_SERVER), _context(files, ssl.PROTOCOL_TLS_CLIENT)
    return _Loaded(identity, server, client, (pem[0], pem[1], pem[2]))


def _context(files: TlsFiles, protocol: int) -> ssl.SSLContext:
    """Both ends show a certificate of the CA. Raises UsageError."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # whoever answers has to have the right identity, wherever it runs
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a session of ours is not resumed by TLS
    load_certificate(context, files.certificate, files.key)
    try:
        context.load_verify_locations(files.ca)
    except OSError as error:
        raise UsageError(f"{files.ca} has no certificates of a CA in PEM: {error}") from error
    return context


def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """The certificate that `context` shows, with its key. Raises UsageError."""
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:
        reason = f"{key} is not the key of {certificate}, or one of them is no PEM file without password"
        raise UsageError(f"{reason}: {error}") from error


def _no_password() -> str:
    """Without it, OpenSSL would ask a terminal."""
    return ""
