"""The model as a tenant may use it: whether at all, and how much of its context.

    what is served --models, max_context of the tenants file--> what the tenant is told, and held to

A model that a tenant may not use does not exist for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from coppice.tenants.tenant import Tenant
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.base.errors import ApiError, invalid, model_not_found

_EXCEEDED = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """Tokens of one sequence, prompt and output together, and whose limit that is."""

    num_tokens: int
    owner: Literal["model", "tenant"] = "model"

    def too_long(self, num_tokens: str, field: str) -> ApiError:
        """The refusal of a prompt that leaves no room for a token. `num_tokens`: of the prompt, in words."""
        return invalid(
            f"This {self.owner}'s context is {self.num_tokens} tokens and must hold at least one new one; the prompt "
            f"has {num_tokens} tokens. Shorten it.",
            param=field,
            code=_EXCEEDED,
        )

    def too_many(self, num_prompt_tokens: int, max_tokens: int) -> ApiError:
        """The refusal of more new tokens than there is room for."""
        return invalid(
            f"This {self.owner}'s context is {self.num_tokens} tokens; {num_prompt_tokens} in the prompt and "
            f"max_tokens {max_tokens} are {num_prompt_tokens + max_tokens}. At most "
            f"{self.num_tokens - num_prompt_tokens} tokens can follow this prompt.",
            param="max_tokens",
            code=_EXCEEDED,
        )


def context_of(model: ModelInfo, tenant: Tenant) -> ContextLimit:
    if tenant.max_context is None or tenant.max_context >= model.max_context:
        return ContextLimit(model.max_context)
    return ContextLimit(tenant.max_context, "tenant")


def models_of(model: ModelInfo, tenant: Tenant) -> tuple[ModelInfo, ...]:
    """What the tenant may ask for of the one that is served, with the context that it may use."""
    if tenant.models is not None and model.id not in tenant.models:
        return ()
    return (replace(model, max_context=context_of(model, tenant).num_tokens),)


def check_model(model: ModelInfo, tenant: Tenant, asked: str | None) -> ModelInfo:
    """The model that `asked` names, as the tenant may use it; None names the one that is served.

    Raises ApiError (NOT_FOUND).
    """
    served = next(iter(models_of(model, tenant)), None)
    if served is None or asked not in (None, served.id):
        raise model_not_found(asked, served.id if served is not None else None)
    return served
