"""Whose tokens may leave the service: tokens are the prompts themselves, so one rule holds for every way out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from coppice.errors import UsageError
from coppice.ids import DomainId
from coppice.tenants.directory import TenantDirectory
from coppice_cache.edge.settings import CacheSettings


@dataclass(frozen=True, slots=True)
class TokenRule:
    """`is_on` is the service's flag. An empty `published` is every domain; those in `strict` never are."""

    is_on: bool = False
    published: frozenset[DomainId] = frozenset()
    strict: frozenset[DomainId] = frozenset()

    def why_not(self, domains: Collection[DomainId]) -> str | None:
        """Why a reader may not have the tokens of all of `domains`; None where it may."""
        if not self.is_on:
            return "tokens are not given out here; the operator allows them with --kv-events-tokens"
        for domain in sorted(domains):
            if domain in self.strict:
                return f"{domain} has mode strict: its tokens are given to nobody"
            if self.published and domain not in self.published:
                return f"{domain} is not published here; the operator names domains with --kv-events-domains"
        return None


def token_rule(settings: CacheSettings, directory: TenantDirectory) -> TokenRule:
    """Raises UsageError where the settings publish what the rule forbids."""
    rule = TokenRule(
        settings.kv_events_tokens,
        frozenset(map(DomainId, settings.kv_events_domains)),
        frozenset(shares.domain for shares in directory.domains() if shares.mode == "strict"),
    )
    problem = rule.why_not(rule.published) if rule.is_on else None
    if problem is not None:
        raise UsageError(
            f"--kv-events-tokens: {problem}", hint="take it out of --kv-events-domains, or publish without tokens"
        )
    return rule
