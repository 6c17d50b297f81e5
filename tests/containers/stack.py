"""The compose file's stack under a name and an address of its own: built, started, asked, broken, ended."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from coppice.tls.credentials import Credentials, TlsFiles
from tests.containers.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "coppice-test"
KEY = "example-key-orchard"  # of deploy/tenants.example.yaml
BUILD_S = 1500.0
COMPOSE_S = 300.0
READY_S = 180.0
# Another loopback address than 127.0.0.1: that the API follows it is seen by that.
BIND = "127.0.0.77" if sys.platform == "linux" else "127.0.0.1"
ADMIN_PORT = 8071
REQUESTS_PORT = 8073
API_PORTS = (8000, 7070)  # the others are published on 127.0.0.1, whatever is asked for
OURS = ("cache", "scheduler", "worker-cpu")
OBSERVERS = ("otel-collector", "jaeger", "grafana")
MAKE_SECRETS = ROOT / "deploy" / "make-secrets"
STAND_INS = ROOT / "tests" / "containers" / "stand-ins.yml"
T = TypeVar("T")


def wait_for(look: Callable[[], T], what: str, timeout_s: float = READY_S) -> T:
    """The first true answer of `look`; a look may start a process, so there are few a second."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline_s, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.25)


class Stack:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
        # All three or none: the collector hands traces on to Jaeger.
        self.has_observers = all(engine.has_or_gets(services[name]["image"]) for name in OBSERVERS)
        self.services = ["redis", *OURS, "prometheus", *(OBSERVERS if self.has_observers else ("otel-collector",))]
        files = [ROOT / "docker-compose.yml", *([] if self.has_observers else [STAND_INS])]
        self._flags = [*[word for file in files for word in ("-f", str(file))], "-p", PROJECT, "--profile", "cpu"]
        self._made = Path(tempfile.mkdtemp(prefix="coppice-test-"))
        environment = {**os.environ, "ENV_FILE": str(self._made / ".env")}
        subprocess.run([MAKE_SECRETS, self._made], env=environment, check=True, capture_output=True)
        self.tenants_file = self._made / "tenants" / "tenants.yaml"
        self.tenants_file.write_bytes((ROOT / "deploy" / "tenants.example.yaml").read_bytes())
        self.certificates = self._made / "tls"
        # Named one by one, so that a user's .env is not read for them.
        self._environment = {
            **os.environ,
            "COPPICE_SECRETS": str(self._made / "secrets"),
            "COPPICE_TENANTS": str(self.tenants_file.parent),
            "COPPICE_CERTIFICATES": str(self.certificates),
            "COPPICE_REQUESTS_URL": f"https://127.0.0.1:{REQUESTS_PORT}",  # `coppice.internal` is in no hosts file here
            "COPPICE_MODEL_DIR": "./shared/coppice/demo_model",
            "COPPICE_MODEL_NAME": "coppice-demo",
            "COPPICE_HOST_MEMORY_MIB": "0",
            "COPPICE_BIND": BIND,
        }

    # ---- the engine ----

    def compose(self, *args: str, timeout_s: float = COMPOSE_S) -> str:
        """Output of both kinds. Fails with it."""
        flags = self.engine.build_flags if args[0] == "build" else ()
        command = [*self.engine.compose, *flags, *self._flags, *args]
        done = subprocess.run(
            command, cwd=ROOT, env=self._environment, capture_output=True, text=True, check=False, timeout=timeout_s
        )
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"{' '.join(args)} ended with {done.returncode}\n{output[-6000:]}"
        return output

    def build(self) -> None:
        self.compose("build", "cache", timeout_s=BUILD_S)
        # What follows begins alike; the stand-in for the collector is the same image.
        others = ["scheduler", "worker-cpu", *([] if self.has_observers else ["otel-collector"])]
        self.compose("build", *others, timeout_s=BUILD_S)

    def up(self) -> None:
        self.compose("up", "-d", "--no-build", *self.services)

    def remove(self) -> None:
        """Everything of it, also what it was started with."""
        self.compose("down", "-v")
        shutil.rmtree(self._made)

    def beside(self, network: str, code: str) -> subprocess.CompletedProcess[str]:
        """Python that runs in a container of its own on one of the networks."""
        image = self.engine.answer("inspect", "--format", "{{.Image}}", self.container("cache"))
        flags = ("--rm", "--network", f"{PROJECT}_{network}", "--entrypoint", "python")
        return self.engine.run("run", *flags, image, "-c", code)

    def container(self, service: str) -> str:
        """Its id; it keeps it over restarts."""
        found = self._list("ps", "-a", "-q", "--no-trunc", "--filter", f"label=com.docker.compose.service={service}")
        assert len(found) == 1, f"containers of {service}: {found}"
        return found[0]

    def left(self) -> dict[str, list[str]]:
        """Names of everything of this project that is there."""
        return {
            "containers": self._list("ps", "-a", "--format", "{{.Names}}"),
            "volumes": sorted(self._list("volume", "ls", "-q")),
            "networks": self._list("network", "ls", "--format", "{{.Name}}"),
        }

    def _list(self, *command: str) -> list[str]:
        return self.engine.answer(*command, "--filter", f"label=com.docker.compose.project={PROJECT}").split()

    def logs(self, service: str) -> str:
        done = self.engine.run("logs", self.container(service))
        return done.stdout + done.stderr

    def in_container(self, service: str, *command: str, user: str = "coppice") -> subprocess.CompletedProcess[str]:
        return self.engine.run("exec", "--user", user, self.container(service), *command)

    def wait_healthy(self, *services: str) -> None:
        for service in services:
            wait_for(partial(self.engine.is_healthy, self.container(service)), f"{service} is healthy")

    def wait_serving(self) -> None:
        """Healthy, and one request is answered."""
        self.wait_healthy("redis", *OURS)
        wait_for(lambda: self.chat("Are you there?")[0] == 200, "a chat is answered")

    def log_if_any(self, service: str) -> str:
        try:
            return self.logs(service)
        except AssertionError:
            return "there is no container"

    def wait_recoverable(self) -> None:
        """Everything that is cached now lies in Redis, too."""

        def is_logged() -> bool:
            listed = self.redis("--scan", "--pattern", "coppice:index:*").split()
            lines = str(self.ask(ADMIN_PORT, "/metrics")[1]).splitlines()
            return bool(listed) and "coppice_cache_recovery_log_lag_events 0.0" in lines

        wait_for(is_logged, "the recovery log is whole")

    def secrets(self) -> list[str]:
        return [(self._made / "secrets" / name).read_text().strip() for name in ("seal_key", "redis_password")]

    def operator(self) -> Credentials:
        """With which the cache's admin REST is asked."""
        folder = self.certificates / "operator"
        return Credentials(TlsFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem"))

    def redis(self, *words: str) -> str:
        """What Redis says to the cache's user."""
        return self.redis_as("--user", "coppice", "--no-auth-warning", "--pass", self.secrets()[1], *words)

    def redis_as(self, *words: str) -> str:
        """What Redis says to whoever these flags name, over TLS."""
        cli = ("redis-cli", "--tls", "--cacert", "/etc/coppice/tls/ca.pem")
        return self.in_container("redis", *cli, *words, user="999").stdout

    # ---- asking ----

    def chat(self, text: str, key: str | None = KEY, **headers: str) -> tuple[int, Any]:
        """Status and body of a short greedy chat."""
        body = {
            "model": "coppice-demo",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 8,
            "temperature": 0,
        }
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        return self.ask(8000, "/v1/chat/completions", body, **headers)

    def cached_tokens(self, text: str) -> int:
        status, answer = self.chat(text)
        assert status == 200, answer
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    def epoch(self) -> int:
        """Of the cache service; 0 while it does not answer."""
        status, stats = self.ask(ADMIN_PORT, "/v1/stats")
        return int(stats["cache_epoch"]) if status == 200 else 0

    def spans(self, client_trace_id: str) -> set[tuple[str, str]]:
        """Service and name of each span that has arrived where traces go, of calls that came with a client's trace."""
        if not self.has_observers:
            lines = [json.loads(line) for line in self.logs("otel-collector").splitlines() if line.startswith("{")]
            ours = {line["trace_id"] for line in lines if line["client"] == client_trace_id}
            return {(line["service"], line["name"]) for line in lines if line["trace_id"] in ours}
        tags = urllib.parse.quote(json.dumps({"coppice.client.trace_id": client_trace_id}))
        status, answer = self.ask(16686, f"/api/traces?service=coppice-scheduler&tags={tags}")
        if status != 200 or not answer["data"]:
            return set()
        trace = answer["data"][0]
        services = {name: process["serviceName"] for name, process in trace["processes"].items()}
        return {(services[span["processID"]], span["operationName"]) for span in trace["spans"]}

    def targets(self) -> dict[str, str]:
        """Health of what Prometheus scrapes, by job."""
        status, answer = self.ask(9090, "/api/v1/targets?state=active")
        if status != 200:
            return {}
        return {target["labels"]["job"]: target["health"] for target in answer["data"]["activeTargets"]}

    def query(self, expression: str) -> float:
        """The one value of an expression; 0 where there is none yet."""
        status, answer = self.ask(9090, f"/api/v1/query?query={urllib.parse.quote(expression)}")
        assert status == 200, answer
        result = answer["data"]["result"]
        return float(result[0]["value"][1]) if result else 0.0

    def ask(self, port: int, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and parsed body (text where it is no JSON); 0 where nobody answers."""
        raw = None if body is None else json.dumps(body).encode()
        is_admin = port == ADMIN_PORT
        url = f"http{'s' if is_admin else ''}://{BIND if port in API_PORTS else '127.0.0.1'}:{port}{path}"
        request = urllib.request.Request(url, raw, {"Content-Type": "application/json", **headers})
        try:
            context = self.operator().client_context() if is_admin else None
            with urllib.request.urlopen(request, timeout=60, context=context) as response:
                return response.status, _parsed(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _parsed(error.read())
        except (OSError, http.client.HTTPException):
            return 0, None


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")
