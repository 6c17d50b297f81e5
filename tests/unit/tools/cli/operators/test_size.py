"""`coppice size`: the worker's own sums, before there is a worker."""

from __future__ import annotations

import json
import struct
import weakref
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from coppice.errors import UsageError
from coppice_cli.app import app
from coppice_cli.size.arithmetic import Asked, pool_on_cpu, pool_on_gpu, requests_at_once, step_bytes, weight_bytes
from coppice_up.checkpoint import demo_model_folder
from coppice_worker.core.batch.step_batch import StepLimits
from coppice_worker.model.config.config import read_config
from coppice_worker.model.config.errors import PoolTooSmall
from coppice_worker.model.executor import TorchExecutor
from coppice_worker.model.warm_up import largest_step
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.tools.pages import pages

GIB = 1 << 30


def asked_of(folder: Path, **more: Any) -> Asked:
    return Asked(**{"config": read_config(folder), "dtype": "float32", "kv_dtype": "auto", "block_size": 16, **more})


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_weights_are_those_of_the_files(tmp_path: Path, family: Any) -> None:
    folder = write_tiny_checkpoint(tmp_path, family, seed=3)
    count = 0
    for file in folder.glob("*.safetensors"):
        content = file.read_bytes()
        header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
        count += sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    assert weight_bytes(asked_of(folder)) == 4 * count
    assert weight_bytes(asked_of(folder, dtype="bfloat16")) == 2 * count


def test_ranks_share_weights_and_kv_out() -> None:
    one, two = asked_of(demo_model_folder()), asked_of(demo_model_folder(), ranks=2)
    assert weight_bytes(one) / 2 < weight_bytes(two) < weight_bytes(one), "the embedding is held by both"
    assert pool_on_cpu(two, kv_memory=GIB).bytes_per_block * 2 == pool_on_cpu(one, kv_memory=GIB).bytes_per_block


def test_blocks_on_a_cpu_are_those_that_a_worker_has() -> None:
    pool = pool_on_cpu(asked_of(demo_model_folder()), kv_memory=512 << 20)
    assert pool.num_blocks == 8192, "as `coppice up` has them"


def test_what_is_left_on_a_gpu_is_for_blocks() -> None:
    asked = asked_of(demo_model_folder())
    pool = pool_on_gpu(asked, total=10 * GIB, free=10 * GIB, utilization=0.5)
    left = 5 * GIB - pool.weights - pool.step - pool.libraries
    assert pool.num_blocks == left // pool.bytes_per_block
    narrow = pool_on_gpu(asked, total=10 * GIB, free=3 * GIB, utilization=0.5)
    assert narrow.num_blocks == (left - 2 * GIB) // pool.bytes_per_block, "others hold the rest"
    with pytest.raises(PoolTooSmall, match="the device lacks"):
        pool_on_gpu(asked, total=GIB, free=GIB, utilization=0.5)


def test_fp8_halves_kv_of_16_bits_but_for_its_scales() -> None:
    asked = asked_of(demo_model_folder(), dtype="bfloat16")
    config = asked.config
    fp8 = pool_on_cpu(replace(asked, kv_dtype="fp8"), kv_memory=GIB).bytes_per_token
    scales = 2 * config.num_layers * config.num_kv_heads * 4
    assert fp8 == pool_on_cpu(asked, kv_memory=GIB).bytes_per_token // 2 + scales


class Peak(TorchDispatchMode):
    """The most bytes that results of operations took at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._held: dict[int, int] = {}

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        result = func(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            pointer = storage.data_ptr()
            if pointer and pointer not in given and pointer not in self._held:
                self._held[pointer] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, pointer)
        return result

    def _gone(self, pointer: int) -> None:
        self.now -= self._held.pop(pointer, 0)


@pytest.mark.parametrize(("tokens", "rows"), [(1024, 8), (64, 64), (1024, 256)])
def test_a_largest_step_takes_about_as_much_as_estimated(tokens: int, rows: int) -> None:
    """With torch's own kernels, which keep more than fused ones do: in a layer, and where many rows are drawn."""
    limits = StepLimits(rows, tokens)
    folder = demo_model_folder()
    executor = TorchExecutor(
        folder,
        device="cpu",
        dtype="float32",
        num_blocks=256,
        block_size=16,
        kernels="torch",
        num_threads=1,
        limits=limits,
    )
    step = largest_step(rows, tokens, read_config(folder).max_context, 16)
    executor.execute(step)
    with torch.inference_mode(), Peak() as peak:
        executor.execute(step)
    estimate = step_bytes(asked_of(folder, limits=limits))
    assert peak.most <= estimate * 1.05
    assert estimate <= peak.most * 1.3


@pytest.mark.parametrize(
    ("num_blocks", "context", "shared", "most", "expected"),
    [
        (100, 160, 0, 256, 10),
        (100, 161, 0, 256, 9),
        (100, 160, 80, 256, 19),  # 5 in common, 5 of their own: 95 // 5
        (100, 160, 160, 256, 91),  # at least the last token's block is its own
        (100, 160, 0, 4, 4),
        (3, 160, 0, 256, 0),
    ],
)
def test_requests_that_run_at_once(num_blocks: int, context: int, shared: int, most: int, expected: int) -> None:
    found = requests_at_once(num_blocks, context=context, shared=shared, block_size=16, most=most)
    assert found == expected


def sized(*arguments: str) -> Any:
    ended = CliRunner().invoke(app, ["size", "--json", *arguments])
    assert ended.exit_code == 0, ended.output or ended.exception
    return json.loads(ended.output)


def test_the_command_says_what_is_exact_and_what_is_not() -> None:
    ended = CliRunner().invoke(app, ["size", "--memory-gib", "8", "--context", "256"])
    assert ended.exit_code == 0, ended.output
    said = {line.split("  ")[1].strip(): line for line in ended.output.splitlines()[1:]}
    assert "exact" in said["weights"]
    assert "estimate" in said["a largest step"]
    assert "a worker measures it" in said["libraries, graphs"]
    assert "estimate" in said["blocks"]
    assert "at most 256 run at once" in said["requests of 256 tokens"]


def test_a_running_cache_tells_what_its_workers_measured() -> None:
    stats = {"workers": [{"worker_id": "worker-0", "num_blocks": 64}]}
    with pages({"/v1/stats": json.dumps(stats)}) as url:
        found = sized("--device", "cpu", "--context", "256", "--running", url)
    assert found["running"] == {"worker-0": {"blocks": 64, "requests": 4}}
    assert found["blocks"] == 8192


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--context", "100000", "--device", "cpu"], "is more than the model has"),
        (["--device", "tpu"], "--device tpu is not known"),
        (["--dtype", "int8"], "--dtype int8 is not known"),
        (["--device", "cpu", "--tensor-parallel", "3"], "cannot share"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], words: str) -> None:
    ended = CliRunner().invoke(app, ["size", *arguments])
    assert isinstance(ended.exception, UsageError)
    assert words in ended.exception.line()


def test_without_a_gpu_its_memory_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ended = CliRunner().invoke(app, ["size"])
    assert "torch sees no GPU here" in str(ended.exception)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (6 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a card")
    ended = CliRunner().invoke(app, ["size"])
    assert "8.00 GiB  measured: a card, 6.00 GiB of it free" in ended.output


def test_only_the_configuration_is_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / "config.json").write_bytes((demo_model_folder() / "config.json").read_bytes())
    wanted: list[Any] = []

    def download(repo: str, **given: Any) -> str:
        wanted.append((repo, given["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert sized("--model", "owner/name", "--device", "cpu")["blocks"] == 8192
    assert wanted == [("owner/name", ["config.json", "generation_config.json"])]
