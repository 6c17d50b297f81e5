"""Answers from the shipped model, drawn one token at a time. Slow and simple: there is no cache here at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from demo.formats import END
from demo.network import Llama
from demo.tokenizer import END_ID

TEMPERATURE, TOP_P, ANSWER_TOKENS_MAX = 0.7, 0.9, 80

PROMPTS = (
    "user: What does json.dumps do?\n",
    "user: What is a generator?\n",
    "user: How do I use os.path.join?\n",
    "user: What does Thread.start do?\n",
    "user: Tell me about the with statement.\n",
    "user: Explain str.split.\n",
    "You answer questions about Python. Keep your answers short.\n\nuser: What does socket.close do?\n",
    "user: What is collections.OrderedDict for?\n",
    "user: What does Frobnicator.reset do?\n",
    f"user: What does shutil.copy do?\nassistant:\nCopy a file.{END}user: What does shutil.rmtree do?\n",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """`ended` says that the model stopped by itself, `tokens` how many it wrote, END not among them."""

    prompt: str
    text: str
    ended: bool
    tokens: int


@torch.no_grad()
def answer(
    model: Llama,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    seed: int,
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
) -> Answer:
    """The reply to `prompt` (the chat form without its leading END and without the assistant's turn)."""
    generator = torch.Generator().manual_seed(seed)
    ids = [END_ID, *tokenizer.encode(prompt + "assistant:\n").ids]
    written: list[int] = []
    while len(written) < ANSWER_TOKENS_MAX:
        logits = model(torch.tensor([ids + written]))[0, -1].float()
        token = _draw(torch.softmax(logits / temperature, dim=-1), top_p, generator)
        if token == END_ID:
            return Answer(prompt, tokenizer.decode(written), ended=True, tokens=len(written))
        written.append(token)
    return Answer(prompt, tokenizer.decode(written), ended=False, tokens=len(written))


def answers(model: Llama, tokenizer: Tokenizer, prompts: Sequence[str] = PROMPTS, *, seed: int = 0) -> list[Answer]:
    """One answer for each prompt; the seeds count up from `seed`."""
    return [answer(model, tokenizer, prompt, seed=seed + index) for index, prompt in enumerate(prompts)]


def _draw(chances: torch.Tensor, top_p: float, generator: torch.Generator) -> int:
    ordered, tokens = chances.sort(descending=True)
    kept = ordered.cumsum(0) - ordered < top_p
    return int(tokens[torch.multinomial(ordered * kept, 1, generator=generator)])
