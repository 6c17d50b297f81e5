"""`coppice up --on ray://HEAD`: a head and three nodes, the demo model, and the death of a node under load."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from coppice import LLM, SamplingOptions
from tests.fakes.certificates import Authority
from tests.fakes.ports import FREE_PORTS_OF_UP
from tests.fakes.tools import ray_cluster
from tests.fakes.tools.ray_cluster import RayCluster
from tests.fakes.waiting import WAIT_S, wait_for

pytest.importorskip("ray", reason="needs coppice[ray]")

SERVICE = re.compile(r"coppice_(cache|worker|scheduler)|valkey-server")
START_S = 200.0  # each node starts a process that loads torch: a minute on two idle cores
KEY = "key-of-the-orchard"
NUM_TOKENS = 400
LEFT_OVER = """
import sys
from coppice_up.on_ray.cluster import connect
ray = connect(sys.argv[1])
groups = [group["state"] for group in ray.util.placement_group_table().values()]
cpus = ray.cluster_resources()["CPU"] - ray.available_resources()["CPU"]
print("left", [state for state in groups if state != "REMOVED"], cpus)
"""


class Up:
    """A `coppice up` on a cluster, and what it said so far."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path, cluster: RayCluster) -> None:
        self.process = process
        self.cluster = cluster
        self._output = output

    def output(self) -> str:
        return self._output.read_text()

    def find(self, pattern: str) -> str:
        found = re.findall(pattern, self.output())
        assert found, self.output()
        return str(found[-1])

    def rest(self) -> tuple[str, int]:
        host, port = re.findall(r"OpenAI API +http://(\S+):(\d+)/v1", self.output())[-1]
        return host, int(port)

    def is_ready(self) -> bool:
        """Whether a planner has a worker; the cache service may hear of it before."""
        connection = http.client.HTTPConnection(*self.rest(), timeout=WAIT_S)
        with closing(connection):
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200

    def admin_url(self) -> str:
        return self.find(r"cache admin +(http://\S+)")

    def stats(self) -> Any:
        command = [sys.executable, "-m", "coppice_cli", "cache", "stats", "--json", "--url", self.admin_url()]
        return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)

    def epochs(self) -> dict[str, int]:
        return {worker["worker_id"]: worker["worker_epoch"] for worker in self.stats()["workers"] if worker["open"]}

    def node_of(self, name: str) -> str:
        """Where it runs now."""
        return self.find(rf"{name} runs on (\S+)")

    def processes(self) -> list[str]:
        """Services of the stack on all nodes."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (entry / "environ").read_bytes()  # a node's folder for temporary files is inherited
            except OSError:
                continue
            if SERVICE.search(command) and f"TMPDIR={self.cluster.folder}\0".encode() in environment:
                found.append(command)
        return found

    def must_run(self) -> None:
        assert self.process.poll() is None, self.output()
        assert len(self.processes()) >= 4, self.output()

    def stop(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster.started_in_short_folder(num_nodes=3) as cluster:
        yield cluster


def from_outside(cluster: RayCluster, folder: Path) -> list[str]:
    """Options of who is on no node."""
    tenants = folder / "tenants.yaml"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    tenants.write_text(f'tenants:\n  - id: orchard\n    api_key_sha256: "{digest}"\n')
    return ["--on", cluster.on, "--tenants", str(tenants), "--insecure-network"]


@contextmanager
def started(cluster: RayCluster, folder: Path, *options: str, prefix: Sequence[str] = ()) -> Iterator[Up]:
    output = folder / "output"
    command = [*prefix, sys.executable, "-m", "coppice_cli", "up", *options]
    command += ["--port", "0", *FREE_PORTS_OF_UP, "--dtype", "float32", "--num-blocks", "2048"]
    environment = {**os.environ, "COLUMNS": "200", "RAY_ADDRESS": cluster.address}  # which `auto` takes
    with output.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
    up = Up(process, output, cluster)
    try:
        wait_for(lambda: "development setup" in up.output() or process.poll() is not None, "coppice up", START_S)
        yield up
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(WAIT_S)


class Stream(threading.Thread):
    """A client that reads one answer, and how far it is."""

    def __init__(self, up: Up, prompt: str, num_tokens: int = NUM_TOKENS) -> None:
        super().__init__(daemon=True)
        self.prompt = prompt
        self.tokens: list[int] = []
        self.end = ""
        self.cached = 0
        self._rest = up.rest()
        self._num_tokens = num_tokens
        self.start()

    def run(self) -> None:
        body = {"model": "coppice-demo", "prompt": self.prompt, "max_tokens": self._num_tokens, "temperature": 0,
                "ignore_eos": True, "stream": True, "return_token_ids": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        connection = http.client.HTTPConnection(*self._rest, timeout=WAIT_S)
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                self.end = line.decode().strip() or self.end
                continue
            event = json.loads(line.removeprefix(b"data: "))
            for choice in event.get("choices", ()):
                self.tokens += choice.get("token_ids") or ()
            if event.get("usage"):
                self.cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        connection.close()


def prompts() -> list[str]:
    return [f"def function_{number}(items):\n    '''The {number} largest of them, sorted.'''" for number in range(50)]


def joined(stream: Stream) -> Stream:
    stream.join(WAIT_S)
    return stream


def check_exact(streams: list[Stream], expected: dict[str, list[int]]) -> None:
    assert [joined(stream).end for stream in streams] == ["data: [DONE]"] * len(streams)
    assert {stream.prompt: stream.tokens for stream in streams} == {
        each.prompt: expected[each.prompt] for each in streams
    }


def answers(asked: list[str], num_tokens: int) -> dict[str, list[int]]:
    """By one process."""
    params = SamplingOptions(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    with LLM(dtype="float32", num_blocks=2048, threads=1) as llm:
        found = llm.generate(asked, params, progress=False)
    return {prompt: each.token_ids for prompt, each in zip(asked, found, strict=True)}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return answers(prompts(), NUM_TOKENS)


def what_is_left(cluster: RayCluster) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", LEFT_OVER, cluster.on], capture_output=True, text=True, check=True, timeout=120
    )
    return next(line for line in ended.stdout.splitlines() if line.startswith("left"))


def nothing_is_left(up: Up) -> None:
    wait_for(lambda: not up.processes(), "no service is left on any node")
    wait_for(lambda: what_is_left(up.cluster) == "left [] 0.0", "no placement group is left")


@pytest.mark.wide
def test_an_answer_from_another_node_and_an_orderly_end(cluster: RayCluster, tmp_path: Path) -> None:
    asked, num_tokens = prompts()[:1], 60
    with started(cluster, tmp_path, *from_outside(cluster, tmp_path)) as up:
        up.must_run()
        check_exact([Stream(up, prompt, num_tokens) for prompt in asked], answers(asked, num_tokens))
        assert up.stop(signal.SIGINT) == 0
        assert up.output().rstrip().endswith("stopped")
        nothing_is_left(up)


@pytest.mark.long
def test_a_node_dies_under_fifty_streams(cluster: RayCluster, expected: dict[str, list[int]], tmp_path: Path) -> None:
    with started(cluster, tmp_path, *from_outside(cluster, tmp_path), "--workers", "2") as up:
        front, doomed = up.node_of("scheduler"), up.node_of("worker-1")
        assert up.node_of("cache") == front
        assert len({front, doomed, up.node_of("worker-0")}) == 3
        before = up.epochs()
        assert set(before) == {"worker-0", "worker-1"}
        streams = [Stream(up, prompt) for prompt in prompts()]
        wait_for(lambda: sum(bool(stream.tokens) for stream in streams) > 40, "streams are at work")
        assert not any(stream.end for stream in streams), "all are at work yet"
        (node,) = (node for node in cluster.nodes if node.address == doomed)
        os.kill(cluster.raylet(node), signal.SIGKILL)
        check_exact(streams, expected)

        def is_back() -> bool:
            return up.epochs().get("worker-1", before["worker-1"]) != before["worker-1"]

        wait_for(is_back, "the worker under a new epoch")
        wait_for(lambda: up.node_of("worker-1") != doomed, "the worker on another node")
        assert up.epochs()["worker-0"] == before["worker-0"]
        again = [Stream(up, prompt) for prompt in prompts()]
        check_exact(again, expected)
        one_by_one = [joined(Stream(up, prompt, num_tokens=1)).cached for prompt in prompts()]
        assert min(one_by_one) > 0, "what was computed is found again"
        audit = subprocess.run(
            [sys.executable, "-m", "coppice_cli", "cache", "audit", "--url", up.admin_url()], timeout=60, check=False
        )
        assert audit.returncode == 0
        assert up.stop(signal.SIGINT) == 0
        nothing_is_left(up)


@pytest.mark.long
def test_nothing_is_left_when_it_is_killed(cluster: RayCluster, tmp_path: Path) -> None:
    """Ray waits half a minute for a client that is out of reach."""
    with started(cluster, tmp_path, *from_outside(cluster, tmp_path)) as up:
        up.must_run()
        up.stop(signal.SIGKILL)
        nothing_is_left(up)


@pytest.mark.long
def test_on_a_machine_of_the_cluster_and_under_tls(cluster: RayCluster, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    for role, name in (("cache", "cache-0"), ("scheduler", "scheduler-0"), ("worker", "worker-0")):
        authority.files(role, name)
    operator = authority.flags("operator", "ann")
    prefix = cluster.head.prefix
    with started(cluster, tmp_path, "--on", "auto", "--certs", str(tmp_path), prefix=prefix) as up:
        assert up.node_of("scheduler") == cluster.head.address
        ask = [*prefix, sys.executable, "-m", "coppice_cli"]
        url = up.find(r"OpenAI API +(http://127.0.0.1:\d+)/v1")
        subprocess.run([*ask, "bench", "smoke", "--url", url], check=True, timeout=WAIT_S)
        admin = up.find(r"cache admin +(https://\S+)")
        subprocess.run([*ask, "cache", *operator, "audit", "--url", admin], check=True, timeout=WAIT_S)
        assert up.stop(signal.SIGTERM) == 0
        nothing_is_left(up)


@pytest.mark.wide
def test_a_cluster_that_is_too_small_is_told(cluster: RayCluster, tmp_path: Path) -> None:
    asked = ("--workers", "4", "--gpus-per-worker", "1")
    with started(cluster, tmp_path, *from_outside(cluster, tmp_path), *asked) as up:
        assert up.process.wait(WAIT_S) == 1
        (line,) = (line for line in up.output().splitlines() if line.startswith("coppice: "))
    assert "the cluster is too small: asked for 1 CPU, 0 GPU for cache and scheduler, " in line
    assert re.search(r"1 CPU, 1 GPU for each of 4 workers; it has \d nodes \(", line)
