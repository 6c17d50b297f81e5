"""A CA in a folder for as long as a benchmark runs: certificates of services, and one that clients see."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coppice.tls.certificates import issue, make_ca
from coppice.tls.identity import make_identity

_LIFETIME = timedelta(days=1)


class Authority:
    """`ca` is the file of its certificate."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._now = datetime.now(UTC)
        self._ca = make_ca("Coppice benchmark CA", self._now, _LIFETIME)
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(self._ca.certificate)

    def flags(self, role: str, name: str) -> list[str]:
        """With which a service is somebody: a fresh certificate, its key, the CA."""
        issued = issue(self._ca, make_identity(role, name), self._now, _LIFETIME)
        certificate, key = self._write(f"{role}-{name}", issued.certificate, issued.key)
        return ["--tls-cert", str(certificate), "--tls-key", str(key), "--tls-ca", str(self.ca)]

    def public(self, address: str) -> tuple[Path, Path]:
        """Files of a certificate and its key, EC P-256, for a server that clients know by this IP address."""
        authority = x509.load_pem_x509_certificate(self._ca.certificate)
        authority_key = serialization.load_pem_private_key(self._ca.key, password=None)
        assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.IPAddress(ip_address(address))])
        known = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
        builder = x509.CertificateBuilder().subject_name(x509.Name([])).issuer_name(authority.subject)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(self._now - _LIFETIME).not_valid_after(self._now + _LIFETIME)
        builder = builder.add_extension(names, critical=True).add_extension(known, critical=False)
        signed = builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return self._write("public", signed, key.private_bytes(*form))

    def _write(self, stem: str, certificate: bytes, key: bytes) -> tuple[Path, Path]:
        paths = self._folder / f"{stem}.pem", self._folder / f"{stem}-key.pem"
        paths[1].touch(mode=0o600)
        for path, content in zip(paths, (certificate, key), strict=True):
            path.write_bytes(content)
        return paths
