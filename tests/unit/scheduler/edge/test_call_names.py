"""Names of requests at work, against a model that looks at every request."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coppice.ids import DomainId
from coppice.messages.step import SamplingParams
from coppice_scheduler.core.state.request import Request
from coppice_scheduler.edge.planner.call_names import CallNames

TENANTS = st.sampled_from("ab")
NAMES = st.lists(st.sampled_from(["x", "y", "*-x", "a"]), max_size=3)


def request(request_id: str, tenant: str, *names: str) -> Request:
    return Request(request_id, tenant, DomainId(tenant), b"", SamplingParams(), 1, names=names)


def test_a_name_is_one_of_its_tenants_alone() -> None:
    names = CallNames()
    names.add(request("1", "a", "x", "*-x-1"))
    names.add(request("2", "b", "x", "*-x-2"))
    names.add(request("3", "a", "x", "*-x-3"))
    assert names.find("a", ["x"]) == ("1", "3")
    assert names.find("a", ["*-x-3", "x"]) == ("3", "1")
    assert names.find("b", ["x"]) == ("2",)
    assert names.find("b", ["*-x-1"]) == names.find("c", ["x"]) == names.find("b", []) == ()
    names.remove("1")
    assert names.find("a", ["x", "*-x-1"]) == ("3",)


def test_an_id_at_work_is_not_taken_again() -> None:
    names = CallNames()
    names.add(request("1", "a", "x"))
    with pytest.raises(AssertionError, match="in use"):
        names.add(request("1", "a", "y"))


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.names = CallNames()
        self.at_work: dict[str, Request] = {}
        self.count = 0

    @rule(tenant=TENANTS, names=NAMES)
    def add(self, tenant: str, names: list[str]) -> None:
        self.count += 1
        added = request(str(self.count), tenant, *names)
        self.at_work[added.request_id] = added
        self.names.add(added)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.at_work:
            request_id = data.draw(st.sampled_from(sorted(self.at_work)))
            del self.at_work[request_id]
            self.names.remove(request_id)

    @rule(tenant=TENANTS, names=NAMES)
    def find(self, tenant: str, names: list[str]) -> None:
        meant = [one for one in self.at_work.values() if one.tenant == tenant and set(one.names) & set(names)]
        found = self.names.find(tenant, names)
        assert sorted(found) == sorted(one.request_id for one in meant)

    @invariant()
    def nothing_is_kept_of_what_is_over(self) -> None:
        assert set(self.names._keys) == set(self.at_work)
        named = {(one.tenant, name) for one in self.at_work.values() for name in one.names}
        assert set(self.names._request_ids) == named


TestMachine = Machine.TestCase
