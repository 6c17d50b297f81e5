"""`coppice tenants`: edits keep what they do not mean, secrets are shown once, a wrong file stays as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import jsonschema_rs
import pytest
from typer.testing import CliRunner

from coppice.errors import CoppiceError, UsageError
from coppice.tenants.directory import TenantDirectory
from coppice.tenants.file import load_tenants
from coppice.tenants.keys import digest_of_key
from coppice_cli.app import app
from coppice_cli.tenants import replace_file
from coppice_cli.tenants.operations import add_tenant, duration, revoke, rotate_key
from coppice_cli.tenants.views import schema_of_file
from coppice_cli.tenants.yaml_edits import TenantsText

ROOT = Path(__file__).resolve().parents[4]
NOW = datetime(2026, 7, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
D = {name: digest_of_key(name) for name in "abcdef"}

FILE = f"""# first
tenants:   # all of them
  - id: a   # the a
    # above its key
    api_key_sha256: "{D["a"]}"   # behind its key
    weight: 2   # twice
  - id: b
    api_key_sha256:   # two
      # the old one
      - "{D["b"]}"   # b
      # the new one
      - {{sha256: "{D["c"]}", name: spare}}   # c
    mode: {{shared: g}}
  - id: c
    api_key_sha256:
    - sha256: "{D["d"]}"   # d
      # why
      name: main
    max_share: 0.5
  - {{id: d, api_key_sha256: ["{D["e"]}", "{D["f"]}"]}}
# last
"""


def comments(text: str) -> list[str]:
    return [line.split("#", 1)[1].strip() for line in text.splitlines() if "#" in line]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(FILE)
    return path


def who(path: Path, key: str, now: datetime = NOW) -> str | None:
    tenant = TenantDirectory.load(path).authenticate(key, now)
    return tenant and tenant.id


def run(*words: object) -> tuple[int, str, str]:
    """As a process would end."""
    code = "from coppice_cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "tenants", *map(str, words)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_a_tenant_is_added_behind_the_others_and_all_else_stays(path: Path) -> None:
    key = add_tenant(path, "new", {"weight": 3.0, "mode": {"shared": "g"}, "max_blocks": None}, "main")
    after = path.read_text()
    assert after.startswith(FILE.removesuffix("# last\n"))
    assert after.endswith("# last\n")
    assert who(path, key) == "new"
    added = load_tenants(path).tenants[-1]
    assert (added.weight, added.domain, added.api_key_sha256[0].name) == (3.0, "group/g", "main")
    assert key not in after


def test_a_tenant_is_added_with_what_narrows_the_service_for_it(path: Path) -> None:
    options = ["--model", 'org/"ü"', "--model", "on", "--max-context", "4096", "--max-retain-ms", "0"]
    found = CliRunner().invoke(app, ["tenants", "add", str(path), "new", *options, "--hides-cached-tokens"])
    assert found.exit_code == 0
    added = load_tenants(path).tenants[-1]
    assert added.models == ('org/"ü"', "on")
    assert (added.max_context, added.max_retain_ms, added.shows_cached_tokens) == (4096, 0, False)
    plain = json.loads(CliRunner().invoke(app, ["tenants", "show", str(path), "--json"]).stdout)["tenants"][-1]
    assert plain["models"] == list(added.models)
    assert (plain["max_context"], plain["max_retain_ms"], plain["shows_cached_tokens"]) == (4096, 0, False)
    table = " ".join(CliRunner().invoke(app, ["tenants", "show", str(path)]).stdout.split())
    for words in ("4,096", "0 ms", "hidden"):
        assert words in table


@pytest.mark.parametrize("text", ["", "tenants:\n- id: a\n  api_key_sha256: " + D["a"]])
def test_a_tenant_is_added_to_a_file_without_a_last_newline_and_to_none(path: Path, text: str) -> None:
    path.unlink()
    if text:
        path.write_text(text)
    key = add_tenant(path, "on", {}, "")
    assert who(path, key) == "on", "YAML takes a bare `on` for true"
    assert path.read_text().startswith(text)
    if not text:
        assert path.stat().st_mode & 0o7 == 0


@pytest.mark.parametrize(("tenant", "olds"), [("a", "a"), ("b", "bc"), ("c", "d"), ("d", "ef")])
def test_while_rotating_old_and_new_keys_are_valid(path: Path, tenant: str, olds: str) -> None:
    others = {name: who(path, name) for name in "abcdef" if name not in olds}
    key = rotate_key(path, tenant, "next", HOUR, NOW)
    for old in olds:
        assert who(path, old, NOW + HOUR - timedelta(seconds=1)) == tenant
        assert who(path, old, NOW + HOUR) is None
    assert who(path, key, NOW + 9 * HOUR) == tenant
    assert {name: who(path, name, NOW + 9 * HOUR) for name in others} == others
    assert comments(path.read_text()) == comments(FILE)


def test_rotating_again_keeps_nearer_ends_and_drops_what_has_expired(path: Path) -> None:
    first = rotate_key(path, "a", "first", HOUR, NOW)
    second = rotate_key(path, "a", "second", 5 * HOUR, NOW)
    assert who(path, "a", NOW + HOUR) is None
    assert who(path, first, NOW + 4 * HOUR) == "a"
    third = rotate_key(path, "a", "third", HOUR, NOW + 9 * HOUR)
    keys = {tenant.id: tenant for tenant in load_tenants(path).tenants}["a"].api_key_sha256
    assert [key.name for key in keys] == ["second", "third"]
    assert who(path, second, NOW + 9 * HOUR) == who(path, third, NOW + 99 * HOUR) == "a"


def test_one_key_is_revoked_by_name_or_digits(path: Path) -> None:
    assert revoke(path, "b", "spare") == ["spare"]
    assert (who(path, "b"), who(path, "c")) == ("b", None)
    assert revoke(path, "d", D["e"][:8].upper()) == [D["e"][:12]]
    assert (who(path, "e"), who(path, "f")) == (None, "d")
    assert set(comments(FILE)) - set(comments(path.read_text())) == {"c"}, "its own comment goes with a key"


@pytest.mark.parametrize(("tenant", "olds"), [("a", "a"), ("b", "bc"), ("c", "d"), ("d", "ef")])
def test_a_tenant_whose_keys_are_all_revoked_stays_and_nobody_calls_as_it(path: Path, tenant: str, olds: str) -> None:
    before = load_tenants(path).tenants
    revoke(path, tenant, "")
    after = load_tenants(path).tenants
    assert [one.id for one in after] == [one.id for one in before]
    assert [who(path, old) for old in olds] == [None] * len(olds)
    assert "first" in comments(path.read_text())
    key = rotate_key(path, tenant, "", HOUR, NOW)
    assert who(path, key) == tenant


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("add", "a"), "there is a tenant 'a' already"),
        (("add", "x", "--guarantee-share", "1.5"), "less than or equal to 1"),
        (("add", "x", "--mode", "privat"), "did you mean private?"),
        (("add", "x", "--mode", "shared"), "shared:GROUP"),
        (("add", "x y"), "tenants.4.id"),
        (("add", "x", "--key-name", "a b"), "tenants.4.api_key_sha256.0.name"),
        (("rotate-key", "aa"), "did you mean a?"),
        (("rotate-key", "a", "--keep-old-for", "0s"), "no duration above 0"),
        (("rotate-key", "b", "--name", "spare"), "two API keys of one name"),
        (("revoke", "b", "--key", "spar"), "did you mean spare?"),
    ],
)
def test_what_cannot_be_is_refused_with_exit_code_2_and_the_file_stays(
    path: Path, words: tuple[str, ...], expected: str
) -> None:
    command, *rest = words
    found = CliRunner().invoke(app, ["tenants", command, str(path), *rest])
    assert isinstance(found.exception, UsageError)
    assert expected in found.exception.line()
    assert not found.stdout
    assert path.read_text() == FILE
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"tenants: [{{id: a, api_key_sha256: {D['a']}}}]\n", "tenants.yaml:1: tenants stand in brackets"),
        (f"tenants:\n  - id: a\n    api_key_sha256: &k {D['a']}\n  - {{id: b, api_key_sha256: *k}}\n", "same API key"),
    ],
)
def test_forms_that_an_edit_does_not_understand_are_left_alone(path: Path, text: str, why: str) -> None:
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        add_tenant(path, "x", {}, "")
    assert why in caught.value.line()
    assert path.read_text() == text


def test_keys_that_are_written_elsewhere_are_edited_by_hand(path: Path) -> None:
    text = f"tenants:\n  - id: a\n    <<: {{api_key_sha256: {D['a']}}}\n"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"tenants\.yaml:2: api_key_sha256 is not written here"):
        revoke(path, "a", "")
    assert path.read_text() == text


def test_an_edit_with_another_effect_than_meant_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TenantsText, "set_keys", lambda *_: FILE.replace("weight: 2", "weight: 3"))
    with pytest.raises(UsageError, match="cannot be edited here"):
        revoke(path, "d", "")
    assert path.read_text() == FILE


def test_a_comment_that_would_be_lost_is_a_refusal(path: Path) -> None:
    text = f'tenants:\n  - id: a\n    api_key_sha256: ["{D["a"]}",  # why\n      "{D["b"]}"]\n'
    path.write_text(text)
    with pytest.raises(UsageError, match="comment"):
        rotate_key(path, "a", "", HOUR, NOW)
    assert path.read_text() == text


def test_a_file_keeps_its_mode_and_a_link_stays_one(path: Path, tmp_path: Path) -> None:
    path.chmod(0o604)
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    add_tenant(link, "x", {}, "")
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o604
    assert load_tenants(path).tenants[-1].id == "x"


def test_two_editors_do_not_lose_each_others_edits(path: Path) -> None:
    threads = [threading.Thread(target=add_tenant, args=(path, f"t{i}", {}, "")) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    ids = [tenant.id for tenant in load_tenants(path).tenants]
    assert sorted(ids) == sorted([*"abcd", *(f"t{i}" for i in range(8))])


def test_what_somebody_wrote_meanwhile_is_not_lost(path: Path) -> None:
    def edit(text: str) -> str:
        path.write_text(FILE + "# by hand\n")
        return text

    with pytest.raises(CoppiceError, match="changed by somebody else"):
        replace_file.edit_tenants(path, edit)
    assert path.read_text().endswith("# by hand\n")
    assert os.listdir(path.parent) == [path.name]


def test_exit_codes_and_what_is_printed_where(path: Path) -> None:
    code, out, err = run("add", path, "x")
    assert (code, who(path, out.strip())) == (0, "x"), "the key alone is on stdout, so that a script can take it"
    assert "only time" in err
    code, out, _ = run("check", path)
    assert (code, "5 tenants, version " in out) == (0, True)
    path.write_text(FILE.replace("weight", "wieght"))
    code, out, err = run("check", path)
    assert (code, out) == (2, "")
    assert "tenants.yaml:6: unknown key tenants.0.wieght; did you mean weight?" in err


def test_show_names_keys_and_never_a_digest(path: Path) -> None:
    rotate_key(path, "a", "next", HOUR, datetime.now(UTC))
    found = CliRunner().invoke(app, ["tenants", "show", str(path), "--json"])
    shown = json.loads(found.stdout)
    assert [key["name"] for key in shown["tenants"][0]["keys"]] == [D["a"][:12], "next"]
    assert shown["version"] == TenantDirectory.load(path).version
    table = CliRunner().invoke(app, ["tenants", "show", str(path)]).stdout
    assert "shared:g" in table
    for text in (found.stdout, table):
        assert not [digest for digest in D.values() if digest in text]


def test_the_published_schema_is_that_of_the_code() -> None:
    written = json.loads((ROOT / "deploy" / "tenants.schema.json").read_text())
    assert written == schema_of_file(), "run: coppice tenants schema > deploy/tenants.schema.json"


def test_the_schema_takes_all_forms_of_keys() -> None:
    validator = jsonschema_rs.validator_for(schema_of_file())
    for keys in (D["a"], [D["a"]], {"sha256": D["a"]}, [{"sha256": D["a"], "name": "n"}, D["b"]]):
        assert validator.is_valid({"tenants": [{"id": "a", "api_key_sha256": keys}]})
    assert not validator.is_valid({"tenants": [{"id": "a", "api_key_sha256": "abc"}]})


@pytest.mark.parametrize(
    ("field", "right", "wrong"),
    [
        ("models", [["x"], ["x", "y"], None], [[], [""], ["x", "x"], "x"]),
        ("max_context", [2, 4096, None], [1, "all"]),
        ("max_retain_ms", [0, 1000, None], [-1]),
        ("shows_cached_tokens", [True, False], [0]),
    ],
)
def test_the_schema_knows_what_narrows_the_service(field: str, right: list[object], wrong: list[object]) -> None:
    validator = jsonschema_rs.validator_for(schema_of_file())
    for value, is_right in [*((value, True) for value in right), *((value, False) for value in wrong)]:
        file = {"tenants": [{"id": "a", "api_key_sha256": D["a"], field: value}]}
        assert validator.is_valid(file) == is_right, value


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("24h", 86400), ("7d", 604800)])
def test_durations(text: str, seconds: int) -> None:
    assert duration(text).total_seconds() == seconds
