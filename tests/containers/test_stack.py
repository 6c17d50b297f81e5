"""The images, and the stack of the compose file in containers: built, served, watched, killed, ended.

The tests run in the order of this file; the last ones end the stack.
"""

from __future__ import annotations

import os

import pytest

from coppice.tenants.keys import digest_of_key
from tests.containers.browser import operators_console
from tests.containers.stack import OURS, Stack, wait_for
from tests.e2e.console.browsing import chromium

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPANS = {
    ("coppice-scheduler", "chat coppice-demo"),
    ("coppice-scheduler", "prefill"),
    ("coppice-cache", "cache.acquire"),
    ("coppice-worker", "worker.prefill_chunk"),
    ("coppice-worker", "worker.decode"),
}
LONG = "What does sorted do? It takes a list and gives a new list. " * 4  # fills several blocks
SITE = "import pathlib, coppice; print(*sorted(p.name for p in pathlib.Path(coppice.__file__).parents[1].iterdir()))"
NO_CUDA = "import torch, ctypes.util; assert torch.version.cuda is None; print(torch.__version__)"


# ---- the images ----


@pytest.mark.parametrize("service", OURS)
def test_an_image_holds_its_service_and_nothing_beside_it(stack: Stack, service: str) -> None:
    packages = set(stack.in_container(service, "python", "-c", SITE).stdout.split())
    own = {"cache": "coppice_cache", "scheduler": "coppice_scheduler", "worker-cpu": "coppice_worker"}[service]
    assert {name for name in packages if name.startswith("coppice")} >= {"coppice", "coppice_rpc", own}
    ours = {"coppice_cache", "coppice_scheduler", "coppice_worker", "coppice_bench", "coppice_sim", "coppice_offline"}
    assert not packages & (ours - {own} | {"pip", "pytest", "tests", "demo", "benchmarks"})
    if service != "worker-cpu":
        assert "torch" not in packages
    found = stack.in_container(service, "sh", "-c", "find / -xdev -type d -path '*site-packages*' -name tests")
    assert found.stdout == ""


def test_the_cpu_worker_has_no_cuda_and_a_compiler(stack: Stack) -> None:
    assert stack.in_container("worker-cpu", "python", "-c", NO_CUDA).stdout.startswith("2.")
    packages = stack.in_container("worker-cpu", "python", "-c", SITE).stdout.split()
    assert not [name for name in packages if name.startswith(("nvidia", "triton", "cuda"))]
    log = stack.logs("worker-cpu")
    assert "instead of compiled kernels" not in log
    compiled = stack.in_container("worker-cpu", "sh", "-c", "ls ~/.cache/coppice/kernels/*.so")
    assert compiled.returncode == 0, "the native kernels were not compiled"


@pytest.mark.parametrize("service", ["cache", "scheduler"])
def test_cores_are_compiled_unless_asked_and_the_compiler_is_left_behind(stack: Stack, service: str) -> None:
    asked = os.environ.get("COPPICE_IMAGES_COMPILED", "yes")  # as docker-compose.yml has it
    assert f"core: {'source' if asked == 'no' else 'compiled'}" in stack.logs(service)
    assert stack.in_container(service, "test", "-e", "/opt/compiler").returncode == 1


@pytest.mark.parametrize("service", OURS)
def test_a_service_has_no_privileges_and_writes_nothing_but_its_state(stack: Stack, service: str) -> None:
    assert stack.in_container(service, "id", "-u").stdout.strip() == "10001"
    assert stack.in_container(service, "sh", "-c", "rm $(mktemp)").returncode == 0
    for folder in ("/opt/coppice", "/", "/etc"):
        refused = stack.in_container(service, "sh", "-c", f"echo > {folder}/x", user="root")
        assert "Read-only file system" in refused.stderr, folder


@pytest.mark.parametrize("service", [*OURS, "redis", "prometheus", "otel-collector"])
def test_no_container_has_capabilities_or_may_take_the_machine(stack: Stack, service: str) -> None:
    status = stack.in_container(service, "grep", "-E", "CapBnd|NoNewPrivs", "/proc/1/status", user="65534").stdout
    assert status.split() == ["CapBnd:", "0" * 16, "NoNewPrivs:", "1"]
    container = stack.container(service)
    limits = stack.engine.answer(
        "inspect",
        "--format",
        "{{.HostConfig.Memory}} {{.HostConfig.PidsLimit}} {{.HostConfig.ReadonlyRootfs}}",
        container,
    )
    memory, pids, is_read_only = limits.split()
    assert int(memory) >= 512 << 20
    assert 0 < int(pids) <= 4096
    assert is_read_only == "true"


def test_the_keys_are_in_no_environment(stack: Stack) -> None:
    for service in (*OURS, "redis"):
        listed = stack.engine.answer("inspect", "--format", "{{.Config.Env}} {{.Config.Cmd}}", stack.container(service))
        assert not [key for key in stack.secrets() if key in listed], service


def test_a_command_that_an_image_has_not_is_refused_in_a_line(stack: Stack) -> None:
    ended = stack.in_container("cache", "coppice", "bench", "index")
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "coppice_bench is not installed" in ended.stderr


# ---- the stack ----


def test_keys_of_the_example_tenants_decide(stack: Stack) -> None:
    status, answer = stack.chat("What does sorted do?")
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"]
    for key in ("example-key-nobody", None):
        status, answer = stack.chat("What does sorted do?", key)
        assert status == 401, answer
        assert "error" in answer


def test_who_is_on_the_network_in_front_finds_the_scheduler_and_nobody_else(stack: Stack) -> None:
    """Its metrics, which name tenants, are told to nobody without a certificate: the next test."""
    code = """
import socket
for host, port in (("scheduler", 8000), ("scheduler", 7070), ("scheduler", 8073), ("cache", 7081), ("redis", 6379),
                   ("cache", 8071), ("worker-cpu", 7082), ("prometheus", 9090)):
    try:
        socket.create_connection((host, port), timeout=5).close()
        print(host, port)
    except OSError:
        pass
"""
    assert stack.beside("front", code).stdout.splitlines() == ["scheduler 8000", "scheduler 7070", "scheduler 8073"]
    inside = stack.beside("internal", code).stdout.splitlines()
    assert {"cache 7081", "redis 6379", "scheduler 8073"} <= set(inside)


def test_who_is_inside_without_a_certificate_hears_nothing(stack: Stack) -> None:
    """Neither what is said in sessions, nor admin REST, nor metrics. A handshake without a certificate is no help."""
    code = """
import socket, ssl
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
for host, port in (("cache", 7081), ("cache", 7071), ("cache", 7073), ("cache", 8071), ("worker-cpu", 7082),
                   ("worker-cpu", 7072), ("worker-cpu", 8072), ("scheduler", 8073)):
    context.set_alpn_protocols(["h2"] if port in (7071, 7072, 7073) else [])
    for wrap in (lambda plain: plain, context.wrap_socket):
        try:
            with wrap(socket.create_connection((host, port), timeout=20)) as connection:
                connection.sendall(b"GET /metrics HTTP/1.1\\r\\nHost: cache\\r\\n\\r\\n")
                heard = connection.recv(65536)
        except OSError:
            heard = b""
        print(host, port, heard[:2] in (b"", b"\\x15\\x03"), heard[:20])
"""
    said = stack.beside("internal", code)
    assert [line.split()[2] for line in said.stdout.splitlines()] == ["True"] * 16, said.stdout + said.stderr
    in_front = stack.beside("front", code).stdout.splitlines()
    assert [line for line in in_front if line.startswith("scheduler ")] == ["scheduler 8073 True b''"] * 2, in_front


def test_redis_asks_for_its_password(stack: Stack) -> None:
    assert "NOPERM" in stack.redis_as("get", "coppice:cache_epoch")
    assert "NOPERM" in stack.redis("config", "get", "dir")
    assert stack.redis("exists", "coppice:cache_epoch").strip() == "1"


def test_a_tenants_file_that_is_replaced_counts_in_running_containers(stack: Stack) -> None:
    """As `coppice tenants` and editors do it: another file takes the name."""
    before = stack.tenants_file.read_text()
    new = stack.tenants_file.with_suffix(".new")
    new.write_text(f"{before}\n  - {{id: visitor, api_key_sha256: {digest_of_key('a-new-key')!r}}}\n")
    new.rename(stack.tenants_file)
    wait_for(lambda: stack.chat("Who are you?", "a-new-key")[0] == 200, "the new key is taken", 60)
    stack.tenants_file.write_text(before)
    wait_for(lambda: stack.chat("Who are you?", "a-new-key")[0] == 401, "the key is refused again", 60)


def test_a_repeated_beginning_comes_from_the_cache(stack: Stack) -> None:
    stack.cached_tokens(LONG)
    assert stack.cached_tokens(LONG) >= 48


def test_the_spans_of_a_chat_arrive(stack: Stack) -> None:
    status, answer = stack.chat("What is a dictionary?", traceparent=f"00-{TRACE_ID}-b7ad6b7169203331-01")
    assert status == 200, answer
    wait_for(lambda: stack.spans(TRACE_ID) >= SPANS, "spans of all three services", 60)


def test_an_operators_browser_shows_the_console(stack: Stack) -> None:
    """Through the published ports, with an operator's certificate: the map of the pool, and the requests."""
    assert stack.chat("What is a set?", **{"X-Request-Id": "seen-in-a-browser"})[0] == 200
    with chromium() as browser, operators_console(browser, stack.certificates / "operator") as shown:
        shown.open("blocks")
        shown.see("canvas")
        shown.open("requests", "seen-in-a-browser")
        shown.see(".waterfall .stage[data-kind=decode]")
        assert "orchard" in shown.text("dl.facts")


def test_a_browser_without_a_certificate_shows_nothing(stack: Stack) -> None:
    refused = pytest.raises(Exception, match="net::ERR_")
    with chromium() as browser, operators_console(browser, None) as shown, refused:
        shown.page.goto(shown.url)


def test_prometheus_scrapes_every_service(stack: Stack) -> None:
    wait_for(lambda: stack.targets() == {"cache": "up", "scheduler": "up", "worker": "up"}, "all targets are up", 60)

    def computed() -> float:
        return stack.query("sum(coppice_worker_tokens_computed_total)")

    before = computed()
    assert stack.chat("A question that nobody asked before, of some length, so that its tokens show.")[0] == 200
    wait_for(lambda: computed() > before, "the tokens of a chat are counted", 60)


def test_the_alert_rules_are_loaded_and_ring_when_they_should(stack: Stack) -> None:
    status, answer = stack.ask(9090, "/api/v1/rules")
    assert status == 200
    groups = {"tenants", "isolation", "trust", "first-token", "service", "canary"}
    assert {group["name"] for group in answer["data"]["groups"]} == groups
    assert {rule["health"] for group in answer["data"]["groups"] for rule in group["rules"]} <= {"ok", "unknown"}
    tested = stack.in_container(
        "prometheus", "promtool", "test", "rules", "/etc/prometheus/alerts.test.yml", user="65534"
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_the_boards_are_there(stack: Stack) -> None:
    if not stack.has_observers:
        pytest.skip("the image of Grafana cannot be had here")
    for uid in ("coppice", "coppice-tenants", "coppice-workers"):
        wait_for(lambda uid=uid: stack.ask(3000, f"/api/dashboards/uid/{uid}")[0] == 200, f"Grafana serves {uid}")


# ---- trouble ----


@pytest.mark.parametrize("service", [*OURS, "redis", "prometheus", "otel-collector"])
def test_a_killed_container_comes_back(stack: Stack, service: str) -> None:
    container = stack.container(service)
    before = stack.engine.process_of(container)
    epoch = stack.epoch()
    stack.engine.kill_9(container)
    wait_for(lambda: stack.engine.process_of(container) not in (0, before), f"{service} runs again")
    stack.wait_serving()
    if service == "cache":
        assert stack.epoch() > epoch
    if service == "prometheus":
        wait_for(lambda: stack.targets().get("cache") == "up", "Prometheus scrapes again")


def test_a_cache_that_is_killed_finds_its_prefixes_in_redis(stack: Stack) -> None:
    stack.cached_tokens(LONG)
    known = stack.cached_tokens(LONG)
    assert known >= 48
    kill_the_cache(stack)
    assert stack.cached_tokens(LONG) == known


def test_a_restart_of_redis_loses_nothing(stack: Stack) -> None:
    """Redis keeps nothing on its disk; the cache writes anew what it needs there, and the epoch goes on."""
    stack.cached_tokens(LONG)
    known = stack.cached_tokens(LONG)
    assert known >= 48
    epoch = stack.epoch()
    stack.compose("restart", "redis")
    stack.wait_healthy("redis")
    assert stack.cached_tokens(LONG) == known
    assert stack.epoch() == epoch
    kill_the_cache(stack)
    assert stack.cached_tokens(LONG) == known


def kill_the_cache(stack: Stack) -> None:
    """Once Redis has all that it knows; it comes back with a higher epoch."""
    stack.wait_recoverable()
    epoch = stack.epoch()
    stack.engine.kill_9(stack.container("cache"))
    wait_for(lambda: stack.epoch() > epoch, "the cache serves with a higher epoch")
    stack.wait_serving()


# ---- the end ----


def test_down_leaves_state_and_up_goes_on_with_it(stack: Stack) -> None:
    epoch = stack.epoch()
    stack.compose("down")
    left = stack.left()
    assert left["containers"] == []
    kept = ["cache-state", "metrics", "worker-disk", "worker-kernels"]
    assert [name.rpartition("_")[2] for name in left["volumes"]] == kept
    stack.up()
    stack.wait_serving()
    assert stack.epoch() > epoch


def test_down_with_volumes_leaves_nothing(stack: Stack) -> None:
    assert stack.left()["containers"]
    stack.compose("down", "-v")
    assert stack.left() == {"containers": [], "volumes": [], "networks": []}
