"""Options of `coppice up`, what they become, and what a newcomer is told."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from coppice import __version__
from coppice.addresses import UNIX_PATH_BYTES_MAX, Address, UnixAddress, parse_address
from coppice.errors import EXIT_OK, CoppiceError, UnavailableError, UsageError
from coppice_cli import main
from coppice_cli.up import welcome
from coppice_up.checkpoint import DEMO_MODEL_NAME, Checkpoint, find_checkpoint
from coppice_up.local_host import check_redis, local_places, private_socket_dir
from coppice_up.options import WORKERS_MAX, WORKERS_ON_RAY_MAX, UpOptions
from coppice_up.plan import MovedPort, Services, StackPlan, needs_of, plan_stack
from coppice_up.ports import PortClaims, free_addresses
from tests.fakes.ports import free_port

SOCKET_DIR = Path("/run/coppice")
SERVICES = Services(cache=("cache",), worker=("worker",), scheduler=("scheduler",))


def plan(tmp_path: Path, options: UpOptions, **environ: str) -> StackPlan:
    claims = PortClaims()
    try:
        places = local_places(needs_of(options), tmp_path, SOCKET_DIR, Checkpoint(tmp_path, "m"), claims)
    finally:
        claims.close()
    return plan_stack(options, places, environ, SERVICES)


def flag(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (UpOptions(dtype="int8"), "--dtype int8"),
        (UpOptions(kv_dtype="int4"), "--kv-dtype int4"),
        (UpOptions(device="tpu"), "--device tpu"),
        (UpOptions(gpu_memory_utilization=1.5), "--gpu-memory-utilization 1.5"),
        (UpOptions(workers=0), "--workers 0"),
        (UpOptions(workers=99), "--workers 99"),
        (UpOptions(block_size=0), "--block-size 0"),
        (UpOptions(num_blocks=-1), "--num-blocks -1"),
        (UpOptions(threads=-3), "--threads -3"),
        (UpOptions(host_memory_mib=-1), "--host-memory-mib -1"),
        (UpOptions(disk_mib=-1), "--disk-mib -1"),
        (UpOptions(disk_mib=5, host_memory_mib=5), "--disk-folder and --disk-mib belong together"),
        (UpOptions(disk_folder=Path("d"), host_memory_mib=5), "--disk-folder and --disk-mib belong together"),
        (UpOptions(disk_folder=Path("d"), disk_mib=5), "--disk-mib without --host-memory-mib"),
        (UpOptions(disk_folder=Path("d"), disk_mib=5, host_memory_mib=5), "--disk-folder d is not there"),
        (
            UpOptions(disk_folder=Path("d"), disk_mib=5, host_memory_mib=5, tensor_parallel=2),
            "a model that 2 processes share has no disk tier",
        ),
        (UpOptions(max_queued_tokens=-1), "--max-queued-tokens -1"),
        (UpOptions(port=70000), "--port 70000"),
        (UpOptions(grpc_port=-1), "--grpc-port -1"),
        (UpOptions(port=9000, grpc_port=9000), "--port and --grpc-port are both 9000"),
        (UpOptions(cache_admin_port=9000, operator_port=9000), "--cache-admin-port and --operator-port are both 9000"),
        (UpOptions(port=9001, workers=2, worker_http_port=9000), "--port and --worker-http-port are both 9001"),
        (UpOptions(workers=3, worker_grpc_port=65534), "the last of 3 workers has 65536"),
        (UpOptions(host="0.0.0.0"), "everybody who reaches it may use it"),
        (UpOptions(host="no.such.host.invalid"), "--host no.such.host.invalid"),
        (UpOptions(tenants=Path("no-such-tenants.yaml")), "no-such-tenants.yaml"),
        (UpOptions(ssl_certfile=Path("cert.pem")), "--ssl-certfile and --ssl-keyfile belong together"),
    ],
)
def test_what_cannot_work_is_refused(options: UpOptions, words: str) -> None:
    with pytest.raises(CoppiceError) as caught:
        options.check()
    assert words in caught.value.line()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_loopback_needs_no_tenants(host: str) -> None:
    UpOptions(host=host).check()


def test_a_certificate_for_clients_goes_to_the_scheduler_alone(tmp_path: Path) -> None:
    plain = plan(tmp_path, UpOptions(port=8443))
    tls = plan(tmp_path, UpOptions(port=8443, ssl_certfile=Path("c.pem"), ssl_keyfile=Path("k.pem")))
    assert (plain.rest_url, tls.rest_url) == ("http://127.0.0.1:8443", "https://127.0.0.1:8443")
    *others, scheduler = [child.argv for stage in tls.stages for child in stage]
    assert flag(scheduler, "--ssl-certfile") == str(Path("c.pem").resolve())
    assert flag(scheduler, "--ssl-keyfile") == str(Path("k.pem").resolve())
    assert not [word for argv in others for word in argv if "ssl" in word]


def test_children_start_in_order_and_know_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    stack = plan(
        tmp_path,
        UpOptions(
            port=0,
            workers=2,
            num_blocks=64,
            host_memory_mib=7,
            disk_folder=folder,
            disk_mib=9,
            kv_dtype="fp8",
            otlp_endpoint="http://c:4317",
            max_queued_tokens=9,
        ),
    )
    names = [[spec.name for spec in stage] for stage in stack.stages]
    assert names == [["valkey"], ["cache"], ["worker-0", "worker-1", "scheduler"]]
    (valkey,), (cache,), (first, second, scheduler) = stack.stages
    assert {flag(child.argv, "--cache") for child in (first, second, scheduler)} == {"unix:/run/coppice/cache"}
    sessions = [flag(child.argv, "--session-address") for child in (cache, first, second)]
    assert sessions == [f"unix:/run/coppice/{name}" for name in ("cache", "worker-0", "worker-1")]
    assert not [child.name for child in (cache, first, second) if "--session-port" in child.argv]
    assert flag(cache.argv, "--redis-url") == f"redis://127.0.0.1:{flag(valkey.argv, '--port')}/0"
    assert flag(first.argv, "--num-blocks") == "64"
    assert flag(first.argv, "--host-memory-mib") == "7"
    assert [flag(child.argv, "--disk-mib") for child in (first, second)] == ["9", "9"]
    folders = [flag(child.argv, "--disk-folder") for child in (first, second)]
    assert folders == [str(tmp_path / "disk")] * 2, "each makes one of its own there"
    assert flag(first.argv, "--kv-dtype") == "fp8"
    assert flag(scheduler.argv, "--max-queued-tokens") == "9"
    assert flag(scheduler.argv, "--model-name") == flag(first.argv, "--model-name") == "m"
    assert {flag(c.argv, "--otlp-endpoint") for c in (cache, first, second, scheduler)} == {"http://c:4317"}
    assert [child.role for child in (valkey, cache, first, second, scheduler)] == ["", "", "worker", "worker", ""]
    for child in (first, second, scheduler):
        assert child.stop_grace_s > float(flag(child.argv, "--drain-s")), "what runs has to end before it is killed"
    assert scheduler.stop_turn < first.stop_turn == second.stop_turn < cache.stop_turn
    ports = [flag(c.argv, f) for c in (cache, first, second) for f in ("--grpc-port", "--http-port")]
    ports += [
        flag(cache.argv, "--admin-grpc-port"),
        flag(scheduler.argv, "--port"),
        flag(scheduler.argv, "--grpc-port"),
    ]
    assert len(set(ports)) == len(ports)


def test_the_console_finds_the_scheduler_and_may_read_its_answers(tmp_path: Path) -> None:
    for options, scheme in ((UpOptions(port=8000), "http"), (UpOptions(port=8000, certs=tmp_path), "https")):
        stack = plan(tmp_path, options)
        cache, _, scheduler = (spec.argv for stage in stack.stages[1:] for spec in stage)
        assert flag(cache, "--requests-url") == f"{scheme}://127.0.0.1:{flag(scheduler, '--metrics-port')}"
        assert flag(cache, "--rest-url") == stack.rest_url
        port = flag(cache, "--http-port")
        origins = f"{scheme}://127.0.0.1:{port},{scheme}://localhost:{port}"
        assert flag(scheduler, "--cors-origins") == flag(scheduler, "--console-origins") == origins
        assert [line for line in welcome(stack, options) if f"{scheme}://127.0.0.1:{port}/ (in a browser" in line]


def test_sockets_have_a_short_path_whatever_the_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for parent in (tmp_path, tmp_path / "deep" / ("d" * UNIX_PATH_BYTES_MAX)):
        parent.mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        folder = private_socket_dir()
        try:
            UnixAddress(f"{folder}/worker-{WORKERS_MAX - 1}")
            assert folder.stat().st_mode & 0o777 == 0o700
        finally:
            folder.rmdir()


def test_a_redis_of_ones_own_replaces_the_embedded_valkey(tmp_path: Path) -> None:
    stack = plan(tmp_path, UpOptions(port=0, redis_url="redis://r:1/0"))
    assert [spec.name for spec in stack.stages[0]] == ["cache"]
    assert flag(stack.stages[0][0].argv, "--redis-url") == "redis://r:1/0"


def test_the_seal_key_is_in_the_environment_only(tmp_path: Path) -> None:
    cache = plan(tmp_path, UpOptions(port=0)).stages[1][0]
    key = cache.environment["COPPICE_SEAL_KEY"]
    assert len(bytes.fromhex(key)) == 32
    assert key not in " ".join(cache.argv)
    given = plan(tmp_path, UpOptions(port=0), COPPICE_SEAL_KEY="ab" * 32).stages[1][0]
    assert given.environment["COPPICE_SEAL_KEY"] == "ab" * 32
    in_a_file = plan(tmp_path, UpOptions(port=0), COPPICE_SEAL_KEY_FILE="key").stages[1][0]
    assert "COPPICE_SEAL_KEY" not in in_a_file.environment


def test_everything_internal_stays_on_loopback(tmp_path: Path) -> None:
    stack = plan(tmp_path, UpOptions(port=0, host="0.0.0.0"))
    (_, (cache,), (worker, scheduler)) = stack.stages
    assert flag(cache.argv, "--host") == flag(worker.argv, "--host") == "127.0.0.1"
    assert flag(scheduler.argv, "--host") == "0.0.0.0"
    assert stack.rest_url == f"http://127.0.0.1:{stack.rest.port}"


def test_the_demo_model_is_the_default_and_folders_keep_their_name(tmp_path: Path) -> None:
    assert find_checkpoint("").name == DEMO_MODEL_NAME
    folder = tmp_path / "my-model"
    folder.mkdir()
    with pytest.raises(UsageError, match=r"config.json is missing"):
        find_checkpoint(str(folder))
    (folder / "config.json").write_text("{}")
    assert find_checkpoint(str(folder)) == Checkpoint(folder.resolve(), "my-model")


def test_a_model_that_is_nowhere_is_named() -> None:
    with pytest.raises(CoppiceError, match="no/such/folder"):
        find_checkpoint("no/such/folder")


def test_a_redis_that_does_not_answer_is_said_without_its_password() -> None:
    with pytest.raises(UnavailableError) as caught:
        check_redis("redis://user:geheim@127.0.0.1:1/0")
    assert "127.0.0.1:1" in caught.value.line()
    assert "geheim" not in caught.value.line()
    with pytest.raises(UsageError, match="--redis-url"):
        check_redis("http://x")


def test_welcome_gives_addresses_an_example_and_a_warning(tmp_path: Path) -> None:
    options = UpOptions(port=0)
    stack = plan(tmp_path, options)
    text = "\n".join(welcome(stack, options))
    for words in (stack.rest_url + "/v1", str(stack.grpc), str(stack.cache_http), "curl -N", "development setup"):
        assert words in text
    assert f"cache admin    http://{stack.cache_http} (gRPC {stack.cache_admin_grpc})" in text
    assert f"workers        {' '.join(map(str, stack.worker_grpc))} (gRPC" in text
    cache = stack.stages[1][0].argv
    assert (flag(cache, "--admin-grpc-port"), flag(cache, "--http-port")) == (
        str(stack.cache_admin_grpc.port),
        str(stack.cache_http.port),
    )
    assert "sessions       unix:/run/coppice/cache (--cache of a further worker)" in text


def test_without_a_word_services_have_their_usual_ports() -> None:
    options = UpOptions(workers=2).at_usual_ports()
    needs = {each.name: {port.name: port.usual for port in each.ports} for each in needs_of(options)}
    assert needs["cache"] == {"grpc": 7071, "admin_grpc": 7073, "http": 8071}
    assert needs["scheduler"] == {"rest": 0, "grpc": 7070, "metrics": 8075}
    assert (needs["worker-0"], needs["worker-1"]) == ({"grpc": 7080, "http": 8080}, {"grpc": 7081, "http": 8081})
    every = UpOptions(workers=WORKERS_ON_RAY_MAX, port=8000).at_usual_ports()
    usual = [port.usual or port.number for each in needs_of(every) for port in each.ports if port.name != "redis"]
    assert len(set(usual)) == len(usual), "none is usual for two"


def test_ports_that_a_user_names_are_those_of_the_services(tmp_path: Path) -> None:
    first = free_port()
    options = UpOptions(port=0, workers=2, cache_admin_port=first, worker_http_port=(second := free_port()))
    stack = plan(tmp_path, options)
    assert stack.cache_http.port == first
    assert [address.port for address in stack.worker_http] == [second, second + 1]
    assert not stack.moved_ports


def test_welcome_tells_which_usual_ports_somebody_else_has(tmp_path: Path) -> None:
    options = UpOptions(port=0)
    stack = plan(tmp_path, options)
    usual = replace(
        stack, cache_http=Address("127.0.0.1", 8071), scheduler_metrics=Address("127.0.0.1", 8075), moved_ports=()
    )
    text = "\n".join(welcome(usual, options))
    assert "taken by others" not in text
    assert "export COPPICE" not in text, "commands find it by themselves"
    moved = (MovedPort(8071, 15002, "--cache-admin-port"), MovedPort(7071, 15003, "--cache-grpc-port"))
    text = "\n".join(welcome(replace(stack, moved_ports=moved), options))
    assert "  taken by others  8071 (--cache-admin-port), so 15002, 7071 (--cache-grpc-port), so 15003\n" in text
    assert f"export COPPICE_ADMIN_URL=http://{stack.cache_http}\n" in text
    assert f"export COPPICE_REQUESTS_URL=http://{stack.scheduler_metrics}\n" in text


def test_every_service_tells_its_metrics_with_and_without_tenants(tmp_path: Path) -> None:
    for options in (UpOptions(port=0, workers=2), UpOptions(port=0, workers=2, tenants=tmp_path / "tenants.yaml")):
        stack = plan(tmp_path, options)
        cache, *workers, scheduler = (spec.argv for stage in stack.stages[1:] for spec in stage)
        assert [flag(worker, "--grpc-port") for worker in workers] == [str(each.port) for each in stack.worker_grpc]
        alone = flag(scheduler, "--metrics-port")
        ports = [alone, *(flag(argv, "--http-port") for argv in (cache, *workers))]
        (line,) = (line for line in welcome(stack, options) if line.startswith("  metrics"))
        assert line.split()[1:-3] == [f"http://127.0.0.1:{port}/metrics" for port in ports]
        if options.tenants is not None:
            assert alone not in (flag(scheduler, "--port"), flag(scheduler, "--grpc-port"))
        assert flag(scheduler, "--metrics-host") == "127.0.0.1"


# Whatever else is installed, it is this tree that is tested.
HERE = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}


def coppice(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coppice_cli", *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**HERE, "PATH": "", "COLUMNS": "200", "TERM": "dumb", **environ},
    )


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["up", "--prot", "1"], {}, "--port"),
        (["up", "--port", "many"], {}, "Invalid value for '--port'"),
        (["nonsense"], {}, "nonsense"),
        (
            ["up"],
            {"COPPICE_UP_PROT": "1"},
            "unknown environment variable COPPICE_UP_PROT (did you mean COPPICE_UP_PORT?)",
        ),
        (
            ["bench", "smoke"],
            {"COPPICE_BENCH_SMOKE_ULR": "http://h:1"},
            "unknown environment variable COPPICE_BENCH_SMOKE_ULR (did you mean COPPICE_BENCH_SMOKE_URL?)",
        ),
        (["up"], {"COPPICE_UP_DTYPE": "int8"}, "--dtype int8 is not known"),
        (["bench", "smoke", "--url", "nowhere"], {}, "--url nowhere is no address of a server"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_why(argv: list[str], environ: dict[str, str], words: str) -> None:
    ended = coppice(*argv, **environ)
    assert ended.returncode == 2, ended.stderr
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_package_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image holds one service, and no benchmarks."""
    for module in ("coppice_bench.plan.run", "coppice_bench.report"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", ["coppice", "bench", "plan"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "coppice: coppice_bench is not installed here (install from a checkout: make venv)\n"
    )


def test_version_and_help() -> None:
    ended = coppice("version")
    assert ended.returncode == 0
    assert ended.stdout.startswith("coppice ")
    listed = coppice("up", "--help").stdout
    for name in ("--model", "--port", "--host", "--dtype", "--device", "--num-blocks", "--block-size", "--workers"):
        assert name in listed
    for name in ("--tenants", "--redis-url", "--otlp-endpoint"):
        assert name in listed


def test_help_says_what_is_written() -> None:
    """The library that draws it makes pictures of some words between colons."""
    for command in (["up"], ["bench", "serve"], ["bench", "split"], ["cache", "explain"], ["index", "ingest"]):
        listed = coppice(*command, "--help").stdout
        assert listed
        assert not [letter for letter in listed if ord(letter) > 0xFFFF]


def test_health_of_a_service_that_is_not_there() -> None:
    ended = coppice("health", str(free_addresses(1)[0]))
    assert (ended.returncode, ended.stderr) == (1, "not serving\n")
    assert coppice("health", "nowhere").returncode == 2
    nobody = coppice("health", f"http://{free_addresses(1)[0]}")
    assert (nobody.returncode, nobody.stderr) == (1, "not serving\n")
    for url in ("ftp://127.0.0.1:8000", "http://:8000", "https://host:99999"):
        wrong = coppice("health", url)
        assert wrong.returncode == 2
        assert f"{url!r} is no URL of a REST API" in wrong.stderr


def test_addresses_with_and_without_brackets() -> None:
    assert parse_address("cache:7071") == Address("cache", 7071)
    assert str(parse_address("[::1]:7071")) == "[::1]:7071"
    for wrong in ("cache", ":1", "cache:many", "cache:70000"):
        with pytest.raises(UsageError, match="is no address"):
            parse_address(wrong)


def test_the_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["coppice", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == EXIT_OK
    assert capsys.readouterr().out == f"coppice {__version__}\n"
