"""Work on text beside the loop, with a list of what was done there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from coppice_scheduler.edge.frontend.text_work import TextWork

T = TypeVar("T")


class SeenTextWork(TextWork):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []  # of each piece of work, in the order of the calls

    async def run(self, tenant: str, size: int, work: Callable[[], T]) -> T:
        self.sizes.append(size)
        return await super().run(tenant, size, work)
