"""Which domains ask that blocks are zeroed between them and others."""

from __future__ import annotations

import pytest

from coppice.tenants.tenant import Tenant, domain_shares

DIGEST = "0" * 64


def tenant(name: str, **fields: object) -> Tenant:
    return Tenant.model_validate({"id": name, "api_key_sha256": DIGEST, **fields})


def test_it_is_off_unless_asked_for() -> None:
    (plain, zeroing) = domain_shares([tenant("a"), tenant("b", zero_on_change=True)])
    assert (plain.zero_on_change, zeroing.zero_on_change) == (False, True)


@pytest.mark.parametrize("first", [True, False])
def test_one_member_asks_for_its_group(first: bool) -> None:
    members = [tenant(f"m{number}", mode={"shared": "g"}, zero_on_change=number == first) for number in range(2)]
    (group,) = domain_shares(members)
    assert group.zero_on_change


@pytest.mark.parametrize("fields", [{"mode": "disabled"}, {"mode": "strict", "guarantee_share": 0.1}])
def test_who_always_zeroes_cannot_switch_it_off(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="always zeroes"):
        tenant("a", zero_on_change=False, **fields)
    tenant("a", zero_on_change=True, **fields)
