"""Deployment files agree with the code: what they build, mount, set and draw exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from cryptography import x509
from typer.testing import CliRunner

from coppice.settings import Settings, parse_settings
from coppice.tenants.directory import TenantDirectory
from coppice.tenants.file import load_tenants
from coppice.tls.certificates import identity_in
from coppice.tls.credentials import Credentials, TlsFiles
from coppice.tls.identity import Identity, NoIdentity, Role
from coppice_audit.options import AuditOptions, WatchOptions
from coppice_cache.edge.settings import CacheSettings
from coppice_cli.app import app
from coppice_scheduler.edge.base.settings import ServiceSettings
from coppice_worker.edge.settings import WorkerSettings
from tests.fakes.certificates import Authority

ROOT = Path(__file__).resolve().parents[3]
SERVICES: dict[str, type[Settings]] = {
    "cache": CacheSettings,
    "scheduler": ServiceSettings,
    "worker-cpu": WorkerSettings,
    "worker-gpu": WorkerSettings,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What deploy/make-secrets makes, and the keys of canaries as docs/OPERATING.md has them made."""
    folder = tmp_path_factory.mktemp("deployed")
    make_secrets(folder)
    for name in ("victim", "attacker"):
        command = ["tenants", "add", str(folder / "tenants" / "tenants.yaml"), f"canary-{name}", "--weight", "0.1"]
        added = CliRunner().invoke(app, command)
        assert added.exit_code == 0, added.output
        (folder / "secrets" / f"canary_{name}_key").write_text(added.stdout)
    return folder


def make_secrets(folder: Path) -> str:
    """The API key that it printed. Its .env lies in the folder."""
    command = [str(ROOT / "deploy" / "make-secrets"), str(folder)]
    environment = {**os.environ, "ENV_FILE": str(folder / ".env")}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def with_defaults(text: str, made: Path = Path("made")) -> str:
    """A value with `${NAME:-default}` and `${NAME:?why}` as an environment of `made` alone leaves it."""
    folders = {"SECRETS": "secrets", "TENANTS": "tenants", "CERTIFICATES": "tls"}
    text = re.sub(r"\$\{COPPICE_(\w+):\?[^}]*\}", lambda found: str(made / folders[found[1]]), text)
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_all_parts_are_there(compose: dict[str, Any]) -> None:
    others = {"redis", "otel-collector", "jaeger", "prometheus", "grafana", "canary"}
    assert set(compose["services"]) == others | set(SERVICES)


def test_every_build_file_and_mounted_file_exists(compose: dict[str, Any], made: Path) -> None:
    named_volumes = set(compose["volumes"])
    for secret in compose["secrets"].values():
        assert Path(with_defaults(secret["file"], made)).is_file()
    for name, service in compose["services"].items():
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file(), name
        for volume in service.get("volumes", []):
            source = with_defaults(volume, made).split(":")[0]
            assert source in named_volumes or (ROOT / source).exists(), f"{name} mounts {source}"


def settings_of(compose: dict[str, Any], made: Path, name: str) -> Any:
    """What a service of the compose file makes of its environment, with the secrets that were made."""
    service = compose["services"][name]
    environment = {key: with_defaults(str(value)) for key, value in service["environment"].items()}
    for key, value in environment.items():
        if key.endswith("_FILE") and value.startswith("/run/secrets/"):
            assert value.removeprefix("/run/secrets/") in service["secrets"]
            environment[key] = value.replace("/run/secrets", str(made / "secrets"))
    mounted = {target: source for source, target, *_ in (with_defaults(v, made).split(":") for v in service["volumes"])}
    for key in ("COPPICE_TLS_CERT", "COPPICE_TLS_KEY", "COPPICE_TLS_CA"):
        folder, _, file = environment[key].rpartition("/")
        environment[key] = f"{mounted[folder]}/{file}"
    return parse_settings(SERVICES[name], [], environment, name)


@pytest.mark.parametrize("name", SERVICES)
def test_services_accept_their_environment(compose: dict[str, Any], made: Path, name: str) -> None:
    assert settings_of(compose, made, name).host == "0.0.0.0"


@pytest.mark.parametrize("name", SERVICES)
def test_services_have_a_certificate_of_their_own(compose: dict[str, Any], made: Path, name: str) -> None:
    settings = settings_of(compose, made, name)
    settings.check_listening()
    assert not settings.insecure_network
    role = Role(name.partition("-")[0])
    credentials = settings.credentials(role, name)
    assert credentials is not None
    assert credentials.identity == Identity(role, getattr(settings, "worker_id", name))


def test_certificates_of_make_secrets_are_as_those_of_coppice_certs(made: Path, tmp_path: Path) -> None:
    def extensions(path: Path) -> dict[str, object]:
        listed = x509.load_pem_x509_certificate(path.read_bytes()).extensions
        keys = (x509.SubjectKeyIdentifier, x509.AuthorityKeyIdentifier)  # of other keys
        return {one.oid.dotted_string: (one.critical, one.value) for one in listed if not isinstance(one.value, keys)}

    other = Authority(tmp_path)
    assert extensions(made / "tls" / "ca.pem") == extensions(tmp_path / "ca.pem")
    files = other.files("worker", "worker-cpu")
    assert extensions(made / "tls" / "worker-cpu" / "cert.pem") == extensions(files.certificate)
    assert identity_in((made / "tls" / "prometheus" / "cert.pem").read_bytes()) == Identity(Role.MONITOR, "prometheus")


def test_redis_has_a_certificate_that_opens_nothing(compose: dict[str, Any], made: Path) -> None:
    """It names the host of the URL, and nobody of ours."""
    certificate = (made / "tls" / "redis" / "cert.pem").read_bytes()
    with pytest.raises(NoIdentity):
        identity_in(certificate)
    names = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    address = urlsplit(compose["services"]["cache"]["environment"]["COPPICE_CACHE_REDIS_URL"])
    assert address.scheme == "rediss"
    assert names.value.get_values_for_type(x509.DNSName) == [address.hostname]


def test_a_certificate_that_was_removed_is_issued_again_in_its_place(tmp_path: Path) -> None:
    make_secrets(tmp_path)
    folder = tmp_path / "tls" / "cache"
    before, others = folder.stat().st_ino, (tmp_path / "tls" / "scheduler" / "cert.pem").read_bytes()
    first = (folder / "cert.pem").read_bytes()
    (folder / "cert.pem").unlink()
    make_secrets(tmp_path)
    assert (folder / "cert.pem").read_bytes() != first
    assert folder.stat().st_ino == before, "a mount shows the folder that it was given"
    assert sorted(path.name for path in folder.iterdir()) == ["ca.pem", "cert.pem", "key.pem"]
    assert (tmp_path / "tls" / "scheduler" / "cert.pem").read_bytes() == others
    Credentials(TlsFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem"), Role.CACHE, "cache")


def test_the_key_of_the_ca_is_its_owners_and_mounted_nowhere(compose: dict[str, Any], made: Path) -> None:
    assert (made / "tls" / "ca-key.pem").stat().st_mode & 0o077 == 0
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = Path(with_defaults(volume, made).split(":")[0])
            assert not (source / "ca-key.pem").exists()


@pytest.mark.parametrize("name", SERVICES)
def test_images_run_without_privileges_and_say_their_health(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    dockerfile = (ROOT / service["build"]["dockerfile"]).read_text()
    assert "\nUSER coppice\n" in dockerfile
    if name == "scheduler":
        port = SERVICES[name].model_fields["port"].default
        asked = f'CMD coppice health "http${{COPPICE_SCHEDULER_SSL_CERTFILE:+s}}://127.0.0.1:{port}"'
    else:
        port = SERVICES[name].model_fields["grpc_port"].default
        asked = f'CMD ["coppice", "health", "127.0.0.1:{port}"]'
    assert asked in dockerfile


def test_services_wait_for_what_they_need(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services["cache"]["depends_on"] == {"redis": {"condition": "service_healthy"}}
    for name in ("scheduler", "worker-cpu", "worker-gpu"):
        assert services[name]["depends_on"] == {"cache": {"condition": "service_healthy"}}
    assert services["worker-cpu"]["profiles"] == ["cpu"]
    assert services["worker-gpu"]["profiles"] == ["gpu"]
    devices = services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]


def test_nothing_is_published_beyond_loopback_by_default(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for port in service.get("ports", []):
            assert with_defaults(port).startswith("127.0.0.1:"), f"{name} publishes {port}"


def test_only_the_api_follows_the_published_address(compose: dict[str, Any]) -> None:
    """What asks for no credentials stays on the machine itself, whatever the environment says."""
    api = ("${COPPICE_BIND:-127.0.0.1}:8000:8000", "${COPPICE_BIND:-127.0.0.1}:7070:7070")
    for name, service in compose["services"].items():
        if name == "scheduler":
            assert tuple(service["ports"]) == (*api, "127.0.0.1:8073:8073")
            continue
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} publishes {port}"


def test_the_admin_rest_has_its_names_and_the_console_may_ask_the_api(compose: dict[str, Any], made: Path) -> None:
    cache, scheduler = (settings_of(compose, made, name) for name in ("cache", "scheduler"))
    assert (cache.http_names, cache.rest_url) == (("cache", "coppice.internal"), "http://127.0.0.1:8000")
    origins = {f"https://{name}:8071" for name in ("127.0.0.1", "localhost", "coppice.internal")}
    assert set(scheduler.cors_origins) == origins == set(scheduler.console_origins)


def reaches_builds(source: str) -> bool:
    """Whether a file or folder passes .dockerignore, whose last line that fits decides."""
    passes = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        above = [source, *map(str, PurePosixPath(source).parents)]
        if line and not line.startswith("#") and any(PurePosixPath(path).match(pattern) for path in above):
            passes = line.startswith("!")
    return passes


def test_images_get_what_they_copy() -> None:
    for dockerfile in (ROOT / "deploy" / "docker").glob("*.Dockerfile"):
        copied = re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile.read_text(), re.MULTILINE)
        assert copied
        for source in " ".join(copied).split():
            assert (ROOT / source).exists(), f"{dockerfile.name} copies {source}"
            assert reaches_builds(source), f".dockerignore hides {source} from {dockerfile.name}"


@pytest.mark.parametrize(
    "path",
    ["tools/coppice_sim/run.py", "tests", "demo", "benchmarks", ".git", ".venv", ".env"],
)
def test_what_no_image_needs_reaches_no_build(path: str) -> None:
    assert not reaches_builds(path)
    assert reaches_builds("shared/coppice/demo_model/config.json")


def test_each_profile_builds_the_worker_for_its_device(compose: dict[str, Any]) -> None:
    for name, torch in (("worker-cpu", "cpu"), ("worker-gpu", "cuda")):
        service = compose["services"][name]
        assert service["build"]["args"]["TORCH"] == torch
        assert service["environment"]["COPPICE_WORKER_DEVICE"] == torch


@pytest.mark.parametrize("name", SERVICES)
def test_services_write_to_their_state_and_nowhere_else(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    writable = [volume for volume in service["volumes"] if not volume.endswith(":ro")]
    folders = {"scheduler": [], "cache": ["/var/lib/coppice"]}.get(name, ["/var/lib/coppice", "/var/lib/coppice-disk"])
    assert [volume.split(":")[1] for volume in writable] == folders


def test_the_example_tenants_load() -> None:
    assert load_tenants(ROOT / "deploy" / "tenants.example.yaml").tenants


def test_prometheus_scrapes_ports_that_are_served(compose: dict[str, Any]) -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    http_port = CacheSettings.model_fields["http_port"].default
    assert jobs["cache"]["static_configs"] == [{"targets": [f"cache:{http_port}"]}]
    metrics_port = compose["services"]["scheduler"]["environment"]["COPPICE_SCHEDULER_METRICS_PORT"]
    assert jobs["scheduler"]["static_configs"] == [{"targets": [f"scheduler:{metrics_port}"]}]
    for name, job in jobs.items():
        role = Role.MONITOR if name == "canary" else Role(name)
        assert (job["scheme"], job["tls_config"]["server_name"]) == ("https", f"{role}.coppice.internal")
    assert jobs["worker"]["dns_sd_configs"][0]["port"] == WorkerSettings.model_fields["http_port"].default
    for name in ("worker-cpu", "worker-gpu"):
        assert (
            jobs["worker"]["dns_sd_configs"][0]["names"] == compose["services"][name]["networks"]["internal"]["aliases"]
        )


def test_the_console_is_told_where_the_operators_port_is_published(compose: dict[str, Any]) -> None:
    scheduler, cache = compose["services"]["scheduler"], compose["services"]["cache"]
    port = scheduler["environment"]["COPPICE_SCHEDULER_METRICS_PORT"]
    assert f"127.0.0.1:{port}:{port}" in scheduler["ports"]
    assert scheduler["environment"]["COPPICE_SCHEDULER_METRICS_HOST"] == "0.0.0.0"  # a name would be on one network
    assert scheduler["environment"]["COPPICE_TLS_CA"], "whoever has no certificate is told nothing"
    host = cache["environment"]["COPPICE_CACHE_HTTP_NAMES"].split(",")[-1]
    assert with_defaults(cache["environment"]["COPPICE_CACHE_REQUESTS_URL"]) == f"https://{host}:{port}"
    http_port = CacheSettings.model_fields["http_port"].default
    assert f"https://{host}:{http_port}" in scheduler["environment"]["COPPICE_SCHEDULER_CONSOLE_ORIGINS"].split(",")


def test_the_canary_audits_with_keys_of_its_own_and_is_scraped(
    compose: dict[str, Any], made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command is given to the command line as it is, with what is mounted where the container would have it."""
    service = compose["services"]["canary"]
    assert service["profiles"] == ["canary"]
    given: list[tuple[AuditOptions, WatchOptions]] = []
    monkeypatch.setattr("coppice_audit.watch.run_watch", lambda *options: given.append(options) or 0)
    command = [with_defaults(word).replace("/run/secrets", str(made / "secrets")) for word in service["command"]]
    tls = {
        name: value.replace("/etc/coppice/tls", f"{made}/tls/canary") for name, value in service["environment"].items()
    }
    done = CliRunner().invoke(app, ["audit", "isolation", *command], env=tls)
    assert done.exit_code == 0, done.output
    ((options, watching),) = given
    watching.check()
    assert watching.tls is not None
    assert Credentials(watching.tls).identity == Identity(Role.MONITOR, "canary")
    tenants = TenantDirectory.load(made / "tenants" / "tenants.yaml")
    owners = [tenants.authenticate(key, datetime.now(UTC)) for key in (options.victim_key, options.attacker_key)]
    assert [owner.id for owner in owners if owner] == ["canary-victim", "canary-attacker"]
    assert urlsplit(options.base_url).hostname == "scheduler"
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    (job,) = [job for job in config["scrape_configs"] if job["job_name"] == "canary"]
    assert [(found["names"], found["port"]) for found in job["dns_sd_configs"]] == [(["canary"], watching.metrics_port)]
    dockerfile = (ROOT / service["build"]["dockerfile"]).read_text()
    assert 'ENTRYPOINT ["coppice", "audit", "isolation"]' in dockerfile
    assert "\nUSER coppice\n" in dockerfile


def test_the_image_of_the_canary_has_all_that_it_imports() -> None:
    code = (
        "import sys, coppice_cli.app, coppice_cli.audit_commands, coppice_audit.run, coppice_audit.watch\n"
        "print(*{name.partition('.')[0] for name in sys.modules if name.startswith('coppice')})"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    dockerfile = (ROOT / "deploy" / "docker" / "canary.Dockerfile").read_text()
    copied = set(re.findall(r"coppice\w*", " ".join(re.findall(r"^COPY tools.*$", dockerfile, re.MULTILINE))))
    assert set(loaded) <= {"coppice", *copied}


def test_traces_go_from_services_through_the_collector_to_jaeger(compose: dict[str, Any]) -> None:
    config = yaml.safe_load((ROOT / "deploy" / "otel" / "collector.yaml").read_text())
    pipeline = config["service"]["pipelines"]["traces"]
    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) <= set(config[kind])
    assert config["exporters"]["otlp"]["endpoint"].split(":")[0] in compose["services"]


def has_compose_plugin() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("profile", ["cpu", "gpu", "canary"])
def test_docker_compose_accepts_the_file(made: Path, profile: str) -> None:
    if not has_compose_plugin():
        pytest.skip("docker compose is not installed here")
    command = ["docker", "compose", "-f", str(ROOT / "docker-compose.yml"), "--profile", profile, "config", "-q"]
    environment = {
        **os.environ,
        "COPPICE_SECRETS": str(made / "secrets"),
        "COPPICE_TENANTS": str(made / "tenants"),
        "COPPICE_CERTIFICATES": str(made / "tls"),
    }
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr


def test_promtool_accepts_the_scrape_configuration() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed here")
    file = ROOT / "deploy" / "prometheus" / "prometheus.yml"
    ended = subprocess.run(
        ["promtool", "check", "config", "--syntax-only", str(file)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
