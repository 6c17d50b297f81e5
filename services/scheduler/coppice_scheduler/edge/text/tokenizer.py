"""Text to packed tokens. The work is done in a thread: a long prompt must not hold up other streams."""

from __future__ import annotations

import asyncio

import numpy as np
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import ByteLevel

from coppice_scheduler.edge.text.checkpoint_text import CheckpointText

TOKEN_DTYPE = np.dtype("<u4")


class Tokenizer:
    """Encodes prompts of one checkpoint."""

    def __init__(self, checkpoint: CheckpointText) -> None:
        self.raw: RawTokenizer = checkpoint.raw
        self.vocab_size: int = checkpoint.raw.get_vocab_size(with_added_tokens=True)
        # In a byte-level vocabulary every byte of the text is in some token, so the text's length bounds the number of
        # tokens from below. A normalizer may shrink the text, and other vocabularies may drop parts of it.
        covers_all = isinstance(checkpoint.raw.decoder, ByteLevel) and checkpoint.raw.normalizer is None
        vocab = checkpoint.raw.get_vocab(with_added_tokens=True)
        self._longest_token_chars = max(map(len, vocab), default=1) if covers_all else 0

    def at_least_tokens(self, text: str) -> int:
        """A lower bound of the tokens of `text`, without encoding it. 0 where nothing is known."""
        return len(text) // self._longest_token_chars if self._longest_token_chars else 0

    def encode_now(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Packed tokens of `text`. A completion gets the special tokens; a rendered chat already has its own.

        What tokenizer.json adds is what counts, as in transformers 5: `add_bos_token` beside it changes nothing.
        """
        return pack_tokens(self.raw.encode(text, add_special_tokens=add_special_tokens).ids)

    async def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        return await asyncio.to_thread(self.encode_now, text, add_special_tokens=add_special_tokens)


def pack_tokens(ids: list[int]) -> bytes:
    """Little-endian u32. `ids` are known to be in range."""
    return np.array(ids, dtype=TOKEN_DTYPE).tobytes()


def unpack_tokens(tokens: bytes) -> list[int]:
    return np.frombuffer(tokens, dtype=TOKEN_DTYPE).tolist()  # type: ignore[no-any-return]
