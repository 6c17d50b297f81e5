"""Makes the demo model: `python -m demo.train`. Collects, tokenizes, trains in two phases, exports, evaluates.

Phase 1 does most of the learning at a short context, where a step is cheap. Phase 2 is short and doubles the context:
without it the model falls apart past the positions that it was trained on.

A checkpoint (weights, optimiser state, step) is written under --work every few steps; --resume goes on from it and
sees the same batches and the same dropout as a run that was never stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from demo import corpus
from demo.batches import batches
from demo.corpus import Document
from demo.evaluate import RESULTS, evaluate
from demo.export import MODEL_FOLDER, write_model
from demo.formats import answer, signed
from demo.network import Llama, Shape
from demo.tokenizer import train_tokenizer, write_tokenizer

DROPOUT, WEIGHT_DECAY, CLIP_NORM = 0.1, 0.1, 1.0
WARM_UP_SHARE, FINAL_RATE_SHARE = 0.04, 0.02
CHECKPOINT_STEPS, REPORT_STEPS = 100, 10


@dataclass(frozen=True, slots=True)
class Phase:
    """One cosine schedule. Rates are peaks: `muon_rate` for the matrices, `adam_rate` for embedding and norms."""

    name: str
    context_tokens: int
    rows: int
    steps: int
    muon_rate: float
    adam_rate: float
    seed: int

    def rate_share(self, step: int) -> float:
        """Share of the peak rate at `step`: linear warm-up, then a cosine down to FINAL_RATE_SHARE."""
        warm_up = max(1, int(self.steps * WARM_UP_SHARE))
        if step < warm_up:
            return (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.steps - warm_up)
        return FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))


class Trainer:
    """The model and its two optimisers: Muon for the layers' matrices, AdamW for the embedding and the norms."""

    def __init__(self, model: Llama) -> None:
        self.model = model
        matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
        others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
        self.optimisers: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(matrices, lr=1.0, weight_decay=WEIGHT_DECAY),
            "adam": torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0),
        }

    def step(self, batch: Tensor, phase: Phase, step: int) -> float:
        """One update on batch [rows, context + 1]; returns its mean loss in nats a token."""
        torch.manual_seed(phase.seed * 1_000_003 + step)
        share = phase.rate_share(step)
        for name, peak in (("muon", phase.muon_rate), ("adam", phase.adam_rate)):
            self.optimisers[name].param_groups[0]["lr"] = peak * share
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        for optimiser in self.optimisers.values():
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return loss.item()

    def save(self, path: Path, *, phase: Phase, step: int, seconds: float) -> None:
        """Writes weights and optimiser state after `step` updates of `phase`, whole or not at all."""
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, optimiser in self.optimisers.items():
            for index, state in optimiser.state_dict()["state"].items():
                tensors |= {f"{name}/{index}/{key}": value for key, value in state.items()}
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, metadata={"phase": phase.name, "step": str(step), "seconds": repr(seconds)})
        partial.replace(path)

    def load(self, path: Path) -> dict[str, str]:
        """Reads what `save` wrote and returns its metadata."""
        with safe_open(path, "pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping
            metadata: dict[str, str] = stored.metadata()
        weights = {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
        self.model.load_state_dict(weights)
        for name, optimiser in self.optimisers.items():
            state: dict[int, dict[str, Tensor]] = {}
            for path_in_state, tensor in tensors.items():
                owner, _, rest = path_in_state.partition("/")
                if owner == name:
                    index, _, key = rest.partition("/")
                    state.setdefault(int(index), {})[key] = tensor
            optimiser.load_state_dict({**optimiser.state_dict(), "state": state})
        return metadata


def phases_of(arguments: argparse.Namespace) -> tuple[Phase, Phase]:
    return (
        Phase("short", 256, 16, arguments.steps, 0.02, 3e-3, arguments.seed),
        Phase("long", 512, 8, arguments.long_steps, 0.005, 1e-3, arguments.seed + 1),
    )


def train(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    phases: Sequence[Phase],
    *,
    checkpoint: Path,
    model_folder: Path,
    resume: bool,
) -> tuple[Llama, float]:
    """Runs the phases and returns the model and the seconds spent in steps, those before a resumption included."""
    torch.manual_seed(phases[0].seed)
    model = Llama(Shape(), dropout=DROPOUT)
    trainer = Trainer(model)
    done: dict[str, str] = {}
    if resume and checkpoint.exists():
        done = trainer.load(checkpoint)
        print(f"resuming phase {done['phase']} after step {done['step']}", flush=True)
    spent = float(done.get("seconds", "0"))
    names = [phase.name for phase in phases]
    for phase in phases[names.index(done["phase"]) if done else 0 :]:
        first = int(done["step"]) if done.get("phase") == phase.name else 0
        spent = _run_phase(trainer, phase, first, documents, tokenizer, checkpoint, spent)
        write_model(model, model_folder)
    return model.eval(), spent


def _run_phase(
    trainer: Trainer,
    phase: Phase,
    first: int,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    checkpoint: Path,
    spent: float,
) -> float:
    source = batches(documents, tokenizer, context_tokens=phase.context_tokens, rows=phase.rows, seed=phase.seed)
    trainer.model.train()
    recent: list[float] = []
    started = time.perf_counter()
    for step, batch in enumerate(islice(source, first, phase.steps), start=first):
        recent.append(trainer.step(batch, phase, step))
        seconds = time.perf_counter() - started
        if (step + 1) % REPORT_STEPS == 0 or step + 1 == phase.steps:
            each = seconds / (step + 1 - first)
            left = each * (phase.steps - step - 1)
            loss = sum(recent) / len(recent)
            print(
                f"{phase.name} {step + 1}/{phase.steps}  loss {loss:.3f}  {each:.2f} s/step  {left / 60:.1f} min left",
                flush=True,
            )
            recent.clear()
        if (step + 1) % CHECKPOINT_STEPS == 0 or step + 1 == phase.steps:
            trainer.save(checkpoint, phase=phase, step=step + 1, seconds=spent + seconds)
    return spent + time.perf_counter() - started


def tokenizer_texts(documents: Sequence[Document]) -> list[str]:
    """Training text in the forms that the model meets."""
    texts: list[str] = []
    for document in documents:
        texts.append(document.text)
        if document.name:
            texts.append(f"user: What does {document.name} do?\nassistant:\n{answer(document)}")
        if document.signature:
            texts.append(signed(document))
    return texts


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.train", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2200, help="updates at context 256 (default %(default)s)")
    parser.add_argument("--long-steps", type=int, default=240, help="updates at context 512 (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default %(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="seed of weights, order and dropout (default %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=MODEL_FOLDER, help="folder for the model (default: the shipped one)"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("build/demo"), help="folder for checkpoints (default %(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint under --work")
    parser.add_argument("--skip-evaluation", action="store_true", help="stop after the export")
    arguments = parser.parse_args(words)
    for name in ("steps", "long_steps", "threads"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}")
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    documents = corpus.collect()
    training = [document for document in documents if not document.is_held_out]
    print(f"Python {platform.python_version()}: {len(documents)} documents, {len(training)} to train on", flush=True)
    tokenizer = train_tokenizer(tokenizer_texts(training))
    write_tokenizer(tokenizer, arguments.out, context_tokens=Shape().context_tokens)
    phases = phases_of(arguments)
    _, seconds = train(
        training,
        tokenizer,
        phases,
        checkpoint=arguments.work / "checkpoint.safetensors",
        model_folder=arguments.out,
        resume=arguments.resume,
    )
    run = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "corpus_sha256": corpus.digest(documents),
        "documents": len(documents),
        "held_out_documents": len(documents) - len(training),
        "training_characters": sum(len(document.text) for document in training),
        "threads": arguments.threads,
        "training_seconds": round(seconds),
        "phases": [asdict(phase) for phase in phases],
    }
    (arguments.work / "run.json").write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
    if not arguments.skip_evaluation:
        # The recorded figures belong to the shipped weights; a trial run's stay beside its checkpoint.
        shipped = arguments.out.resolve() == MODEL_FOLDER
        evaluate(arguments.out, arguments.work, RESULTS if shipped else arguments.work / "results.json")


if __name__ == "__main__":
    main()
