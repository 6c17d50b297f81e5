"""Every kind of broken checkpoint is refused with the file, the tensor or key, and what to do."""

from __future__ import annotations

import builtins
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coppice.errors import CoppiceError, UnavailableError
from coppice_worker.model import loader
from coppice_worker.model.config.config import read_config
from coppice_worker.model.config.errors import CheckpointError
from coppice_worker.model.config.resolve import resolve_checkpoint
from coppice_worker.model.config.shard import WHOLE, Shard
from coppice_worker.model.decoder.linear import Linear, Projections
from coppice_worker.model.decoder.weights import DecoderWeights, tensor_layouts
from coppice_worker.model.executor import TorchExecutor
from coppice_worker.model.loader import Checkpoint, LoadProgress, checkpoint_digest
from coppice_worker.model.pool_size import suggest_num_blocks
from tests.fakes.checkpoints import LLAMA3_ROPE, edit_config, write_tiny_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "llama": write_tiny_checkpoint(root / "llama"),
        "mistral": write_tiny_checkpoint(root / "mistral", "mistral"),
        "qwen2": write_tiny_checkpoint(root / "qwen2", "qwen2"),
        "qwen3": write_tiny_checkpoint(root / "qwen3", "qwen3"),
        "gemma2": write_tiny_checkpoint(root / "gemma2", "gemma2"),
        "sharded": write_tiny_checkpoint(root / "sharded", sharded=True),
    }


@pytest.fixture
def llama(pristine: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine["llama"], tmp_path / "llama"))


@pytest.fixture
def sharded(pristine: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine["sharded"], tmp_path / "sharded"))


def edit_tensors(checkpoint: Path, **changes: torch.Tensor | None) -> None:
    """Names use __ for a dot; None removes."""
    file = checkpoint / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, file)


def load(checkpoint: Path, shard: Shard = WHOLE) -> DecoderWeights:
    opened = Checkpoint(checkpoint, read_config(checkpoint), device=CPU, dtype=torch.float32, shard=shard)
    return opened.weights(Projections())


def refusal(checkpoint: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint)
    assert caught.value.hint
    return caught.value.line()


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("qwen2", "model.layers.1.self_attn.v_proj.bias"),
        ("qwen3", "model.layers.1.self_attn.k_norm.weight"),
        ("gemma2", "model.layers.1.post_feedforward_layernorm.weight"),
        ("mistral", "model.layers.1.post_attention_layernorm.weight"),
    ],
)
def test_a_familys_own_tensors(pristine: dict[str, Path], tmp_path: Path, family: str, tensor: str) -> None:
    checkpoint = Path(shutil.copytree(pristine[family], tmp_path / family))
    edit_tensors(checkpoint, **{tensor.replace(".", "__"): torch.zeros(3)})
    assert f'tensor "{tensor}" has shape [3]' in refusal(checkpoint)
    edit_tensors(checkpoint, **{tensor.replace(".", "__"): None})
    assert f'tensor "{tensor}"' in refusal(checkpoint)


def test_truncated_file(llama: Path) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    line = refusal(llama)
    assert str(file) in line
    assert "truncated" in line


def edit_header(checkpoint: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """The data stays where it is: only what the header says of it changes."""
    file = checkpoint / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    edit(header)
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_offsets": [0, 1 << 40]}, ["do not hold F32 [64]"]),
        ({"shape": [128]}, ["256 bytes do not hold F32 [128]"]),
        ({"shape": [-64]}, ["header is not understood", "no size"]),
        ({"shape": [64.0]}, ["header is not understood", "no size"]),
        ({"data_offsets": [256, 0]}, ["do not hold"]),
        ({"data_offsets": [-256, 0]}, ["no size"]),
        ({"data_offsets": None}, ["header is not understood"]),
        ({"dtype": "F4", "data_offsets": [0, 32]}, ["begins at byte"]),
    ],
)
def test_a_header_that_lies_about_a_tensor(llama: Path, changes: dict[str, Any], words: list[str]) -> None:
    edit_header(llama, lambda header: header["model.norm.weight"].update(changes))
    line = refusal(llama)
    assert str(llama / "model.safetensors") in line
    for word in words:
        assert word in line


def test_tensors_that_share_bytes(llama: Path) -> None:
    norms = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
    edit_header(llama, lambda header: header[norms[0]].update(data_offsets=header[norms[1]]["data_offsets"]))
    assert "begins at byte" in refusal(llama)


def test_bytes_that_belong_to_no_tensor(llama: Path) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes() + bytes(8))
    assert "longer than it should be" in refusal(llama)


def test_an_unknown_dtype(llama: Path) -> None:
    edit_header(llama, lambda header: header["model.norm.weight"].update(dtype="F12"))
    line = refusal(llama)
    assert "model.norm.weight" in line
    assert "F12" in line


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08",
        bytes(8) + b"x",
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"a": "b}',
        (10).to_bytes(8, "little") + b'{"a": [1]}',
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
)
def test_a_file_that_is_no_safetensors_file(llama: Path, content: bytes) -> None:
    (llama / "model.safetensors").write_bytes(content)
    assert str(llama) in refusal(llama)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
    tensors = load_file(second)
    name = next(iter(tensors))
    save_file({**load_file(first), name: tensors[name]}, first)
    assert first.name in refusal(sharded)


def test_a_tensor_at_an_odd_byte(llama: Path) -> None:
    """The format asks for no alignment."""
    expected = load(llama).final_norm

    def shift(header: dict[str, Any]) -> None:
        for fields in header.values():
            if "data_offsets" in fields:
                fields["data_offsets"] = [offset + 1 for offset in fields["data_offsets"]]
        header["x.rotary_emb.inv_freq"] = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}

    edit_header(llama, shift)
    file = llama / "model.safetensors"
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes(content[:start] + b"\0" + content[start:])
    assert torch.equal(load(llama).final_norm, expected)


def test_missing_tensor(llama: Path) -> None:
    edit_tensors(llama, model__norm__weight=None)
    assert 'tensor "model.norm.weight" [64]' in refusal(llama)


def test_wrong_shape(llama: Path) -> None:
    edit_tensors(llama, model__norm__weight=torch.zeros(65))
    line = refusal(llama)
    assert "model.norm.weight" in line
    assert "[65]" in line
    assert "[64]" in line


def test_quantised_tensor(llama: Path) -> None:
    edit_tensors(llama, model__norm__weight=torch.zeros(64, dtype=torch.int8))
    assert "I8" in refusal(llama)


def test_tensor_of_another_architecture(llama: Path) -> None:
    edit_tensors(llama, model__layers__0__self_attn__q_norm__weight=torch.zeros(16))
    assert "q_norm" in refusal(llama)


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    line = refusal(sharded)
    assert str(shard) in line
    assert "missing" in line


def test_index_may_not_lead_elsewhere(sharded: Path) -> None:
    file = sharded / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["lm_head.weight"] = "../llama/model.safetensors"
    file.write_text(json.dumps(index))
    assert "../llama" in refusal(sharded)
    file.write_text("[]")
    assert "index" in refusal(sharded)


def test_pickled_weights_are_never_opened(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    line = refusal(llama)
    assert "pickled" in line
    assert "safetensors" in line
    (llama / "pytorch_model.bin").unlink()
    assert "neither" in refusal(llama)


def test_shards_equal_single_file(pristine: dict[str, Path]) -> None:
    single, several = load(pristine["llama"]), load(pristine["sharded"])
    for one, other in ((single.head, several.head), (single.layers[1].qkv, several.layers[1].qkv)):
        assert isinstance(one, Linear)
        assert isinstance(other, Linear)
        assert torch.equal(one.weight, other.weight)


def test_progress_ends_at_the_total(pristine: dict[str, Path]) -> None:
    seen: list[LoadProgress] = []
    config = read_config(pristine["llama"])
    checkpoint = Checkpoint(pristine["llama"], config, device=CPU, dtype=torch.bfloat16, on_progress=seen.append)
    assert seen == []
    checkpoint.weights(Projections())
    done = [progress.parameters_done for progress in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1].parameters_total
    assert len(done) == len(tensor_layouts(config))


def test_digest_follows_content(llama: Path) -> None:
    edit_tensors(llama, model__norm__weight=torch.ones(64))
    before = checkpoint_digest(llama)
    assert checkpoint_digest(llama) == before
    edit_tensors(llama, model__norm__weight=torch.zeros(64))  # equal header, equal size
    after = checkpoint_digest(llama)
    assert after != before
    edit_config(llama, rope_parameters=LLAMA3_ROPE)
    assert checkpoint_digest(llama) != after


def test_digest_of_a_large_file_samples_its_content(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_DIGEST_WHOLE_BYTES", 1 << 16)
    edit_tensors(llama, lm_head__weight=torch.ones(320, 64))
    before = checkpoint_digest(llama)
    edit_tensors(llama, lm_head__weight=torch.zeros(320, 64))
    assert checkpoint_digest(llama) != before


def test_suggested_blocks_fit_the_memory(pristine: dict[str, Path]) -> None:
    per_block = TorchExecutor(pristine["llama"], num_blocks=1, block_size=16, dtype="bfloat16").kv_bytes_per_block()
    assert per_block == 2 * 2 * 2 * 16 * 16 * 2  # K and V, layers, KV heads, tokens, head size, bytes
    suggested = suggest_num_blocks(pristine["llama"], memory_bytes=10 * per_block + 5, dtype="bfloat16", block_size=16)
    assert suggested == 10
    with pytest.raises(ValueError, match="do not hold one block"):
        suggest_num_blocks(pristine["llama"], memory_bytes=per_block - 1, dtype="bfloat16", block_size=16)


def test_resolve_takes_folders_and_refuses_the_rest(llama: Path) -> None:
    assert resolve_checkpoint(llama) == llama
    for source in (llama / "config.json", llama / "nowhere"):
        with pytest.raises(CheckpointError):
            resolve_checkpoint(source)


def test_resolve_without_a_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    def unreachable(repo: str, **_: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(UnavailableError, match="hub cannot be reached"):
        resolve_checkpoint("owner/name@main")
    asked: dict[str, Any] = {}

    def download(repo: str, **filters: Any) -> str:
        asked.update(filters)
        return str(tmp_path / repo)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_checkpoint("owner/name") == tmp_path / "owner/name"
    names = ["model-00001-of-00002.safetensors", "config.json", "consolidated.safetensors", "original/params.json"]
    assert (
        list(filter_repo_objects(names, **{key: asked[key] for key in ("allow_patterns", "ignore_patterns")}))
        == (names[:2])
    )


def test_resolve_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_hub(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_hub)
    with pytest.raises(CoppiceError, match="needs the package huggingface_hub"):
        resolve_checkpoint("owner/name")


def test_a_context_that_no_worker_could_remember(llama: Path) -> None:
    edit_config(llama, max_position_embeddings=10**12)
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        read_config(llama)
