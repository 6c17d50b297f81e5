"""Measures the model on the held-out documents, beside the trigram: `python -m demo.evaluate`.

Writes results.json: how the run was made, the figures, ten samples, and a fixed sample of held-out documents (by hash,
with the trigram's bits for each) against which the unit tests hold the shipped weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer

from demo import corpus, sample
from demo.batches import epoch_stream
from demo.corpus import Document
from demo.export import MODEL_FOLDER, read_model
from demo.formats import ANSWER_CHARS_MAX
from demo.measure import Measured, answer_bits_per_byte, bits_per_byte, measured, model_bits, mostly_seen
from demo.network import Llama
from demo.tokenizer import END_ID
from demo.trigram import Trigram

RESULTS = Path(__file__).resolve().parent / "results.json"
# A test should not have to read the whole library: these have plenty of prose and outlive a few versions of Python.
TEST_MODULES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "tkinter", "unittest", "xml")
TEST_DOCUMENTS = 40
TEST_TOKENS_MAX = 200
NAMED_QUESTIONS = 40


def evaluate(model_folder: Path, work: Path, results: Path = RESULTS) -> dict[str, object]:
    """Measures what lies in `model_folder`, with run.json from `work` if there is one, and writes `results`."""
    documents = corpus.collect()
    training = [document for document in documents if not document.is_held_out]
    held_out = [document for document in documents if document.is_held_out]
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    model = read_model(model_folder)
    print(f"measuring {len(held_out)} held-out documents", flush=True)
    items = [measured(document, tokenizer) for document in held_out]
    of_model = [model_bits(model, item.ids) for item in items]
    trigram = Trigram(trigram_texts(training, tokenizer), vocabulary=tokenizer.get_vocab_size(), start=END_ID)
    of_trigram = [trigram.bits(item.ids) for item in items]
    fresh = [not was_seen for was_seen in mostly_seen(items, training)]
    run_file = work / "run.json"
    print("drawing answers", flush=True)
    outcome: dict[str, object] = {
        "run": json.loads(run_file.read_text(encoding="utf-8")) if run_file.exists() else {},
        "held_out": figures(items, of_model, of_trigram, fresh),
        "answers": answer_figures(model, tokenizer, training, held_out),
        "samples": [asdict(answer) for answer in sample.answers(model, tokenizer)],
        "sample_settings": {
            "temperature": sample.TEMPERATURE,
            "top_p": sample.TOP_P,
            "max_tokens": sample.ANSWER_TOKENS_MAX,
            "seeds": "0 to 9",
        },
        "test_documents": documents_for_tests(items, of_model, of_trigram, fresh),
    }
    results.write_text(json.dumps(outcome, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps({key: outcome[key] for key in ("held_out", "answers")}, indent=1), flush=True)
    return outcome


def trigram_texts(training: Sequence[Document], tokenizer: Tokenizer) -> list[list[int]]:
    """One epoch as the model sees it, and in full the documents that the chat form shortens: no text is kept back."""
    stream = epoch_stream(training, tokenizer, seed=0)
    ends = (stream == END_ID).nonzero()[0].tolist()
    sequences = [stream[a + 1 : b + 1].tolist() for a, b in pairwise(ends)]
    long_texts = [document.text for document in training if document.name and len(document.text) > ANSWER_CHARS_MAX]
    return sequences + [[*encoding.ids, END_ID] for encoding in tokenizer.encode_batch(long_texts)]


def figures(
    items: Sequence[Measured],
    of_model: Sequence[Sequence[float]],
    of_trigram: Sequence[Sequence[float]],
    fresh: Sequence[bool],
) -> dict[str, object]:
    """Bits per byte of both: over the `fresh` documents, which is the figure to go by, and over other parts."""

    def both(chosen: Sequence[bool]) -> dict[str, float]:
        kept = [index for index, wanted in enumerate(chosen) if wanted]
        some = [items[index] for index in kept]
        return {
            "documents": len(some),
            "model": round(bits_per_byte(some, [of_model[index] for index in kept]), 4),
            "trigram": round(bits_per_byte(some, [of_trigram[index] for index in kept]), 4),
        }

    late = [bit for bits in of_model for bit in bits[384:512]]
    return {
        "bytes": sum(item.text_bytes for item in items),
        "tokens": sum(len(item.ids) for item in items),
        "little_overlap": both(fresh),
        "all": both([True] * len(items)),
        "little_overlap_chat": both([new and item.form == "chat" for new, item in zip(fresh, items, strict=True)]),
        "little_overlap_signature": both([new and i.form == "signature" for new, i in zip(fresh, items, strict=True)]),
        "little_overlap_plain": both([new and item.form == "plain" for new, item in zip(fresh, items, strict=True)]),
        "chat_answer_given_question": {
            "model": round(answer_bits_per_byte(items, of_model), 4),
            "trigram": round(answer_bits_per_byte(items, of_trigram), 4),
        },
        "bits_per_token": round(sum(map(sum, of_model)) / sum(map(len, of_model)), 4),
        "bits_per_token_at_384_to_512": round(statistics.fmean(late), 4) if late else None,
    }


def answer_figures(
    model: Llama, tokenizer: Tokenizer, training: Sequence[Document], held_out: Sequence[Document]
) -> dict[str, object]:
    """How often answers end by themselves, are empty or begin with the right sentence; how far they copy."""
    outcome: dict[str, object] = {}
    everything = " ".join(" ".join(document.text.split()) for document in training)
    for label, documents in (("trained_functions", training), ("held_out_functions", held_out)):
        named = [document for document in documents if document.signature.startswith("def ")]
        chosen = named[:: max(1, len(named) // NAMED_QUESTIONS)][:NAMED_QUESTIONS]
        prompts = [f"user: What does {'.'.join(document.name.split('.')[-2:])} do?\n" for document in chosen]
        drawn = sample.answers(model, tokenizer, prompts, seed=1000)
        runs = [_verbatim_words(answer.text, everything) for answer in drawn]
        outcome[label] = {
            "asked": len(drawn),
            "ended_by_themselves": sum(answer.ended for answer in drawn),
            "empty": sum(not answer.text.strip() for answer in drawn),
            "first_sentence_right": sum(
                _first_sentence(answer.text) == _first_sentence(document.text)
                for answer, document in zip(drawn, chosen, strict=True)
            ),
            "median_tokens": statistics.median(answer.tokens for answer in drawn),
            "verbatim_words_median": statistics.median(runs),
            "verbatim_words_longest": max(runs),
        }
    return outcome


def documents_for_tests(
    items: Sequence[Measured],
    of_model: Sequence[Sequence[float]],
    of_trigram: Sequence[Sequence[float]],
    fresh: Sequence[bool],
) -> list[dict[str, object]]:
    """TEST_DOCUMENTS `fresh` held-out documents of TEST_MODULES, evenly spread, with both models' bits."""
    near = frozenset(corpus.collect(TEST_MODULES))
    short = [
        index
        for index, item in enumerate(items)
        if fresh[index] and item.document in near and len(item.ids) <= TEST_TOKENS_MAX
    ]
    chosen = short[:: max(1, len(short) // TEST_DOCUMENTS)][:TEST_DOCUMENTS]
    return [
        {
            "name": items[index].document.name,
            "key": items[index].document.key,
            "model_bits": round(sum(of_model[index]), 2),
            "trigram_bits": round(sum(of_trigram[index]), 2),
        }
        for index in chosen
    ]


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def _verbatim_words(text: str, everything: str) -> int:
    """The longest run of words of `text` that stands in `everything`."""
    words = text.split()
    longest = 0
    for start in range(len(words)):
        while start + longest < len(words) and " ".join(words[start : start + longest + 1]) in everything:
            longest += 1
    return longest


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.evaluate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", type=Path, default=MODEL_FOLDER, help="folder of the model (default: the shipped one)"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("build/demo"), help="folder with run.json (default %(default)s)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to write (default: demo/results.json)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    evaluate(arguments.model, arguments.work, arguments.results)


if __name__ == "__main__":
    main()
