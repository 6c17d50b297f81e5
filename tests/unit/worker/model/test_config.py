"""config.json as each family has it: what is read, and what is refused with file, key and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from coppice_scheduler.edge.service import _model_limits
from coppice_worker.model.config.config import read_config
from coppice_worker.model.config.errors import CheckpointError
from coppice_worker.model.config.families import FAMILIES
from coppice_worker.model.config.rope_config import RopeConfig
from coppice_worker.model.decoder.rope import inverse_frequencies
from tests.fakes.checkpoints import LLAMA3_ROPE, YARN_ROPE, Family, edit_config, write_tiny_checkpoint


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    families: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3", "gemma2")
    return {family: write_tiny_checkpoint(tmp_path_factory.mktemp(family), family) for family in families}


@pytest.fixture
def llama(pristine: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine["llama"], tmp_path / "llama"))


def refusal(checkpoint: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_config(checkpoint)
    assert caught.value.hint
    return caught.value.line()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            ["architectures", "'GemmaForCausalLM'", *FAMILIES],
        ),
        ({"architectures": ["LlamaForCausalLM", "Qwen2ForCausalLM"]}, ["architectures"]),
        ({"architectures": None}, ["architectures", "Qwen2ForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        ({"sliding_window": 512}, ["sliding_window", "512", "full attention"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            ["rope_parameters.rope_type", "longrope", "llama3", "yarn"],
        ),
        ({"rope_parameters": {**YARN_ROPE, "beta_fast": 0.5}}, ["rope_parameters.beta_slow", "beta_fast"]),
        ({"rope_parameters": {**YARN_ROPE, "truncate": 0}}, ["rope_parameters.truncate", "true or false"]),
        ({"rope_parameters": {**LLAMA3_ROPE, "factor": None}}, ["rope_parameters.factor", "missing"]),
        ({"rope_parameters": {**LLAMA3_ROPE, "low_freq_factor": 9.0}}, ["low_freq_factor", "high_freq_factor"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "divide"]),
        ({"head_dim": 15}, ["head_dim", "odd"]),
        ({"attention_bias": 1}, ["attention_bias", "true or false"]),
    ],
)
def test_unsupported_setting_is_refused(llama: Path, changes: dict[str, Any], words: list[str]) -> None:
    edit_config(llama, **changes)
    line = refusal(llama)
    assert str(llama / "config.json") in line
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mistral", {"sliding_window": 0}, ["sliding_window", "0"]),
        ("mistral", {"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "alike"]),
        ("qwen2", {"use_sliding_window": True, "sliding_window": "all"}, ["sliding_window", "'all'"]),
        ("qwen2", {"use_sliding_window": 1}, ["use_sliding_window", "true or false"]),
        ("qwen2", {"max_window_layers": None}, ["max_window_layers", "None"]),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, ["sliding_window", "not in use"]),
        ("qwen3", {"layer_types": ["chunked_attention"] * 2}, ["layer_types", "chunked_attention"]),
        ("qwen3", {"layer_types": ["full_attention"]}, ["layer_types", "each layer"]),
        ("gemma2", {"sliding_window": None}, ["sliding_window", "not in use"]),
        ("gemma2", {"hidden_activation": "gelu"}, ["hidden_activation", "'gelu'", "gelu_pytorch_tanh"]),
        ("gemma2", {"attn_logit_softcapping": -1.0}, ["attn_logit_softcapping", "-1.0"]),
        ("gemma2", {"query_pre_attn_scalar": None}, ["query_pre_attn_scalar", "missing"]),
        ("gemma2", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
    ],
)
def test_a_familys_own_settings(
    pristine: dict[str, Path], tmp_path: Path, family: str, changes: dict[str, Any], words: list[str]
) -> None:
    checkpoint = Path(shutil.copytree(pristine[family], tmp_path / family))
    edit_config(checkpoint, **changes)
    line = refusal(checkpoint)
    for word in words:
        assert word in line


def windows_of(checkpoint: Path) -> list[int | None]:
    traits = read_config(checkpoint).traits
    return [traits.window(layer) for layer in range(2)]


def test_windows_are_where_the_file_says(pristine: dict[str, Path], tmp_path: Path) -> None:
    copies = {name: Path(shutil.copytree(pristine[name], tmp_path / name)) for name in pristine}
    assert windows_of(copies["llama"]) == [None, None]
    assert windows_of(copies["mistral"]) == [24, 24]
    assert windows_of(copies["gemma2"]) == [24, None]
    edit_config(copies["gemma2"], layer_types=["full_attention", "sliding_attention"])
    assert windows_of(copies["gemma2"]) == [None, 24]
    for family in ("qwen2", "qwen3"):
        edit_config(copies[family], layer_types=None, sliding_window=4096, use_sliding_window=False)
        assert windows_of(copies[family]) == [None, None]
        edit_config(copies[family], use_sliding_window=True, max_window_layers=1)
        assert windows_of(copies[family]) == [None, 4096]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2"])
def test_which_layers_have_windows_is_as_transformers_takes_it(tmp_path: Path, family: Family) -> None:
    checkpoint = write_tiny_checkpoint(
        tmp_path, family, num_hidden_layers=5, use_sliding_window=True, sliding_window=9, max_window_layers=2
    )
    slides = [kind == "sliding_attention" for kind in AutoConfig.from_pretrained(checkpoint).layer_types]
    assert 0 < sum(slides) < 5
    traits = read_config(checkpoint).traits
    assert [traits.window(layer) for layer in range(5)] == [9 if there else None for there in slides]


def test_what_a_file_leaves_out_is_as_transformers_takes_it(pristine: dict[str, Path], tmp_path: Path) -> None:
    """An absent key and null are not the same."""
    for family in ("mistral", "gemma2"):
        checkpoint = Path(shutil.copytree(pristine[family], tmp_path / family))
        file = checkpoint / "config.json"
        kept = {key: value for key, value in json.loads(file.read_text()).items() if key != "sliding_window"}
        file.write_text(json.dumps(kept))
        assert windows_of(checkpoint)[0] == AutoConfig.from_pretrained(checkpoint).sliding_window == 4096
    edit_config(tmp_path / "mistral", sliding_window=None)
    assert windows_of(tmp_path / "mistral") == [None, None]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, 2048), ({"original_max_position_embeddings": 1024}, 4096), ({"factor": None}, 2048), ({"factor": 1.5}, 2048)],
)
def test_yarn_leads_further_than_the_model_was_trained(llama: Path, changes: dict[str, Any], expected: int) -> None:
    """To the scheduler as well."""
    edit_config(llama, rope_parameters={**YARN_ROPE, **changes})
    assert read_config(llama).max_context == expected
    assert _model_limits(llama).max_context == expected


def test_stretched_positions_have_a_namespace_of_their_own(llama: Path) -> None:
    edit_config(llama, rope_parameters=YARN_ROPE)
    described = read_config(llama).rope.describe()
    edit_config(llama, rope_parameters={**YARN_ROPE, "attention_factor": 2.0})
    assert read_config(llama).rope.describe() != described


YARNS = {
    "plain": {},
    "whole-bounds": {"truncate": False},
    "bounds": {"beta_fast": 8.0, "beta_slow": 2},
    "length": {"attention_factor": 0.7},
    "mscale": {"mscale": 0.8, "mscale_all_dim": 0.4},
    "derived-factor": {"factor": None},
    "no-stretch": {"factor": 1.0},
}


@pytest.mark.parametrize("name", YARNS)
def test_yarn_is_that_of_transformers(llama: Path, name: str) -> None:
    edit_config(llama, rope_parameters={**YARN_ROPE, **YARNS[name]}, head_dim=64)
    inv_freq, length = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.from_pretrained(llama))
    rope = read_config(llama).rope
    torch.testing.assert_close(inverse_frequencies(rope, 64), inv_freq, atol=0, rtol=1e-6)
    assert rope.length == pytest.approx(length)


def test_dynamic_positions_are_plain_within_the_context(llama: Path) -> None:
    edit_config(llama, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, head_dim=64)
    inv_freq, length = ROPE_INIT_FUNCTIONS["dynamic"](AutoConfig.from_pretrained(llama), seq_len=2048)
    config = read_config(llama)
    assert config.max_context == 2048
    assert length == 1
    torch.testing.assert_close(inverse_frequencies(config.rope, 64), inv_freq, atol=0, rtol=1e-6)


def test_both_rope_spellings_read_alike(llama: Path) -> None:
    edit_config(llama, rope_parameters=LLAMA3_ROPE)
    new = read_config(llama).rope
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    edit_config(llama, rope_parameters=None, rope_scaling=scaling, rope_theta=LLAMA3_ROPE["rope_theta"])
    assert read_config(llama).rope == new == RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 64)


def test_end_tokens_come_from_the_generation_config_first(llama: Path) -> None:
    assert read_config(llama).eos_token_ids == (257,)
    (llama / "generation_config.json").write_text('{"eos_token_id": [257, 9]}')
    assert read_config(llama).eos_token_ids == (257, 9)
    (llama / "generation_config.json").unlink()
    edit_config(llama, eos_token_id=None)
    assert read_config(llama).eos_token_ids == ()


def test_config_that_is_no_json(llama: Path) -> None:
    (llama / "config.json").write_text("{")
    assert "JSON" in refusal(llama)
    (llama / "config.json").unlink()
    assert "no such file" in refusal(llama)
