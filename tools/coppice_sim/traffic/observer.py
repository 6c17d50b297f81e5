"""A tenant that writes down all that it is told, and a disguise of what the others send.

Two runs of one seed differ in the disguise alone: in one of them everybody's prompts are made of the same runs of
tokens, in the other each other tenant writes them in tokens of its own, one for one. So the others' prompts are as
long, come at the same times and share as much among themselves, and none of them begins as one of the observer's. What
the model says is drawn from many more tokens: else two samples of one prompt would say the same by chance, in one of
the two runs alone, and would share a block there.
"""

from __future__ import annotations

from random import Random

from coppice_sim.hosts.kv_honest import VOCABULARY

OUTPUT_VOCABULARY = 1 << 30


class Observer:
    def __init__(self, tenant: str, *, disguises_others: bool) -> None:
        self.tenant = tenant
        self.heard: list[tuple[object, ...]] = []
        self._disguises_others = disguises_others
        self._alphabets: dict[str, list[int]] = {}  # of each other tenant

    def written(self, tenant: str, tokens: list[int]) -> list[int]:
        """The prompt as the tenant sends it."""
        if not self._disguises_others or tenant == self.tenant:
            return tokens
        if tenant not in self._alphabets:
            self._alphabets[tenant] = Random(f"alphabet of {tenant}").sample(range(VOCABULARY), VOCABULARY)
        return [self._alphabets[tenant][token] for token in tokens]

    def hear(self, what: tuple[object, ...]) -> None:
        """What its tenant is told: time, request id, the word itself, counts of the tenant then."""
        self.heard.append(what)
