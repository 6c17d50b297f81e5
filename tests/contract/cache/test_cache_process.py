"""The cache service as a process: flags, exit codes, signals, its epoch over restarts, Redis that comes and goes."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from coppice.edge.grpc_server import GrpcServer
from coppice.errors import CoppiceError, UsageError
from coppice.ids import CacheEpoch
from coppice.session.vouchers import Vouchers
from coppice_cache import __main__ as main_module
from coppice_cache.edge.durability import registry
from coppice_cache.edge.durability.epochs import EPOCH_KEY, EpochFile, EpochInRedis, next_epoch
from coppice_cache.edge.durability.registry import WORKERS_KEY, connect
from tests.fakes.cache.cache_ends import SEAL_KEY, Cache, FakeWorker, StreamClient, UnaryClient, prompt
from tests.fakes.ports import valkey_server
from tests.fakes.waiting import wait_for

Keep = Callable[[Any], Any]
START_S = 60


@dataclass(frozen=True)
class Ended:
    code: int
    lines: list[str]  # of stderr


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """`main` with these flags and variables, in this process, without taking over its signals and logs."""
    monkeypatch.setattr(main_module, "configure_logging", lambda level, log_format: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(main_module, "allow_open_files", lambda: 0)

    def run_main(*flags: str, **variables: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["coppice_cache", *flags])
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        try:
            code = main_module.main()
        except SystemExit as ended:
            code = int(str(ended.code))
        return Ended(code, capsys.readouterr().err.splitlines())

    return run_main


WRONG: dict[str, tuple[list[str], dict[str, str], str]] = {
    "a misspelt flag": (["--grcp-port", "1"], {}, "did you mean --grpc-port?"),
    "a misspelt variable": ([], {"COPPICE_CACHE_HTPP_PORT": "1"}, "did you mean COPPICE_CACHE_HTTP_PORT?"),
    "a seal key that is no hex": ([], {"COPPICE_SEAL_KEY": "secret"}, "COPPICE_SEAL_KEY: must be hexadecimal"),
    "a seal key of before that is short": (
        [],
        {"COPPICE_SEAL_KEY": "ab" * 32 + ",cd"},
        "COPPICE_SEAL_KEY: has 1 bytes",
    ),
    "a seal key twice": ([], {"COPPICE_SEAL_KEY": f"{'ab' * 32},{'ab' * 32}"}, "COPPICE_SEAL_KEY: names a key twice"),
    "a seal key that is too short": ([], {"COPPICE_SEAL_KEY": "abcd"}, "has 2 bytes; it must have 16 to 64"),
    "no such tenants file": (["--tenants", "missing.yaml"], {}, "missing.yaml"),
    "a heartbeat above the time to live": (["--session-ttl-ms", "500"], {}, "heartbeat_ms"),
    "a Redis URL of another kind": (["--redis-url", "http://x"], {}, "--redis-url"),
}


@pytest.mark.parametrize(("flags", "variables", "named"), WRONG.values(), ids=WRONG)
def test_wrong_settings_end_with_2_and_one_line(
    run: Callable[..., Ended], flags: list[str], variables: dict[str, str], named: str
) -> None:
    ended = run("--grpc-port", "0", "--admin-grpc-port", "0", "--http-port", "0", *flags, **variables)
    assert ended.code == 2
    assert len(ended.lines) == 1
    assert named in ended.lines[0]
    assert "secret" not in ended.lines[0]


@pytest.mark.parametrize("flag", ["--grpc-port", "--admin-grpc-port", "--http-port"])
def test_a_port_in_use_ends_with_1_and_uses_up_no_epoch(run: Callable[..., Ended], flag: str, tmp_path: Path) -> None:
    file = tmp_path / "epoch"
    if flag != "--http-port":
        taken = GrpcServer("127.0.0.1:0", (), None, "taken")
        taken.start()
        port, free = taken.port, lambda: taken.stop(0)
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        port, free = listener.getsockname()[1], listener.close
    flags = ("--grpc-port", "--admin-grpc-port", "--session-port", "--http-port")
    ports = dict.fromkeys(flags, "0") | {flag: str(port)}
    ended = run(*[word for pair in ports.items() for word in pair], "--epoch-file", str(file))
    free()
    assert ended.code == 1
    assert len(ended.lines) == 1
    assert str(port) in ended.lines[0]
    assert f"choose another {flag}" in ended.lines[0]
    assert not file.exists()


def test_the_module_exits_with_the_code_of_main() -> None:
    command = [sys.executable, "-m", "coppice_cache", "--grcp-port", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1


def wait_until_it_listens(process: subprocess.Popen[bytes], log: Path) -> None:
    wait_for(lambda: "gRPC on" in log.read_text() or process.poll() is not None, "the service listens", START_S)
    assert process.poll() is None, log.read_text()


def test_a_signal_ends_the_process_in_order_with_0(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ports = [part for name in ("grpc", "admin-grpc", "http", "session") for part in (f"--{name}-port", "0")]
    command = [sys.executable, "-m", "coppice_cache", *ports]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stderr=sink)
    try:
        wait_until_it_listens(process, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=START_S) == 0
    finally:
        process.kill()
    text = log.read_text()
    assert "COPPICE_SEAL_KEY is not set" in text
    assert text.index("gRPC on") < text.index("stopping")
    assert "Traceback" not in text


LOWERED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
sys.argv = ["coppice_cache", "--grpc-port", "0", "--admin-grpc-port", "0", "--session-port", "0", "--http-port", "0"]
runpy.run_module("coppice_cache", run_name="__main__")
"""


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="another process's limits are told on Linux alone")
def test_the_process_raises_its_limit_of_open_files(tmp_path: Path) -> None:
    """A session keeps three of them, and there may be more sessions than a shell's limit leaves room for."""
    log = tmp_path / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen([sys.executable, "-c", LOWERED], stderr=sink)
    try:
        wait_until_it_listens(process, log)
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert soft == hard
    finally:
        process.kill()
        process.wait(timeout=START_S)


# ---- the epoch ----


def test_the_file_makes_epochs_grow(tmp_path: Path) -> None:
    file = EpochFile(tmp_path / "deep" / "epoch")
    assert [next_epoch(file, None) for _ in range(3)] == [1, 2, 3]
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["epoch"]


@pytest.mark.parametrize("content", ["", "abc", "-4", "3.5", "99999999999"])
def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path, content: str) -> None:
    path = tmp_path / "epoch"
    path.write_text(content)
    with pytest.raises(UsageError, match="epoch"):
        next_epoch(EpochFile(path), None)
    assert path.read_text() == content


def test_a_file_of_a_later_build_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "epoch"
    path.write_text("v2 7 of another kind")
    with pytest.raises(UsageError, match="has version 2, this build reads version 1"):
        next_epoch(EpochFile(path), None)
    assert path.read_text() == "v2 7 of another kind"


def test_the_last_epoch_is_said(tmp_path: Path) -> None:
    path = tmp_path / "epoch"
    path.write_text("4294967295")
    with pytest.raises(CoppiceError, match="4294967295, the last one"):
        next_epoch(EpochFile(path), None)


# ---- Redis ----


REDIS_IMAGE = "redis:7.4.2-alpine"  # the compose file's


def redis_in_a_container() -> Iterator[str]:
    docker = pytest.importorskip("docker")
    try:
        docker.from_env().ping()
    except docker.errors.DockerException:
        if "DOCKER_HOST" in os.environ:
            raise  # there is one, by somebody's word
        pytest.skip("no Docker engine here; the same tests run against an embedded Valkey")
    container_module = pytest.importorskip("testcontainers.core.container")
    with container_module.DockerContainer(REDIS_IMAGE).with_exposed_ports(6379) as container:
        url = f"redis://{container.get_container_host_ip()}:{container.get_exposed_port(6379)}/0"

        def answers() -> bool:
            try:
                return bool(connect(url).ping())
            except redis.RedisError:
                return False

        wait_for(answers, "Redis in its container")
        yield url


@pytest.fixture(scope="module", params=["embedded", "container"])
def valkey(request: pytest.FixtureRequest) -> Iterator[str]:
    """A real server: Valkey out of a wheel, and Redis 7 where there is a Docker engine."""
    if request.param == "container":
        yield from redis_in_a_container()
        return
    with valkey_server() as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@pytest.fixture
def client(valkey: str) -> Iterator[redis.Redis]:
    with connect(valkey) as opened:
        opened.flushall()
        yield opened


@pytest.fixture(autouse=True)
def _refresh_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REFRESH_S", 0.05)


def test_redis_makes_epochs_grow(client: redis.Redis, tmp_path: Path) -> None:
    stored = EpochInRedis(client, Vouchers(bytes.fromhex(SEAL_KEY)))
    assert [next_epoch(None, stored) for _ in range(3)] == [1, 2, 3]
    file = EpochFile(tmp_path / "epoch")
    file.write(10)
    assert next_epoch(file, stored) == 11, "the file knows of a higher one"
    file.write(2)
    assert next_epoch(file, stored) == 12, "Redis knows of a higher one"
    assert file.read() == 12
    client.set(EPOCH_KEY, "garbage")
    assert next_epoch(file, stored) == 13, "what is no number is no memory"


@pytest.mark.parametrize("forged", ["65534", "65534 " + "0" * 32, "4294967295 " + "f" * 32, "x" * 1000, "-5 00"])
def test_what_nobody_vouches_for_in_redis_is_ignored(client: redis.Redis, tmp_path: Path, forged: str) -> None:
    stored = EpochInRedis(client, Vouchers(bytes.fromhex(SEAL_KEY)))
    file = EpochFile(tmp_path / "epoch")
    file.write(10)
    client.set(EPOCH_KEY, forged)
    assert next_epoch(file, stored) == 11
    assert stored.num_disbelieved == 1
    assert next_epoch(None, stored) == 12, "what stands there now is ours"
    assert stored.num_disbelieved == 1


def test_what_a_later_build_left_in_redis_is_not_misread(
    client: redis.Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = EpochInRedis(client, Vouchers(bytes.fromhex(SEAL_KEY)))
    file = EpochFile(tmp_path / "epoch")
    file.write(10)
    client.set(EPOCH_KEY, "v2 40 and more")
    assert next_epoch(file, stored) == 11
    assert f"{EPOCH_KEY} in Redis has version 2, this build reads version 1" in caplog.text


def test_another_seal_key_does_not_go_on_from_what_is_in_redis(client: redis.Redis) -> None:
    first, other = (EpochInRedis(client, Vouchers(key * 16)) for key in (b"a", b"b"))
    assert [next_epoch(None, first), next_epoch(None, first), next_epoch(None, other)] == [1, 2, 1]


def test_epochs_grow_over_restarts_of_the_service(valkey: str, client: redis.Redis, keep: Keep) -> None:
    cache = keep(Cache(redis_url=valkey))
    epochs = [cache.stats()["cache_epoch"]]
    for _ in range(2):
        cache.restart()
        epochs.append(cache.stats()["cache_epoch"])
    assert epochs == [1, 2, 3]


def test_people_find_the_workers_in_redis(valkey: str, client: redis.Redis, keep: Keep) -> None:
    cache = keep(Cache(redis_url=valkey))
    worker = keep(FakeWorker(cache)).wait_registered()
    found = wait_for(lambda: client.hgetall(WORKERS_KEY), "the worker in the registry")
    described = json.loads(found["w"])
    assert (described["worker_epoch"], described["address"], described["num_blocks"]) == (
        worker.epoch,
        "127.0.0.1:9",
        16,
    )
    assert 0 < int(str(client.ttl(WORKERS_KEY))) <= registry.TTL_S
    assert cache.rest("/readyz") == (200, {"status": "ready", "reasons": []})


def test_redis_learns_an_epoch_that_workers_repaired(valkey: str, client: redis.Redis, keep: Keep) -> None:
    cache = keep(Cache(redis_url=valkey))
    worker = keep(FakeWorker(cache)).wait_registered()
    vouchers = Vouchers(bytes.fromhex(SEAL_KEY))
    worker.was_registered_by(40)
    worker.post(worker.register_message())
    repaired = f"41 {vouchers.of_stored(CacheEpoch(41)).hex()}"
    wait_for(lambda: client.get(EPOCH_KEY) == repaired, "Redis remembers the repaired epoch")


def test_without_redis_the_service_serves_and_says_degraded(keep: Keep, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        cache = keep(
            Cache(redis_url=f"redis://127.0.0.1:{unused.getsockname()[1]}/0", epoch_file=str(tmp_path / "epoch"))
        )
        keep(FakeWorker(cache)).wait_registered()
        client = keep(UnaryClient(cache))
        assert client.acquire(1, prompt(9)).WhichOneof("answer") == "grant"
        status, body = cache.rest("/readyz")
        assert (status, body["status"]) == (200, "degraded")
        assert "redis is not reachable" in body["reasons"][0]
        assert "coppice_cache_degraded 1.0" in cache.rest("/metrics")[1]
        cache.restart()
        assert cache.stats()["cache_epoch"] == 2, "the file remembers"


def test_redis_that_dies_and_comes_back(keep: Keep) -> None:
    server = valkey_server()
    server.start()
    port = server.port
    cache = keep(Cache(redis_url=f"redis://127.0.0.1:{port}/0"))
    keep(FakeWorker(cache)).wait_registered()
    client = keep(StreamClient(cache))
    assert cache.rest("/readyz")[1]["status"] == "ready"
    server.stop()
    wait_for(lambda: cache.rest("/readyz")[1]["status"] == "degraded", "the loss shows")
    assert client.ask(client.acquire(1, prompt(9)))
    again = keep(valkey_server(port=port))
    again.start()
    wait_for(lambda: cache.rest("/readyz")[1]["status"] == "ready", "Redis is used again")
    opened = keep(connect(f"redis://127.0.0.1:{port}/0"))
    assert str(opened.get(EPOCH_KEY)).startswith("1 "), "a Redis that lost everything is told the epoch"


def test_redis_that_hangs_delays_no_answer(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and never answers. Serving goes on while the registry's thread waits for it."""
    monkeypatch.setattr(registry, "TIMEOUT_S", 0.2)
    silent = keep(socket.create_server(("127.0.0.1", 0)))
    cache = keep(Cache(redis_url=f"redis://127.0.0.1:{silent.getsockname()[1]}/0"))
    keep(FakeWorker(cache)).wait_registered()
    client = keep(StreamClient(cache))
    for number in range(1, 30):
        client.ask(client.acquire(number, prompt(2)))
    assert cache.rest("/readyz")[1]["status"] == "degraded"
