"""The counters that decide which tenant goes next."""

from __future__ import annotations

import numpy as np

from coppice_scheduler.core.state.fairness import FairShares


def shares_of(**weights: float) -> FairShares:
    shares = FairShares(lambda tenant: weights.get(tenant, 1.0))
    for tenant in weights:
        shares.number_of(tenant)
    return shares


def test_numbers_are_dense_and_stay() -> None:
    shares = shares_of()
    assert [shares.number_of(f"t{i}") for i in range(40)] == list(range(40))
    shares.charge(39, 7)
    assert shares.number_of("t39") == 39
    assert shares.counter(39) == 7


def test_tokens_count_by_weight_one_at_a_time_and_many_at_once() -> None:
    one, many = shares_of(a=1, b=4), shares_of(a=1, b=4)
    for number, num_tokens in [(0, 3), (1, 8), (0, 5), (1, 4)]:
        one.charge(number, num_tokens)
    many.charge_many(np.array([0, 1, 0, 1]), np.array([3, 8, 5, 4]))
    assert one.counter(0) == many.counter(0) == 8
    assert one.counter(1) == many.counter(1) == 3
    assert one.price(1, 8) == 2


def test_who_wanted_nothing_saves_up_nothing() -> None:
    shares = shares_of(a=1, b=1, c=1)
    shares.enter(0)
    shares.charge(0, 1000)
    shares.enter(1)
    assert shares.counter(1) == 1000
    shares.charge(1, 500)
    shares.enter(2)
    assert shares.counter(2) == 1000  # the least of those that want


def test_who_got_much_while_alone_is_not_lowered_and_not_ahead_of_the_last() -> None:
    shares = shares_of(a=1, b=1)
    shares.enter(0)
    shares.charge(0, 1000)
    shares.leave(0)
    shares.enter(1)
    assert shares.counter(1) == 1000  # nobody wants: where the last one left
    shares.charge(1, -999)
    shares.enter(0)
    assert shares.counter(0) == 1000


def test_contested_only_while_two_tenants_want() -> None:
    shares = shares_of(a=1, b=1)
    shares.enter(0)
    shares.enter(0)
    assert not shares.contested
    shares.enter(1)
    assert shares.contested
    shares.leave(0)
    assert shares.contested
    shares.leave(0)
    assert not shares.contested
