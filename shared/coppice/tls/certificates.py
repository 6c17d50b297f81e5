"""Certificates as they are made and read: a CA for development, and what it issues. Keys are EC P-256.

Whoever has a CA already issues the same with it: TLS web server and client as extended key usage, the URI of the
identity, and the DNS names that gRPC clients compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coppice.tls.identity import ANY_GRPC_NAME, Identity, NoIdentity, grpc_name, identity_among

_BEFORE = timedelta(minutes=5)  # clocks of machines differ


@dataclass(frozen=True, slots=True)
class Issued:
    """PEM of a certificate and of its key."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Description:
    """What a certificate says. `identity` is None for a CA."""

    identity: Identity | None
    subject: str
    issuer: str
    expires: datetime
    is_ca: bool


def make_ca(name: str, now: datetime, lifetime: timedelta) -> Issued:
    """A CA that signs itself and may issue certificates of processes only."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    builder = _builder(subject, subject, key, now, lifetime).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    certificate = builder.add_extension(_usage(is_ca=True), critical=True).sign(key, hashes.SHA256())
    return _issued(certificate, key)


def issue(ca: Issued, identity: Identity, now: datetime, lifetime: timedelta) -> Issued:
    """A certificate for both ends of a connection, since most processes are both. Raises ValueError when `ca` is no CA
    with its key."""
    authority = x509.load_pem_x509_certificate(ca.certificate)
    authority_key = serialization.load_pem_private_key(ca.key, password=None)
    if not isinstance(authority_key, ec.EllipticCurvePrivateKey):
        raise ValueError("the key of the CA is no EC key")
    if authority_key.public_key() != authority.public_key():
        raise ValueError("the key of the CA belongs to another certificate")
    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName(
        [
            x509.UniformResourceIdentifier(str(identity)),
            x509.DNSName(grpc_name(identity.role)),
            x509.DNSName(ANY_GRPC_NAME),
        ]
    )
    certificate = (
        _builder(_name(f"{identity.role} {identity.name}"[:64]), authority.subject, key, now, lifetime)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(is_ca=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(names, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return _issued(certificate, key)


def identity_in(pem: bytes) -> Identity:
    """Of the first certificate in a file. Raises NoIdentity."""
    try:
        return identity_among(_uris(x509.load_pem_x509_certificate(pem)))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise NoIdentity(str(error) if isinstance(error, NoIdentity) else "this is no certificate in PEM") from error


def describe(pem: bytes) -> Description:
    """Raises NoIdentity when it is neither a CA nor a certificate of ours."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        is_ca = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        is_ca = False
    except ValueError as error:
        raise NoIdentity("this is no certificate in PEM") from error
    return Description(
        identity=None if is_ca else identity_in(pem),
        subject=certificate.subject.rfc4514_string(),
        issuer=certificate.issuer.rfc4514_string(),
        expires=certificate.not_valid_after_utc.astimezone(UTC),
        is_ca=is_ca,
    )


def _uris(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, lifetime: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        encipher_only=False,
        decipher_only=False,
    )


def _issued(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Issued:
    return Issued(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
