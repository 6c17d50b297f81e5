"""Pins as an operator declared them; what they hold on each worker is in `pins`."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.ids import DomainId, Namespace


@dataclass(frozen=True, slots=True)
class PinSpec:
    """What was declared."""

    name: str
    domain: DomainId
    namespace: Namespace
    tokens: bytes


class PinSpecs:
    """All declared pins, found by name and by tree."""

    def __init__(self) -> None:
        self.by_name: dict[str, PinSpec] = {}
        self._by_tree: dict[tuple[DomainId, Namespace], list[PinSpec]] = {}

    def of_tree(self, domain: DomainId, namespace: Namespace) -> list[PinSpec]:
        return self._by_tree.get((domain, namespace), [])

    def add(self, spec: PinSpec) -> None:
        self.by_name[spec.name] = spec
        self._by_tree.setdefault((spec.domain, spec.namespace), []).append(spec)

    def remove(self, name: str) -> None:
        spec = self.by_name.pop(name)
        specs = self._by_tree[spec.domain, spec.namespace]
        specs.remove(spec)
        if not specs:
            del self._by_tree[spec.domain, spec.namespace]
