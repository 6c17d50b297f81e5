"""The demo model's text and the yardstick it is held against: same input, same documents, same figures."""

from __future__ import annotations

import hashlib
import random
from itertools import islice

import pytest
import torch
from tokenizers import Tokenizer

from demo import corpus
from demo.batches import batches
from demo.corpus import Document
from demo.formats import ANSWER_CHARS_MAX, answer, render
from demo.tokenizer import END_ID, VOCABULARY_SIZE, train_tokenizer
from demo.train import Phase, parse
from demo.trigram import Trigram

FEW_MODULES = ("json", "textwrap", "zlib", "_struct", "asyncio")


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return corpus.collect(FEW_MODULES)


def test_collection_is_deterministic(documents: list[Document]) -> None:
    again = corpus.collect(reversed(FEW_MODULES))

    assert again == documents
    assert corpus.digest(again) == corpus.digest(documents)
    assert corpus.digest(documents[::-1]) != corpus.digest(documents)


def test_every_kind_of_source_is_found(documents: list[Document]) -> None:
    by_name = {document.name: document for document in documents}

    assert by_name["json.dumps"].signature.startswith("def dumps(obj, *, skipkeys=False")
    assert by_name["json.encoder.JSONEncoder"].signature == "class JSONEncoder(object):"
    assert by_name["zlib.crc32"].signature == "def crc32(data, value=0, /):"
    assert any(document.origin == "comment" for document in documents)


def test_texts_are_distinct_and_the_hold_out_depends_on_nothing_else(documents: list[Document]) -> None:
    keys = [document.key for document in documents]
    held_out = {document.key for document in documents if document.is_held_out}

    assert len(set(keys)) == len(keys)
    assert held_out
    assert held_out == {d.key for d in corpus.collect(("asyncio",)) if d.is_held_out} | {
        d.key for d in corpus.collect(FEW_MODULES[:4]) if d.is_held_out
    }
    assert Document("a", "", "Some  Text", "docstring").key == Document("b", "def b():", "some text", "comment").key


def test_source_gives_docstrings_signatures_and_comment_blocks() -> None:
    source = (
        '"""Of the module."""\n'
        "class Kettle(Vessel):\n"
        '    """Boils."""\n'
        "    async def boil(self, /, litres: float = 1.0):\n"
        '        """Boil some:\n\n            water\n        Then stop."""\n'
        "# A block of comment lines that is long enough to be prose,\n"
        "# and that goes on over a second line to say a little more.\n"
        "x = 1  # not this one\n"
    )

    found = list(corpus.documents_in_source("kitchen", source))

    assert [(d.name, d.signature, d.text) for d in found[:3]] == [
        ("kitchen", "", "Of the module."),
        ("kitchen.Kettle", "class Kettle(Vessel):", "Boils."),
        ("kitchen.Kettle.boil", "def boil(self, /, litres: float=1.0):", "Boil some:\n\n    water\nThen stop."),
    ]
    assert [d.origin for d in found] == ["docstring", "docstring", "docstring", "comment"]
    assert list(corpus.documents_in_source("broken", "def (")) == []


def test_an_answer_is_whole_paragraphs_within_its_limit() -> None:
    paragraph = "word " * 40
    document = Document("a.b", "", "\n\n".join([paragraph.strip()] * 20), "docstring")

    assert len(answer(document)) <= ANSWER_CHARS_MAX
    assert document.text.startswith(answer(document) + "\n\n")


def test_forms_come_in_their_shares() -> None:
    document = Document("a.b", "def b(x):", "Do it.", "docstring")
    rng = random.Random(3)
    drawn = [render(document, rng) for _ in range(2000)]

    chats = sum(text.endswith("\nassistant:\nDo it.") for text in drawn)
    signatures = drawn.count('def b(x):\n    """Do it."""')
    assert chats == pytest.approx(1000, abs=100)
    assert signatures == pytest.approx(500, abs=80)
    assert drawn.count("Do it.") == 2000 - chats - signatures


@pytest.fixture(scope="module")
def tokenizer(documents: list[Document]) -> Tokenizer:
    return train_tokenizer([document.text for document in documents] + [render_source(documents)])


def render_source(documents: list[Document]) -> str:
    """Enough distinct words to fill the vocabulary from a few modules."""
    return " ".join(hashlib.sha256(document.text.encode()).hexdigest() for document in documents)


def test_the_tokenizer_is_deterministic(documents: list[Document], tokenizer: Tokenizer) -> None:
    again = train_tokenizer([document.text for document in documents] + [render_source(documents)])

    assert again.to_str() == tokenizer.to_str()
    assert tokenizer.get_vocab_size() == VOCABULARY_SIZE


def test_batches_are_a_function_of_the_seed_and_windows_share_one_token(
    documents: list[Document], tokenizer: Tokenizer
) -> None:
    def first(seed: int) -> list[torch.Tensor]:
        return list(islice(batches(documents, tokenizer, context_tokens=32, rows=4, seed=seed), 3))

    one, same, other = first(5), first(5), first(6)

    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0], other[0])
    assert one[0].shape == (4, 33)


def test_trigram_is_a_distribution_and_prefers_what_it_saw() -> None:
    sequences = [[1, 2, 3, END_ID], [1, 2, 4, END_ID], [1, 2, 3, END_ID], [5, 2, 6, END_ID]]
    trigram = Trigram(sequences, vocabulary=16, start=END_ID)

    for context in ((1, 2), (5, 2), (9, 9), (END_ID, END_ID)):
        assert sum(trigram.probability(*context, word) for word in range(16)) == pytest.approx(1.0)
    assert trigram.probability(1, 2, 3) > trigram.probability(1, 2, 4) > trigram.probability(1, 2, 6)
    assert sum(trigram.bits([1, 2, 3, END_ID])) < sum(trigram.bits([9, 9, 9, END_ID]))


def test_the_rate_warms_up_and_comes_down_by_steps() -> None:
    phase = Phase("short", 256, 16, steps=100, muon_rate=0.02, adam_rate=3e-3, seed=0)
    shares = [phase.rate_share(step) for step in range(100)]

    assert shares[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shares[4:] == sorted(shares[4:], reverse=True)
    assert shares[-1] == pytest.approx(0.02, abs=0.001)


def test_a_senseless_number_of_steps_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--steps", "0"])

    assert "--steps must be at least 1, not 0" in capsys.readouterr().err
