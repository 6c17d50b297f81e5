"""Settings of TLS that every service has, and which listeners may do without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from coppice.addresses import Address, SessionAddress, is_loopback, parse_session_address
from coppice.errors import UsageError
from coppice.settings import SessionAddressText, Settings, Variable
from coppice.tls.credentials import Credentials, TlsFiles
from coppice.tls.identity import Role

_TEXT = "for connections between services, with --tls-cert, --tls-key and --tls-ca all or none"
GIVE_TLS = "give --tls-cert, --tls-key and --tls-ca (coppice certs makes them)"


def refuse_open_hosts(listens: Mapping[str, str], why_not: str, hint: str) -> None:
    """Raises UsageError when other machines can reach one of these hosts, which are listed by their flags."""
    for flag, host in listens.items():
        if not is_loopback(host):
            raise UsageError(f"{flag} {host} can be reached from other machines, and {why_not}", hint=hint)


class TlsSettings(Settings):
    """A service that speaks to others, over TLS where the files are given."""

    tls_cert: Annotated[str | None, Variable("COPPICE_TLS_CERT")] = Field(
        None, description=f"PEM file of the certificate of this process, {_TEXT}."
    )
    tls_key: Annotated[str | None, Variable("COPPICE_TLS_KEY")] = Field(
        None, description="PEM file of its key, without password."
    )
    tls_ca: Annotated[str | None, Variable("COPPICE_TLS_CA")] = Field(
        None, description="PEM file of the CA that the certificates of all services come from."
    )

    @model_validator(mode="after")
    def _are_all_or_none(self) -> Self:
        given = [path for path in (self.tls_cert, self.tls_key, self.tls_ca) if path is not None]
        if given and (len(given) < 3 or "" in given):
            raise ValueError("--tls-cert, --tls-key and --tls-ca belong together: give all three, or none")
        return self

    def credentials(self, role: Role, name: str = "") -> Credentials | None:
        """None without TLS. Raises UsageError."""
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        return Credentials(TlsFiles(Path(self.tls_cert), Path(self.tls_key), Path(self.tls_ca)), role, name)


class ListeningSettings(TlsSettings):
    """A service that other services and operators connect to. Subclasses have a `session_port` of their own."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    http_host: str | None = Field(
        None,
        min_length=1,
        description="Address of the ports for operators, HTTP and their gRPC; unless given, that of --host.",
    )
    session_port: int = 0
    session_address: SessionAddressText | None = Field(
        None,
        description="HOST:PORT or unix:/PATH for sessions, instead of --host and --session-port. A Unix socket serves "
        "the same user on the same machine; its folder belongs to that user and has mode 700.",
    )
    insecure_network: Annotated[bool, Variable("COPPICE_INSECURE_NETWORK")] = Field(
        False,
        description="Listen beyond loopback without TLS: whoever reaches the ports can read prompts, speak as any "
        "service and change what is cached.",
    )

    @property
    def http_listens_on(self) -> str:
        """Host of the HTTP port, and of gRPC for operators."""
        return self.http_host or self.host

    def sessions(self) -> tuple[str, SessionAddress]:
        """Where sessions are accepted, and the flag that says so."""
        if self.session_address is not None:
            return "--session-address", parse_session_address(self.session_address)
        return "--session-port", Address(self.host, self.session_port)

    def check_listening(self) -> None:
        """Raises UsageError when others can reach a port of ours, and nothing protects what is said there."""
        if self.tls_cert is not None or self.insecure_network:
            return
        listens = {"--host": self.host, "--http-host": self.http_listens_on}
        flag, address = self.sessions()
        if flag == "--session-address" and isinstance(address, Address):
            listens[flag] = address.host
        refuse_open_hosts(
            listens,
            "without TLS whoever reaches it can read every prompt and speak as any service",
            f"{GIVE_TLS}, listen on 127.0.0.1, or say --insecure-network where only these services reach that network",
        )
