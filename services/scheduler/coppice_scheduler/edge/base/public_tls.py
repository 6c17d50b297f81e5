"""The certificate that clients of the public API see. They show none: API keys say who they are."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from coppice.edge.grpc_tls import reloaded_credentials
from coppice.errors import UsageError
from coppice.tls.channel import TlsChannel
from coppice.tls.credentials import load_certificate
from coppice.tls.reloaded import Reloaded


@dataclass(frozen=True, slots=True)
class _Loaded:
    context: ssl.SSLContext
    certificate: bytes  # PEM, as is the key
    key: bytes


class PublicTls:
    """A PEM file with the certificate and the chain below its CA, and one with its key, without password.

    New connections see files that have changed. Raises UsageError when they are not right at the start.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._loaded = Reloaded(
            "files of --ssl-certfile and --ssl-keyfile", (certificate, key), lambda: _load(certificate, key)
        )

    def channel(self) -> TlsChannel:
        """For one connection of REST."""
        return TlsChannel(self._loaded.now().context, is_server=True)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        def configured(loaded: _Loaded) -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.certificate)])

        return reloaded_credentials(self._loaded.now, configured, asks_clients=False)


def _load(certificate: Path, key: Path) -> _Loaded:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        loaded = _Loaded(context, certificate.read_bytes(), key.read_bytes())
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error
    load_certificate(context, certificate, key)
    return loaded
