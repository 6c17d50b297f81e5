"""Text to packed tokens. Called in threads (`frontend/text_work.py`): a long prompt must not hold up other streams."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import ByteLevel

from coppice_scheduler.edge.text.checkpoint_text import CheckpointText

TOKEN_DTYPE = np.dtype("<u4")
SLICE = 16 * 1024  # tokens that are converted at a time: other threads get their turn between two slices


class TooManyTokens(Exception):
    """A text has more tokens than were asked for."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens


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

    def encode_now(self, text: str, *, add_special_tokens: bool, at_most: int | None = None) -> bytes:
        """Packed tokens of `text`. A completion gets the special tokens; a rendered chat already has its own.

        What tokenizer.json adds is what counts, as in transformers 5: `add_bos_token` beside it changes nothing.
        Raises TooManyTokens where there are more than `at_most`.
        """
        # A batch of one, because `encode` keeps the interpreter to itself for as long as it takes.
        (encoding,) = self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if at_most is not None and len(encoding) > at_most:
            raise TooManyTokens(len(encoding))
        return pack_tokens(encoding.ids)


def pack_tokens(ids: list[int]) -> bytes:
    """Little-endian u32. `ids` are known to be in range."""
    return b"".join(np.array(ids[at : at + SLICE], dtype=TOKEN_DTYPE).tobytes() for at in range(0, len(ids), SLICE))


def unpack_tokens(tokens: bytes) -> list[int]:
    return np.frombuffer(tokens, dtype=TOKEN_DTYPE).tolist()  # type: ignore[no-any-return]
