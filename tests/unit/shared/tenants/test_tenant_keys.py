"""Keys with names and ends."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from coppice.errors import UsageError
from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key

END = datetime(2026, 7, 1, 12, tzinfo=UTC)


def load(tmp_path: Path, keys: str) -> TenantDirectory:
    path = tmp_path / "tenants.yaml"
    path.write_text(f"tenants:\n  - id: a\n    api_key_sha256: {keys}\n")
    return TenantDirectory.load(path)


@pytest.mark.parametrize(
    "time", ["2026-07-01T12:00:00Z", '"2026-07-01T12:00:00Z"', "2026-07-01T14:00:00+02:00", "2026-07-01 12:00:00Z"]
)
def test_a_key_is_refused_from_its_end_on(tmp_path: Path, time: str) -> None:
    digests = digest_of_key("old"), digest_of_key("new")
    directory = load(tmp_path, f'[{{sha256: "{digests[0]}", name: old, expires: {time}}}, "{digests[1]}"]')
    before = (END - timedelta(seconds=1)).astimezone(timezone(timedelta(hours=5)))
    for key, now, expected in (("old", before, True), ("old", END, False), ("new", END, True)):
        assert (directory.authenticate(key, now) is not None) is expected, (key, now)


def test_a_tenant_without_a_key_is_nobodys(tmp_path: Path) -> None:
    directory = load(tmp_path, "[]")
    assert directory.tenants[0].id == "a"
    assert directory.authenticate("", END) is None


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("{name: x}", "tenants.yaml:3: tenants.0.api_key_sha256.0.sha256 is missing"),
        ("{sha256: ab}", "tenants.yaml:3: tenants.0.api_key_sha256.0.sha256: must be the SHA-256"),
        ("[{sha256: DIGEST, expirse: x}]", "unknown key tenants.0.api_key_sha256.0.expirse; did you mean expires?"),
        ("{sha256: DIGEST, expires: 2026-07-01T12:00:00}", "expires: must be a time with its zone"),
        ("{sha256: DIGEST, expires: 2026-07-01}", "expires: must be a time with its zone"),
        ("{sha256: DIGEST, expires: 2026-77-01}", "not valid YAML: month must be in 1..12"),
        ("{sha256: DIGEST, expires: 17}", "expires: must be a time with its zone"),
        ("{sha256: DIGEST, expires: soon}", "expires: must be a time with its zone"),
        ("{sha256: DIGEST, name: a b}", "tenants.0.api_key_sha256.0.name"),
        ("[DIGEST, {sha256: DIGEST}]", "names one API key twice"),
        ("17", "api_key_sha256: must be a list"),
    ],
)
def test_a_wrong_key_is_refused_with_its_line(tmp_path: Path, entry: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, entry.replace("DIGEST", f'"{digest_of_key("k")}"'))
    assert expected in caught.value.line()
    assert digest_of_key("k") not in caught.value.line()


def test_the_version_is_that_of_the_content(tmp_path: Path) -> None:
    one, two = load(tmp_path, f'"{digest_of_key("k")}"'), load(tmp_path, f'"{digest_of_key("k")}" # changed')
    assert (len(one.version), one.version == two.version) == (12, False)
    assert TenantDirectory.single_default().version == ""
