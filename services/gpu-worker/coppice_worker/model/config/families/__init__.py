"""The families of models, by the architecture that a config.json names. A new one is a file and a line here."""

from __future__ import annotations

from coppice_worker.model.config.families.gemma2 import GEMMA2
from coppice_worker.model.config.families.llama import LLAMA
from coppice_worker.model.config.families.mistral import MISTRAL
from coppice_worker.model.config.families.qwen2 import QWEN2
from coppice_worker.model.config.families.qwen3 import QWEN3
from coppice_worker.model.config.families.traits import Family

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Gemma2ForCausalLM": GEMMA2,
}
