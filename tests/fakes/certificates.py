"""A CA in a folder, which issues what a test needs; two of them know nothing of each other."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

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

    def public(self, *names: str, stem: str = "public") -> tuple[Path, Path]:
        """Files of a fresh certificate and its key, for a server that clients know by these names or addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        authority = x509.load_pem_x509_certificate(self._ca.certificate)
        builder = x509.CertificateBuilder().subject_name(x509.Name([])).issuer_name(authority.subject)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(self._now - _DAY).not_valid_after(self._now + _DAY)
        names_of_all = [x509.IPAddress(ip_address(n)) if n[0].isdigit() else x509.DNSName(n) for n in names]
        builder = builder.add_extension(x509.SubjectAlternativeName(names_of_all), critical=True)
        authority_key = serialization.load_pem_private_key(self._ca.key, password=None)
        assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
        known = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
        signed = builder.add_extension(known, critical=False).sign(authority_key, hashes.SHA256())
        paths = self.folder / f"{stem}.pem", self.folder / f"{stem}-key.pem"
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        replace(paths[0], signed.public_bytes(serialization.Encoding.PEM))
        replace(paths[1], key.private_bytes(*form))
        return paths

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
