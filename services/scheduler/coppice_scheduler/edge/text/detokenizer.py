"""Tokens to text as they come, never half a character; and what one token is, shown by itself.

Joined, the pieces are what decoding all tokens at once gives. Two ways:

    ByteTable    byte-level vocabularies (GPT-2, Llama 3, Qwen): each token is some bytes, so an incremental UTF-8
                 decoder over a table does it, at one dictionary lookup per token
    Window       all others: decode a short window again and keep what is new behind the text that was sent

        tokens   ... | context | sent ......| pending       text = decode(context + sent + pending)
                     ^ start               ^ read                 - decode(context + sent)
"""

from __future__ import annotations

import codecs
import re
from typing import Protocol

from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import ByteLevel

from coppice_scheduler.edge.text.reasoning.formats import REASONING_MARKERS
from coppice_scheduler.edge.text.tools.formats import MARKERS

_CONTEXT_TOKENS = 6  # of the prompt, so that a first token keeps the space before its word
_PENDING_TOKENS_MAX = 64  # after so many tokens without a whole character the bytes are what they are
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")
_DECODED_AT_ONCE_MAX = 4096  # tokens: some 0.5 ms
_REPLACEMENT = "�"
_NONE_SILENT: frozenset[int] = frozenset()


class Detokenizer(Protocol):
    """Text of one output stream."""

    @property
    def is_open(self) -> bool:
        """Whether the last tokens are a part of a character that is not complete."""
        ...

    def feed(self, ids: list[int]) -> str:
        """The whole characters that `ids` complete."""
        ...

    def flush(self) -> str:
        """What is left at the end; broken characters become U+FFFD."""
        ...


def byte_level_alphabet() -> dict[str, int]:
    """Character to byte, as byte-level vocabularies write bytes (GPT-2, `bytes_to_unicode`).

    Printable Latin-1 stands for itself, the other bytes in order for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + place): byte for place, byte in enumerate(hidden)})
    return table


def special_ids(raw: RawTokenizer) -> frozenset[int]:
    return frozenset(token_id for token_id, token in raw.get_added_tokens_decoder().items() if token.special)


class DetokenizerFactory:
    """Chooses the way once per checkpoint; a stream costs one small object."""

    def __init__(self, raw: RawTokenizer) -> None:
        self._raw = raw
        self._special = special_ids(raw)
        added = raw.get_added_tokens_decoder()
        self._unmarked = frozenset(i for i in self._special if added[i].content not in (*MARKERS, *REASONING_MARKERS))
        is_byte_level = isinstance(raw.decoder, ByteLevel)
        silent_sets = (self._special, self._unmarked, _NONE_SILENT) if is_byte_level else ()
        self._tables = {silent: ByteTable(raw, silent) for silent in silent_sets}
        self._byte_tokens = (
            frozenset()
            if is_byte_level
            else frozenset(i for text, i in raw.get_vocab().items() if BYTE_TOKEN.match(text))
        )

    def start(
        self, prompt_tail: list[int], *, skip_special_tokens: bool = True, keeps_markers: bool = False
    ) -> Detokenizer:
        """A stream that continues a prompt which ends in `prompt_tail` (its last few ids; may be empty).

        `keeps_markers`: special tokens that open or close reasoning and calls of tools are text.
        """
        skipped = self._unmarked if keeps_markers else self._special
        silent = skipped if skip_special_tokens else _NONE_SILENT
        if self._tables:
            return _ByteLevelStream(self._tables[silent])
        return _WindowStream(self._raw, silent, self._byte_tokens, prompt_tail[-_CONTEXT_TOKENS:])


class ByteTable(dict[int, bytes]):
    """Token id to its bytes, filled as ids are first seen. Special tokens are silent."""

    def __init__(self, raw: RawTokenizer, special: frozenset[int]) -> None:
        super().__init__()
        self._raw = raw
        self._special = special
        self._alphabet = byte_level_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._special else self._raw.id_to_token(token_id)
        text = token or ""
        if all(character in self._alphabet for character in text):
            piece = bytes(self._alphabet[character] for character in text)
        else:
            piece = text.encode()  # an added token is text, not bytes
        self[token_id] = piece
        return piece


class _ByteLevelStream:
    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_open(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def feed(self, ids: list[int]) -> str:
        table = self._table
        data = table[ids[0]] if len(ids) == 1 else b"".join([table[i] for i in ids])
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    def __init__(
        self, raw: RawTokenizer, special: frozenset[int], byte_tokens: frozenset[int], context: list[int]
    ) -> None:
        self._raw = raw
        self._special = special
        self._byte_tokens = byte_tokens
        # Special tokens are no text, and a decoder that strips the first space would strip it after them again.
        self._window = [i for i in context if i not in special]
        self._read = len(self._window)
        self._sent_text = self._decode(self._window)

    @property
    def is_open(self) -> bool:
        return self._read < len(self._window)

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        if len(ids) > _DECODED_AT_ONCE_MAX:
            # `decode` keeps the interpreter to itself for as long as it takes.
            return self._raw.decode_batch([ids], skip_special_tokens=False)[0]
        return self._raw.decode(ids, skip_special_tokens=False)

    def feed(self, ids: list[int]) -> str:
        self._window += [i for i in ids if i not in self._special]
        num_pending = len(self._window) - self._read
        if not num_pending:
            return ""
        text = self._decode(self._window)
        # A run of byte tokens is decoded as one: until it ends, its first characters may still change.
        open_end = self._window[-1] in self._byte_tokens or text.endswith(_REPLACEMENT)
        if open_end and num_pending <= _PENDING_TOKENS_MAX:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._window)) if self._read < len(self._window) else ""

    def _advance(self, text: str) -> str:
        new = text[len(self._sent_text) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._sent_text = self._decode(self._window)
        return new


class TokenTexts:
    """What each token is by itself: its bytes by the tokenizer's own rules, and text made of them.

    A token may be half a character: its bytes are right, its text then has U+FFFD. Special tokens show their names.
    One per checkpoint; filled as tokens are first seen, so no larger than the vocabulary.
    """

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
