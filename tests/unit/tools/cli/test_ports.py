"""Free ports that a stack, a benchmark or a test is given."""

from __future__ import annotations

from coppice_up.ports import free_addresses


def test_a_port_is_not_given_out_again_before_its_service_listens() -> None:
    """Two stacks of a benchmark begin in one process; a worker of the first may still load its model."""
    first, second = free_addresses(13), free_addresses(13)
    assert len({*first, *second}) == 26
