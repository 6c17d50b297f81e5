"""A checkpoint whose tokenizer waits at texts that a test marked, and remembers which texts it was given."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from coppice_scheduler.edge.text.checkpoint_text import CheckpointText, load_checkpoint_text

HELD = "HELD"  # what a text that is to wait begins with
_WAIT_S = 60


class HeldTokenizer:
    """The library's tokenizer in all but that."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.texts: list[str] = []  # first 20 characters of each that was begun
        self.let_go = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        for text in texts:
            self.texts.append(text[:20])
            if text.startswith(HELD):
                assert self.let_go.wait(_WAIT_S), "nobody let it go"
        return self._raw.encode_batch_fast(texts, **options)


def held_checkpoint(folder: Path) -> tuple[CheckpointText, HeldTokenizer]:
    checkpoint = load_checkpoint_text(folder)
    tokenizer = HeldTokenizer(checkpoint.raw)
    return replace(checkpoint, raw=tokenizer), tokenizer
