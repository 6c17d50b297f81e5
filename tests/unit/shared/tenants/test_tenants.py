from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from coppice.errors import UsageError
from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key

NOW = datetime(2026, 7, 1, tzinfo=UTC)
EXAMPLE = Path(__file__).parents[4] / "deploy" / "tenants.example.yaml"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(text)
    return path


def entry(name: str, key: str = "", **fields: object) -> str:
    lines = [f"  - id: {name}", f'    api_key_sha256: "{digest_of_key(key or name)}"']
    return "\n".join(lines + [f"    {field}: {value}" for field, value in fields.items()]) + "\n"


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        TenantDirectory.load(write(tmp_path, text))
    return caught.value.line()


def test_the_documented_example_loads_and_its_key_works() -> None:
    directory = TenantDirectory.load(EXAMPLE)
    orchard = directory.authenticate("example-key-orchard", NOW)
    assert orchard is not None
    assert (orchard.id, orchard.domain, orchard.max_share) == ("orchard", "tenant/orchard", 0.75)
    assert {shares.mode for shares in directory.domains()} == {"private", "strict", "shared", "disabled"}


def test_the_credential_alone_names_the_tenant(tmp_path: Path) -> None:
    directory = TenantDirectory.load(write(tmp_path, "tenants:\n" + entry("a", "key-a") + entry("b", "key-b")))
    assert [directory.authenticate(key, NOW) and directory.authenticate(key, NOW).id for key in ("key-a", "key-b")] == [
        "a",
        "b",
    ]  # type: ignore[union-attr]
    assert directory.authenticate("key-c", NOW) is None
    assert directory.authenticate("", NOW) is None
    assert directory.authenticate(None, NOW) is None
    assert directory.authenticate("\ud800", NOW) is None
    assert directory.needs_key


def test_without_a_file_there_is_one_tenant_and_no_key() -> None:
    directory = TenantDirectory.single_default()
    tenant = directory.authenticate(None, NOW)
    assert tenant is not None
    assert tenant is directory.authenticate("anything", NOW)
    assert tenant.domain == "tenant/default"
    assert not directory.needs_key
    (shares,) = directory.domains()
    assert (shares.guarantee_share, shares.maximum_share, shares.mode) == (0.0, 1.0, "private")


def test_a_group_is_one_domain_with_one_budget(tmp_path: Path) -> None:
    text = "tenants:\n" + entry("a", mode="{shared: g}", guarantee_share=0.1, max_share=0.3)
    text += entry("b", mode="{shared: g}", guarantee_share=0.2, max_share=0.5) + entry("g")
    directory = TenantDirectory.load(write(tmp_path, text))
    group, own = directory.domains()
    assert group.domain == "group/g"
    assert group.guarantee_share == pytest.approx(0.3)
    assert group.maximum_share == 0.5
    assert own.domain == "tenant/g"


def test_strict_is_a_fixed_share(tmp_path: Path) -> None:
    directory = TenantDirectory.load(write(tmp_path, "tenants:\n" + entry("a", mode="strict", guarantee_share=0.4)))
    assert directory.tenants[0].max_share == 0.4
    assert "needs guarantee_share" in refusal(tmp_path, "tenants:\n" + entry("a", mode="strict"))
    both = "tenants:\n" + entry("a", mode="strict", guarantee_share=0.4, max_share=0.5)
    assert "must equal guarantee_share" in refusal(tmp_path, both)


def test_guarantees_and_maxima_in_blocks(tmp_path: Path) -> None:
    text = "tenants:\n" + entry("a", guarantee_blocks=2_000, max_blocks=5_000, max_share=0.5)
    text += entry("b", mode="strict", guarantee_blocks=100)
    text += entry("c", mode="{shared: g}", guarantee_blocks=10, max_blocks=40)
    text += entry("d", mode="{shared: g}", guarantee_share=0.1, max_blocks=60)
    plain, strict, group = TenantDirectory.load(write(tmp_path, text)).domains()
    assert (plain.guarantee_share, plain.guarantee_blocks, plain.maximum_blocks) == (0.0, 2_000, 5_000)
    assert (strict.guarantee_blocks, strict.maximum_blocks, strict.maximum_share) == (100, 100, 1.0)
    assert (group.guarantee_share, group.guarantee_blocks, group.maximum_blocks) == (0.1, 10, 60)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (entry("a", guarantee_blocks=9, guarantee_share=0.1), "not both"),
        (entry("a", guarantee_blocks=9, max_blocks=8), "guarantee_blocks (9) is above max_blocks (8)"),
        (entry("a", guarantee_blocks=-1), "greater than or equal to 0"),
        (entry("a", mode="strict", guarantee_blocks=4, max_blocks=5), "must equal guarantee_blocks (4)"),
        (entry("a", mode="{shared: g}", max_blocks=5) + entry("b", mode="{shared: g}"), "for all members or for none"),
        (
            entry("a", mode="{shared: g}", guarantee_blocks=5, max_blocks=6)
            + entry("b", mode="{shared: g}", guarantee_blocks=5, max_blocks=6),
            "sum to 10, above the largest max_blocks among them (6)",
        ),
    ],
)
def test_blocks_that_contradict_each_other(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, "tenants:\n" + text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tenants:\n" + entry("a", concurency=3), ["tenants.yaml:4", "tenants.0.concurency", "concurrency"]),
        ("tenant:\n" + entry("a"), ["tenants.yaml:1", "did you mean tenants?"]),
        ("tenants:\n  - id: a\n", ["tenants.yaml:2", "tenants.0.api_key_sha256 is missing"]),
        ("tenants:\n" + entry("a") + "  - id: b\n    api_key_sha256: my-key\n", ["tenants.yaml:5", "64 hexadecimal"]),
        ("tenants:\n" + entry("a", mode="shared"), ["tenants.yaml:4", "mode: {shared: GROUP}"]),
        ("tenants:\n" + entry("a", mode="privat"), ["tenants.yaml:4", "did you mean private?"]),
        ("tenants:\n" + entry("a", mode="{share: g}"), ["tenants.yaml:4"]),
        ("tenants:\n" + entry("a", max_share=1.5), ["tenants.yaml:4", "max_share", "less than or equal to 1"]),
        ("tenants:\n" + entry("a", guarantee_share=0.5, max_share=0.4), ["guarantee_share (0.5) is above max_share"]),
        ("tenants:\n" + entry("a") + entry("a", "other"), ["two tenants have the id 'a'"]),
        ("tenants:\n" + entry("a", "k") + entry("b", "k"), ["'a' and 'b' have the same API key"]),
        ("tenants:\n" + entry("a", guarantee_share=0.6) + entry("b", guarantee_share=0.6), ["sum to 1.2"]),
        ("tenants:\n" + entry("a", id="b"), ["tenants.yaml:4", "given twice"]),
        ("tenants: [\n", ["tenants.yaml:2", "not valid YAML"]),
        ("- a\n", ["must be a mapping"]),
        ("", ["must be a mapping"]),
        ("tenants: []\n", ["tenants.yaml:1", "tenants: must have at least one entry"]),
        ("tenants: a\n", ["tenants.yaml:1", "tenants: must be a list"]),
        ("tenants: [a]\n", ["tenants.yaml:1", "tenants.0: must be a mapping"]),
        ("tenants:\n" + entry('"a b"'), ["tenants.yaml:2", "tenants.0.id"]),
    ],
)
def test_a_wrong_file_is_refused_with_its_line_and_what_to_do(tmp_path: Path, text: str, expected: list[str]) -> None:
    message = refusal(tmp_path, text)
    for part in expected:
        assert part in message


def test_one_mistake_is_one_message(tmp_path: Path) -> None:
    assert ";" not in refusal(tmp_path, "tenants:\n" + entry("a", max_share=1.5)).removesuffix(")")


def test_no_message_repeats_a_key_digest(tmp_path: Path) -> None:
    secret = digest_of_key("k")
    assert secret not in refusal(tmp_path, "tenants:\n" + entry("a", "k") + entry("b", "k"))
    assert "tenants.yaml" in refusal(tmp_path, "tenants:\n" + entry("a", "k", nope=1))
    assert secret not in repr(TenantDirectory.load(write(tmp_path, "tenants:\n" + entry("a", "k"))).tenants)


def test_ten_tenths_are_one(tmp_path: Path) -> None:
    text = "tenants:\n" + "".join(entry(f"t{i}", guarantee_share=0.1) for i in range(10))
    assert len(TenantDirectory.load(write(tmp_path, text)).tenants) == 10


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the tenants file"):
        TenantDirectory.load(tmp_path / "nowhere.yaml")
