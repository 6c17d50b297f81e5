"""What a container of the compose file may do, reach and know; and the secrets that it starts with."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.file import load_tenants
from coppice.tenants.keys import digest_of_key
from tests.unit.repository.test_deploy_files import ROOT, make_secrets

SECRETS = {
    "cache": ["seal_key", "redis_password"],
    "redis": ["redis_acl"],
    "canary": ["canary_victim_key", "canary_attacker_key"],
}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert isinstance(loaded, dict)
    return loaded


# ---- the compose file


def test_every_container_is_held(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name
        assert "/tmp" in service["tmpfs"], name
        assert 0 < service["pids_limit"] <= 4096, name
        assert re.fullmatch(r"\d+[mg]|\$\{COPPICE_\w+_MEMORY:-\d+g\}", service["mem_limit"]), name
        assert "cap_add" not in service, name
        assert not service.get("privileged"), name


def test_images_of_others_have_a_whole_version(services: dict[str, Any]) -> None:
    images = {name: service["image"] for name, service in services.items() if "image" in service}
    assert len(images) == 5
    for name, image in images.items():
        assert has_whole_version(image), f"{name} is {image}"


def test_ours_are_built_from_one_image_with_a_whole_version(services: dict[str, Any]) -> None:
    """That of Python and of its Debian: a build of tomorrow gets what one of today gets. The name is that of the
    stand-in which is made where no registry answers, too."""
    files = {ROOT / service["build"]["dockerfile"] for service in services.values() if "build" in service}
    assert files == set((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
    bases = {base for file in files for base in re.findall(r"^FROM (\S+)", file.read_text(), re.MULTILINE)}
    (image,) = bases
    assert has_whole_version(image)
    assert f"\nPYTHON_IMAGE={image}\n" in (ROOT / ".ci" / "containers").read_text()


def has_whole_version(image: str) -> bool:
    return re.search(r":v?\d+\.\d+\.\d+(-[a-z]+)*$", image) is not None


def test_only_the_scheduler_is_on_the_network_in_front(services: dict[str, Any]) -> None:
    on_front = {name for name, service in services.items() if "front" in service["networks"]}
    assert on_front == {"scheduler"}
    assert {name for name, service in services.items() if "internal" not in service["networks"]} == {"jaeger"}
    assert not services["scheduler"]["networks"]["front"]


def test_secrets_are_files_of_those_who_need_them(services: dict[str, Any]) -> None:
    assert {name: service["secrets"] for name, service in services.items() if "secrets" in service} == SECRETS
    for name, service in services.items():
        for variable, value in service.get("environment", {}).items():
            if re.search("KEY|PASSWORD|TOKEN|SECRET", variable):
                assert value.startswith(("/run/secrets/", "/etc/coppice/tls/")), f"{name}: {variable}"


def test_each_service_has_its_own_certificate_and_no_other(services: dict[str, Any]) -> None:
    """A folder for each, so that a renewed certificate is seen."""
    mounted = {}
    for name, service in services.items():
        for volume in service.get("volumes", []):
            if found := re.fullmatch(r"\$\{COPPICE_CERTIFICATES:\?[^}]+\}/?(.*):/etc/coppice/tls:ro", volume):
                mounted[name] = found[1]
            assert found or "CERTIFICATES" not in volume, f"{name}: {volume}"
    with_one = ("cache", "scheduler", "worker-cpu", "worker-gpu", "prometheus", "redis", "otel-collector", "canary")
    assert mounted == {name: name for name in with_one}


def test_the_tenants_file_is_not_optional_and_is_followed(services: dict[str, Any]) -> None:
    """A folder is mounted: of a file that is replaced, a mount of the file alone would show the old one for ever."""
    for name in ("cache", "scheduler"):
        assert any(
            re.fullmatch(r"\$\{COPPICE_TENANTS:\?[^}]+\}:/etc/coppice/tenants:ro", v) for v in services[name]["volumes"]
        )
        (file,) = [value for key, value in services[name]["environment"].items() if key.endswith("_TENANTS")]
        assert file == "/etc/coppice/tenants/tenants.yaml"


# ---- deploy/make-secrets


def test_secrets_are_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "local"
    folder.mkdir()
    key = make_secrets(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert re.fullmatch("[0-9a-f]{64}\n", (folder / "secrets" / "seal_key").read_text())
    (tenant,) = load_tenants(folder / "tenants" / "tenants.yaml").tenants
    assert tenant.api_key_sha256[0].sha256 == digest_of_key(key)
    assert TenantDirectory.load(folder / "tenants" / "tenants.yaml").needs_key
    made = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    named = {"SECRETS": "secrets", "TENANTS": "tenants", "CERTIFICATES": "tls"}
    lines = [f"COPPICE_{variable}={folder}/{name}\n" for variable, name in named.items()]
    assert (folder / ".env").read_text() == "".join(lines)
    assert not [path for path, content in made.items() if key.encode() in content]
    assert make_secrets(folder) == ""
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == made
