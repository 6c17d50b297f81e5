"""Who was served how much: one virtual counter per tenant, in tokens divided by its weight.

    counter   |-- prefill tokens as they are planned, output tokens as they come --| / weight
    lifted    a tenant that wanted nothing and wants again starts at the least counter of those that want

Both count what other planners of the cell say, too: what they served is charged here as well, and who wants something
there wants.

After VTC (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024): whoever has the least counter goes next,
so backlogged tenants drift apart by no more than what one choice can give; nobody saves up a claim while it wants
nothing, and nobody is punished for what it got while others wanted nothing. A tenant *wants* while it has a request
whose prefill is not planned to its end. Only decoding, it takes no part in a choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


class FairShares:
    def __init__(self, weight_of: Callable[[str], float]) -> None:
        self._weight_of = weight_of
        self._numbers: dict[str, int] = {}
        self._tenants: list[str] = []  # by number
        self._at_work: Counter[int] = Counter()  # requests here, by number
        self.weight_at_work = 0.0  # of all tenants that have some
        self._served: NDArray[np.float64] = np.zeros(8)
        self._token_price: NDArray[np.float64] = np.ones(8)  # 1 / weight
        self._prefills: NDArray[np.float64] = np.zeros(8)
        self._outputs: NDArray[np.float64] = np.zeros(8)
        self._elsewhere: NDArray[np.float64] = np.zeros(8)
        self._wanting: dict[int, int] = {}  # requests that want, by number; only those with some
        self._wanting_elsewhere: frozenset[int] = frozenset()
        self._last_left = 0.0  # counter of the last tenant that stopped wanting

    def number_of(self, tenant: str) -> int:
        """A dense number that names the tenant from its first request on."""
        number = self._numbers.get(tenant)
        if number is None:
            number = self._numbers[tenant] = len(self._numbers)
            self._tenants.append(tenant)
            if number == len(self._served):
                for name in ("_served", "_prefills", "_outputs", "_elsewhere"):
                    setattr(self, name, np.concatenate([getattr(self, name), np.zeros(number)]))
                self._token_price = np.concatenate([self._token_price, np.ones(number)])
            self._token_price[number] = 1.0 / self._weight_of(tenant)
        return number

    def reweigh(self) -> None:
        """Weights changed. What was served stays as it was counted; only what comes is counted otherwise."""
        for tenant, number in self._numbers.items():
            self._token_price[number] = 1.0 / self._weight_of(tenant)
        self.weight_at_work = sum((self.weight(number) for number in self._at_work), 0.0)

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)

    def tenant(self, number: int) -> str:
        return self._tenants[number]

    def find(self, tenant: str) -> int | None:
        """Its number, if it has one."""
        return self._numbers.get(tenant)

    # --- what they were served

    def charge(self, number: int, num_tokens: int) -> None:
        """Tokens of prefill."""
        self._served[number] += num_tokens * self._token_price[number]
        self._prefills[number] += num_tokens

    def charge_many(self, numbers: NDArray[np.integer], num_tokens: NDArray[np.integer]) -> None:
        """Output tokens. numbers, num_tokens: [N]; a tenant may stand there several times."""
        sums = np.bincount(numbers, weights=num_tokens, minlength=len(self._served))
        self._served += sums * self._token_price
        self._outputs += sums

    def charge_elsewhere(self, numbers: NDArray[np.integer], num_tokens: NDArray[np.integer]) -> None:
        """Tokens of both kinds that other planners served. numbers, num_tokens: [N]; a tenant stands there once."""
        self._served[numbers] += num_tokens * self._token_price[numbers]
        self._elsewhere[numbers] += num_tokens

    def served_here(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Tokens of prefill and of output, of all tenants [T] by number."""
        count = len(self._tenants)
        return self._prefills[:count], self._outputs[:count]

    def num_elsewhere(self, tenant: str) -> int:
        """Tokens that were charged for other planners."""
        return int(self._elsewhere[self.number_of(tenant)])

    def num_outputs(self, tenant: str) -> int:
        """Output tokens of the tenant so far."""
        return int(self._outputs[self.number_of(tenant)])

    def counter(self, number: int) -> float:
        return float(self._served[number])

    def counter_with(self, number: int, num_tokens: float) -> float:
        """As if the tenant had been served so many tokens more."""
        return float(self._served[number] + num_tokens * self._token_price[number])

    def counters_with(self, num_tokens: list[float]) -> list[float]:
        """The same of all tenants, so many tokens for each."""
        count = len(num_tokens)
        counters: list[float] = (self._served[:count] + np.array(num_tokens) * self._token_price[:count]).tolist()
        return counters

    def weight(self, number: int) -> float:
        return 1.0 / float(self._token_price[number])

    def price(self, number: int, num_tokens: int) -> float:
        """By how much so many tokens would move the counter."""
        return float(num_tokens * self._token_price[number])

    # --- who has work here

    def come(self, number: int) -> None:
        """One more request of the tenant."""
        if not self._at_work[number]:
            self.weight_at_work += self.weight(number)
        self._at_work[number] += 1

    def go(self, number: int) -> None:
        self._at_work[number] -= 1
        if not self._at_work[number]:
            del self._at_work[number]
            self.weight_at_work = self.weight_at_work - self.weight(number) if self._at_work else 0.0

    def num_at_work(self, number: int) -> int:
        return self._at_work[number]

    def at_work(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Numbers of the tenants that have requests here, and how many: [N] each."""
        count = len(self._at_work)
        numbers = np.fromiter(self._at_work.keys(), np.int64, count)
        return numbers, np.fromiter(self._at_work.values(), np.int64, count)

    # --- who wants

    def enter(self, number: int) -> None:
        """One more request of the tenant wants."""
        if number not in self._wanting and number not in self._wanting_elsewhere:
            self._lift(number)
        self._wanting[number] = self._wanting.get(number, 0) + 1

    def _lift(self, number: int) -> None:
        """It begins to want."""
        others = [self._served[other] for other in self._wanting]
        others += [self._served[other] for other in self._wanting_elsewhere]
        floor = min(others) if others else self._last_left
        self._served[number] = max(self._served[number], floor)

    def leave(self, number: int) -> None:
        """One fewer: its prefill is planned to the end, or it is over."""
        left = self._wanting[number] - 1
        if left:
            self._wanting[number] = left
        else:
            del self._wanting[number]
            if number not in self._wanting_elsewhere:
                self._last_left = float(self._served[number])

    def enter_elsewhere(self, numbers: frozenset[int]) -> None:
        """These want something at other planners, beside those that do already."""
        for number in sorted(numbers - self._wanting_elsewhere):
            if number not in self._wanting:
                self._lift(number)
            self._wanting_elsewhere |= {number}

    def keep_elsewhere(self, numbers: frozenset[int]) -> None:
        """No others but these want something at other planners."""
        left = sorted(number for number in self._wanting_elsewhere - numbers if number not in self._wanting)
        self._wanting_elsewhere &= numbers
        if left:
            self._last_left = max(float(self._served[number]) for number in left)

    def wanting(self) -> NDArray[np.int64]:
        """Numbers of the tenants that want something here."""
        return np.fromiter(self._wanting, np.int64, len(self._wanting))

    @property
    def contested(self) -> bool:
        """More than one tenant wants, here."""
        return len(self._wanting) > 1
