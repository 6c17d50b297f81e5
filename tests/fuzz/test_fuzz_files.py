"""Files that operators get from elsewhere: a tenants file, a checkpoint's configuration and header."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch

from coppice.errors import UsageError
from coppice.tenants.file import parse_tenants
from coppice_worker.model.config.config import CONFIG_FILE, GENERATION_CONFIG_FILE, ModelConfig, read_config
from coppice_worker.model.config.errors import CheckpointError
from coppice_worker.model.loader import INDEX_FILE, SINGLE_FILE, Checkpoint
from tests.fuzz.fuzzing import CORPUS, LONG_S, corpus, fuzz

DURATIONS = [pytest.param(0.0, id="short"), pytest.param(LONG_S, id="long", marks=pytest.mark.long)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("for_s", DURATIONS)
def test_a_tenants_file_is_right_or_refused(for_s: float) -> None:
    def target(content: bytes) -> None:
        with suppress(UsageError):
            parse_tenants(Path("tenants.yaml"), content)

    example = (ROOT / "deploy" / "tenants.example.yaml").read_bytes()
    fuzz(target, [example, *corpus("tenants")], for_s=for_s)


@pytest.mark.parametrize("for_s", DURATIONS)
@pytest.mark.parametrize("name", [CONFIG_FILE, GENERATION_CONFIG_FILE])
def test_a_configuration_is_right_or_refused(tmp_path: Path, name: str, for_s: float) -> None:
    (tmp_path / CONFIG_FILE).write_bytes((CORPUS / "config" / "llama.json").read_bytes())

    def target(content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        with suppress(CheckpointError):
            read_config(tmp_path)

    fuzz(target, corpus("config"), for_s=for_s)


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    """Of a checkpoint that has only that so far."""
    (tmp_path / CONFIG_FILE).write_bytes((CORPUS / "config" / "llama.json").read_bytes())
    return read_config(tmp_path)


def open_or_refuse(folder: Path, config: ModelConfig) -> None:
    with suppress(CheckpointError):
        Checkpoint(folder, config, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("for_s", DURATIONS)
def test_a_file_of_weights_is_right_or_refused(tmp_path: Path, config: ModelConfig, for_s: float) -> None:
    """Its header is edited as text; the eight bytes before it say its length, and now and then something else."""

    def target(header: bytes) -> None:
        length = len(header) if len(header) % 5 else len(header) * 3
        (tmp_path / SINGLE_FILE).write_bytes(length.to_bytes(8, "little") + header + bytes(64))
        open_or_refuse(tmp_path, config)

    fuzz(target, corpus("header"), for_s=for_s)


@pytest.mark.parametrize("for_s", DURATIONS)
def test_an_index_of_files_is_right_or_refused(tmp_path: Path, config: ModelConfig, for_s: float) -> None:
    def target(content: bytes) -> None:
        (tmp_path / INDEX_FILE).write_bytes(content)
        open_or_refuse(tmp_path, config)

    fuzz(target, corpus("index"), for_s=for_s)
