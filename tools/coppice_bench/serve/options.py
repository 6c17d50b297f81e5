"""What a user asked of `coppice bench serve`, checked before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coppice.errors import UsageError

LOADS = ("random", "prefix", "multiturn", "trace", "tenants")
APIS = ("completions", "chat")
PROMPTS = ("auto", "tokens", "text")
_PROCESSES_MAX = 64


@dataclass(frozen=True, slots=True)
class TenantKey:
    """Who sends, and with which key. A flooder keeps `--flood` requests in flight as long as the others work."""

    name: str
    api_key: str
    floods: bool = False

    @classmethod
    def parse(cls, text: str) -> TenantKey:
        """`NAME:KEY` or `NAME:KEY:flood`. Raises UsageError."""
        name, _, rest = text.partition(":")
        api_key, floods = (rest[: -len(":flood")], True) if rest.endswith(":flood") else (rest, False)
        if not name or not api_key:
            raise UsageError(f"--tenant {name or text!r} has no name or no key", hint="NAME:KEY or NAME:KEY:flood")
        return cls(name, api_key, floods)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Flags of the command. Lengths in tokens, times in seconds or as the name says."""

    url: str
    model: str = ""
    api_key: str = ""
    api: str = "completions"
    prompts: str = "auto"
    load: str = "random"
    requests: int = 64
    concurrency: int = 16
    rate: float = 0.0
    input_tokens: int = 256
    output_tokens: int = 64
    shared_tokens: int = 192
    prefixes: int = 1
    turns: int = 4
    trace: Path | None = None
    speed: float = 1.0
    limit: int = 0
    shrink: int = 1
    tenants: tuple[TenantKey, ...] = ()
    flood: int = 120
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    processes: int = 1
    timeout_s: float = 600.0
    seed: int = 0
    same_prompts: bool = False
    temperature: float = 0.0

    def check(self) -> None:
        """Raise UsageError for what cannot work."""
        self._check_choices()
        positive = ("requests", "concurrency", "input_tokens", "output_tokens", "prefixes", "turns", "shrink", "flood")
        for name in (*positive, "processes", "speed", "timeout_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)} must be above 0")
        for name in ("rate", "limit", "shared_tokens", "ttft_ms", "tpot_ms", "temperature"):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)} must not be negative")
        if self.processes > min(_PROCESSES_MAX, self.concurrency):
            raise UsageError(
                f"--processes {self.processes} is more than {min(_PROCESSES_MAX, self.concurrency)}",
                hint=f"at most one for each of the --concurrency, and {_PROCESSES_MAX}",
            )
        if self.load == "prefix" and self.shared_tokens >= self.input_tokens:
            raise UsageError(
                f"--shared-tokens {self.shared_tokens} leaves nothing of --input-tokens {self.input_tokens}",
                hint="the shared part is a part of the input",
            )

    def _check_choices(self) -> None:
        for name, value, known in (
            ("load", self.load, LOADS),
            ("api", self.api, APIS),
            ("prompts", self.prompts, PROMPTS),
        ):
            if value not in known:
                raise UsageError(f"--{name} {value} is not known", hint=f"one of {', '.join(known)}")
        if (self.load == "trace") != (self.trace is not None):
            raise UsageError("--load trace and --trace FILE go together")
        if self.prompts == "tokens" and (self.api == "chat" or self.load == "multiturn"):
            raise UsageError("token ids can be sent to completions of one turn only", hint="leave --prompts out")
        names = [tenant.name for tenant in self.tenants]
        if len(set(names)) != len(names):
            raise UsageError(f"--tenant: a name is given twice among {', '.join(names)}")
        if self.load == "tenants":
            if all(tenant.floods for tenant in self.tenants):
                raise UsageError("--load tenants needs a tenant that does not flood", hint="--tenant NAME:KEY")
        elif any(tenant.floods for tenant in self.tenants):
            raise UsageError(f"--load {self.load} has no flood", hint="--load tenants has one")

    @property
    def sends_token_ids(self) -> bool:
        if self.prompts == "auto":
            return self.api == "completions" and self.load != "multiturn"
        return self.prompts == "tokens"

    @property
    def senders(self) -> tuple[TenantKey, ...]:
        """Never empty: without tenants there is one sender, with the key of `--api-key`."""
        return self.tenants or (TenantKey("all", self.api_key),)

    def described(self) -> dict[str, Any]:
        """For the report: what shaped the load, and no key."""
        names = ["load", "api", "requests", "concurrency", "rate", "input_tokens", "output_tokens", "seed", "processes"]
        names += {
            "prefix": ["shared_tokens", "prefixes"],
            "multiturn": ["shared_tokens", "turns"],
            "trace": ["speed", "limit", "shrink"],
            "tenants": ["flood"],
        }.get(self.load, [])
        found = {name: getattr(self, name) for name in names}
        found["prompts"] = "tokens" if self.sends_token_ids else "text"
        if self.trace is not None:
            found["trace"] = self.trace.name
        return found
