"""What a user asked of `coppice audit isolation`, checked before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coppice.addresses import is_loopback
from coppice.errors import UsageError
from coppice.tls.credentials import TlsFiles

PROMPT_TOKENS = 1024
KEY_VARIABLES = {
    tenant: f"COPPICE_AUDIT_ISOLATION_{tenant.upper()}_KEY" for tenant in ("victim", "attacker")
}  # the keys themselves; the flags name files


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """Flags of the command. `prompt_tokens` 0: as many as suit the model."""

    base_url: str
    victim_key: str
    attacker_key: str
    model: str = ""
    samples: int = 2000
    prompt_tokens: int = 0
    timeout_s: float = 60.0

    def check(self) -> None:
        """Raise UsageError for what cannot work."""
        if self.victim_key == self.attacker_key:
            raise UsageError("victim and attacker have the same key", hint="the audit needs keys of two tenants")
        if self.samples < 1 or self.prompt_tokens < 0:
            name, value = ("samples", self.samples) if self.samples < 1 else ("prompt-tokens", self.prompt_tokens)
            raise UsageError(f"--{name} {value} must be above 0")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise UsageError(f"--timeout-s {self.timeout_s} must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """How often `--watch` audits, and where its metrics are."""

    every_s: float
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 8076
    tls: TlsFiles | None = None
    insecure_network: bool = False

    def check(self) -> None:
        """Raises UsageError when others can reach the metrics, and nothing protects them."""
        if is_loopback(self.metrics_host) or self.tls is not None or self.insecure_network:
            return
        raise UsageError(
            f"--metrics-host {self.metrics_host} can be reached from other machines, and without TLS whoever is in "
            "between can say that all is well",
            hint="give --tls-cert, --tls-key and --tls-ca (coppice certs issue monitor NAME), stay on 127.0.0.1, or "
            "say --insecure-network where only Prometheus reaches that network",
        )


def read_key(tenant: str, path: Path | None, environ: Mapping[str, str]) -> str:
    """The key of `victim` or `attacker`, from its file or its variable. Raises UsageError; never shows a key."""
    flag, variable = f"--{tenant}-key-file", KEY_VARIABLES[tenant]
    if path is None:
        if key := environ.get(variable, "").strip():
            return key
        raise UsageError(f"no key of the {tenant}", hint=f"give {flag} FILE, or set {variable}")
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"{flag} {path} cannot be read: {why}") from None
    if not key or len(key.split()) > 1 or not key.isascii() or not key.isprintable():
        raise UsageError(f"{flag} {path} holds no key", hint="one line with the key alone")
    return key
