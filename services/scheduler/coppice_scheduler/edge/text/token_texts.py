"""What one token is, shown by itself: its bytes by the tokenizer's own rules, and text made of them.

A token may be half a character: its bytes are right, its text then has U+FFFD. Special tokens show their names.
"""

from __future__ import annotations

from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import ByteLevel

from coppice_scheduler.edge.text.detokenizer import BYTE_TOKEN, ByteTable, special_ids


class TokenTexts:
    """One per checkpoint; filled as tokens are first seen, so no larger than the vocabulary."""

    def __init__(self, raw: RawTokenizer) -> None:
        self._raw = raw
        self._table: dict[int, bytes] = (
            ByteTable(raw, frozenset()) if isinstance(raw.decoder, ByteLevel) else _OtherBytes(raw)
        )

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for an id that the tokenizer does not know."""
        return self._table[token_id]

    def text_of(self, token_id: int) -> str:
        return self._table[token_id].decode("utf-8", "replace")

    def name_of(self, token_id: int) -> str:
        """As the vocabulary writes it, such as `Ġforest`."""
        return self._raw.id_to_token(token_id) or ""


class _OtherBytes(dict[int, bytes]):
    """Decoders that look at neighbours (a first space is dropped): a token is what it adds behind another one."""

    def __init__(self, raw: RawTokenizer) -> None:
        super().__init__()
        self._raw = raw
        self._special = special_ids(raw)
        plain = (i for text, i in raw.get_vocab().items() if i not in self._special and not BYTE_TOKEN.match(text))
        self._before = [min(plain)]
        self._before_text = raw.decode(self._before)

    def __missing__(self, token_id: int) -> bytes:
        name = self._raw.id_to_token(token_id) or ""
        if BYTE_TOKEN.match(name):
            piece = bytes((int(name[3:5], 16),))
        elif token_id in self._special or not name:
            piece = name.encode()
        else:
            piece = self._raw.decode([*self._before, token_id])[len(self._before_text) :].encode()
        self[token_id] = piece
        return piece
