"""The shipped demo model: small, complete, loadable, and better than counting triples of tokens."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from demo import corpus
from demo.evaluate import RESULTS, TEST_MODULES
from demo.export import MODEL_FOLDER, read_model
from demo.formats import END
from demo.measure import measured, model_bits
from demo.network import Llama, Shape
from demo.sample import answer
from demo.tokenizer import END_ID
from demo.train import Phase, Trainer

transformers = pytest.importorskip("transformers", reason="transformers is a development dependency")

SHIPPED_BYTES_MAX = 8_000_000
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
TEXTS = (
    "Return the number of items.",
    "  indented\n\n\ttabs and   runs of spaces  ",
    "user: What does `a.b` do?\nassistant:\n",
    "café — naïve 日本語 😀 \u202fthin",
    "e\u0301 combining, \x00 NUL, 1e-9, don't",
)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="module")
def model() -> Llama:
    return read_model(MODEL_FOLDER)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def hf_tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL_FOLDER)


def test_exactly_the_files_needed_and_no_more_than_eight_megabytes() -> None:
    files = sorted(path for path in MODEL_FOLDER.iterdir() if path.name != "__pycache__")

    assert [path.name for path in files] == sorted(FILES)
    assert sum(path.stat().st_size for path in files) <= SHIPPED_BYTES_MAX


def load_in_transformers(folder: Path, caplog: pytest.LogCaptureFixture) -> tuple[Any, list[str]]:
    """The model, and everything that was said or recorded against it on the way."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    finally:
        logger.removeHandler(caplog.handler)
    complaints = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return loaded, complaints + [f"{kind}: {found}" for kind, found in info.items() if found]


def test_transformers_loads_it_without_a_word_and_computes_the_same(
    model: Llama, hf_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, complaints = load_in_transformers(MODEL_FOLDER, caplog)

    assert complaints == []
    assert theirs.dtype == torch.bfloat16
    assert theirs.config.max_position_embeddings == 512
    ids = torch.tensor([hf_tokenizer.encode("user: What does json.dumps do?\nassistant:\nSerialize")])
    with torch.no_grad():
        torch.testing.assert_close(theirs.float()(ids).logits, model(ids), atol=1e-3, rtol=1e-3)


def test_a_missing_tensor_would_be_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(MODEL_FOLDER, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    _, complaints = load_in_transformers(tmp_path, caplog)

    assert any("model.norm.weight" in complaint for complaint in complaints)
    assert len(complaints) >= 2, "both the log and the loading report should name it"


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_gives_text_back_exactly(tokenizer: Tokenizer, hf_tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text).ids

    assert tokenizer.decode(ids) == text
    assert hf_tokenizer.encode(text) == ids
    assert hf_tokenizer.decode(ids) == text


def test_one_special_token_begins_ends_and_pads(tokenizer: Tokenizer, hf_tokenizer: Any) -> None:
    assert tokenizer.encode(END).ids == [END_ID]
    assert (hf_tokenizer.bos_token_id, hf_tokenizer.eos_token_id, hf_tokenizer.pad_token_id) == (END_ID,) * 3
    assert hf_tokenizer.all_special_ids == [END_ID]
    assert tokenizer.decode(tokenizer.encode(f"a{END}").ids) == "a"


def test_chat_template_puts_a_system_message_first_as_plain_text(hf_tokenizer: Any) -> None:
    messages = [{"role": "system", "content": " Be short. "}, {"role": "user", "content": "What is a list?"}]

    text = hf_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    assert text == f"{END}Be short.\n\nuser: What is a list?\nassistant:\n"


def test_the_next_turn_extends_the_tokens_that_the_last_one_left(hf_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "What is a list?"}]
    first = hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    written = [*hf_tokenizer.encode("Return a list.\n\nThe items"), END_ID]
    messages += [
        {"role": "assistant", "content": hf_tokenizer.decode(written, skip_special_tokens=True)},
        {"role": "user", "content": "And a set?"},
    ]

    second = hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    assert second[: len(first) + len(written)] == first + written
    assert hf_tokenizer.decode(second).endswith("user: And a set?\nassistant:\n")


def test_held_out_documents_take_clearly_fewer_bits_than_the_trigram(
    model: Llama, tokenizer: Tokenizer, results: dict[str, Any]
) -> None:
    stored = {entry["key"]: entry for entry in results["test_documents"]}
    found = [document for document in corpus.collect(TEST_MODULES) if document.key in stored]
    if len(found) < len(stored) // 2:
        pytest.skip(f"only {len(found)} of the {len(stored)} held-out documents are in this Python's library")

    items = [measured(document, tokenizer) for document in found]
    own_bits = sum(sum(model_bits(model, item.ids)) for item in items)
    trigram_bits = sum(stored[item.document.key]["trigram_bits"] for item in items)

    assert all(document.is_held_out for document in found)
    assert own_bits < 0.93 * trigram_bits


def test_recorded_figures_name_the_python_and_the_corpus(results: dict[str, Any]) -> None:
    run, held_out = results["run"], results["held_out"]["little_overlap"]

    assert re.fullmatch(r"3\.\d+\.\d+", run["python"])
    assert re.fullmatch(r"[0-9a-f]{64}", run["corpus_sha256"])
    assert held_out["model"] < 0.93 * held_out["trigram"]
    assert [phase["context_tokens"] for phase in run["phases"]] == [256, 512]


@pytest.mark.wide
def test_most_answers_end_by_themselves(model: Llama, tokenizer: Tokenizer) -> None:
    names = ("json.dumps", "Thread.start", "str.split", "os.listdir", "Logger.info", "deque.append")

    drawn = [answer(model, tokenizer, f"user: What does {name} do?\n", seed=index) for index, name in enumerate(names)]

    assert sum(reply.ended for reply in drawn) >= 4
    assert not any("user:" in reply.text for reply in drawn)


def test_a_resumed_run_goes_on_as_the_whole_one_would(tmp_path: Path) -> None:
    shape = Shape(vocabulary=32, hidden=16, layers=1, heads=2, kv_heads=1, mlp=24, context_tokens=16)
    phase = Phase("short", 16, 2, steps=4, muon_rate=0.02, adam_rate=3e-3, seed=1)
    batch = torch.arange(34).reshape(2, 17) % 32

    def fresh(seed: int) -> Trainer:
        torch.manual_seed(seed)
        return Trainer(Llama(shape, dropout=0.1))

    whole, resumed = fresh(0), fresh(99)
    for step in range(2):
        whole.step(batch, phase, step)
    whole.save(tmp_path / "checkpoint.safetensors", phase=phase, step=2, seconds=1.5)
    metadata = resumed.load(tmp_path / "checkpoint.safetensors")

    assert metadata == {"phase": "short", "step": "2", "seconds": "1.5"}
    assert [whole.step(batch, phase, step) for step in (2, 3)] == [resumed.step(batch, phase, step) for step in (2, 3)]
