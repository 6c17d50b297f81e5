"""API keys as the file has them: digests, with a name and an end where somebody gave one."""

from __future__ import annotations

from datetime import datetime
from hashlib import sha256
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

_DIGEST = r"^[0-9A-Fa-f]{64}$"
_SHOWN_DIGITS = 12


class ApiKey(BaseModel):
    """One key of a tenant."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    sha256: str = Field(repr=False, json_schema_extra={"pattern": _DIGEST})
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    expires: AwareDatetime | None = None  # refused from then on; what it began before goes on

    @field_validator("sha256", mode="before")
    @classmethod
    def _digest(cls, value: Any) -> Any:
        if not isinstance(value, str) or len(value) != 64 or set(value.lower()) - set("0123456789abcdef"):
            raise ValueError(
                "must be the SHA-256 of the key in 64 hexadecimal digits, quoted; "
                "make one with: printf %s KEY | sha256sum"
            )
        return value.lower()

    @field_validator("expires", mode="before")
    @classmethod
    def _time(cls, value: Any) -> Any:
        try:
            time = datetime.fromisoformat(value) if isinstance(value, str) else value
        except ValueError:
            time = None
        if value is not None and (not isinstance(time, datetime) or time.tzinfo is None):
            raise ValueError("must be a time with its zone as in RFC 3339, such as 2026-07-01T12:00:00Z")
        return time

    @property
    def label(self) -> str:
        """What a person calls it: its name, else the first digits of its digest."""
        return self.name or self.sha256[:_SHOWN_DIGITS]

    def has_expired(self, now: datetime) -> bool:
        return self.expires is not None and self.expires <= now


def _as_entries(value: Any) -> Any:
    """A key is a digest or a mapping; one may stand without a list."""
    entries = (value,) if isinstance(value, (str, dict, ApiKey)) else value
    if not isinstance(entries, (list, tuple)):
        return entries
    return tuple({"sha256": entry} if isinstance(entry, str) else entry for entry in entries)


_Digest = Annotated[str, Field(pattern=_DIGEST)]
ApiKeys = Annotated[
    tuple[ApiKey, ...],
    BeforeValidator(_as_entries, json_schema_input_type=_Digest | ApiKey | list[_Digest | ApiKey]),
]


def digest_of_key(api_key: str) -> str:
    """What `api_key_sha256` holds for a key."""
    return sha256(api_key.encode("utf-8", "surrogatepass")).hexdigest()
