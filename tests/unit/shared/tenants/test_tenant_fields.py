"""What narrows the service for one tenant, as the tenants file has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from coppice.errors import UsageError
from coppice.tenants.changes import changes_between
from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant

HEAD = f"""tenants:
  - id: a
    api_key_sha256: "{digest_of_key("a")}"
"""


def directory(text: str) -> TenantDirectory:
    return TenantDirectory.parse(Path("tenants.yaml"), (HEAD + text).encode())


def tenant(text: str) -> Tenant:
    (found,) = directory(text).tenants
    return found


def test_without_them_a_tenant_has_what_the_service_has() -> None:
    for found in (tenant(""), *TenantDirectory.single_default().tenants):
        narrowed = (found.models, found.max_context, found.max_retain_ms, found.shows_cached_tokens)
        assert narrowed == (None, None, None, True)


def test_all_of_them_are_read() -> None:
    found = tenant(
        "    models: [org/demo, other]\n    max_context: 4096\n    max_retain_ms: 0\n    shows_cached_tokens: false\n"
    )
    assert found.models == ("org/demo", "other")
    assert (found.max_context, found.max_retain_ms, found.shows_cached_tokens) == (4096, 0, False)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("models: []", "tenants.0.models: must have at least one entry"),
        ("models: org/demo", "tenants.0.models: must be a list"),
        ("models: [org/demo, 7]", "tenants.0.models.1: Input should be a valid string"),
        ('models: [""]', "tenants.0.models.0: String should have at least 1 character"),
        ("models: [x, y, x]", "tenants.0.models: 'x' is named twice"),
        ("max_context: 1", "tenants.0.max_context: Input should be greater than or equal to 2"),
        ("max_context: all", "tenants.0.max_context: Input should be a valid integer"),
        ("max_retain_ms: -1", "tenants.0.max_retain_ms: Input should be greater than or equal to 0"),
        ("shows_cached_tokens: sometimes", "tenants.0.shows_cached_tokens: Input should be a valid boolean"),
        ("show_cached_tokens: false", "unknown key tenants.0.show_cached_tokens; did you mean shows_cached_tokens?"),
    ],
)
def test_a_wrong_value_is_named_with_its_line_and_key(field: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        directory(f"    weight: 2\n    {field}\n")
    message = caught.value.line()
    assert message.startswith("tenants.yaml:5: ")
    assert words in message
    assert message.count("tenants.0.") == 1, "one mistake is one message"


def test_a_list_without_a_name_is_told_beside_other_mistakes() -> None:
    with pytest.raises(UsageError) as caught:
        directory("    models: []\n    max_context: 1\n")
    assert "tenants.yaml:4: tenants.0.models" in caught.value.line()
    assert "tenants.yaml:5: tenants.0.max_context" in caught.value.line()


@pytest.mark.parametrize("field", ["models: [x]", "max_context: 9", "max_retain_ms: 9", "shows_cached_tokens: false"])
def test_each_of_them_is_a_change_of_its_tenant(field: str) -> None:
    changes = changes_between(directory(""), directory(f"    {field}\n"))
    assert (changes.tenants_changed, changes.count) == (("a",), 1)
