"""Log-probabilities of an answer's text, apart from those of its reasoning and its calls.

A token is told with the text in which its last character stands. What has no text is not told.

A stream tells those of a text anew in each event that ends it. They are written once, and put where their mark stands:

    {"logprobs": "MARK.0", ...}   -->   {"logprobs": [{"token": ...}, ...], ...}
"""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import Iterable
from typing import Any

from coppice_scheduler.edge.http.answer_blocks import Piece
from coppice_scheduler.edge.http.sse import json_line
from coppice_scheduler.edge.openai.logprobs import token_logprobs
from coppice_scheduler.edge.text.answer_parts import PartKind
from coppice_scheduler.edge.text.detokenizer import TokenTexts
from coppice_scheduler.edge.text.logprobs import TokenLogprob

Body = dict[str, Any]
_LATEST = -1  # the number of the entries that were written last


class TextLogprobs:
    """Of one answer, as it comes."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._waiting: deque[TokenLogprob] = deque()  # until it is known what they belong to

    def add(self, entries: Iterable[TokenLogprob]) -> None:
        """The next tokens of the answer. They come before the piece that they belong to, or with it."""
        self._waiting += entries

    def of(self, piece: Piece) -> list[TokenLogprob]:
        """Those of a piece of text. What is before it, and of no text, is dropped."""
        begin, found = piece.end - len(piece.text), []
        while self._waiting and self._waiting[0].text_end <= piece.end:
            entry = self._waiting.popleft()
            if piece.kind is PartKind.TEXT and max(begin, entry.text_offset) < entry.text_end:
                found.append(entry)
        return found

    def told(self, entries: Iterable[TokenLogprob]) -> list[Body]:
        return token_logprobs(entries, self._texts, as_ids=False)


class WrittenLists:
    """Lists of JSON by number. What comes next in one is written when it comes."""

    def __init__(self) -> None:
        mark = secrets.token_hex(16)
        self._mark = f"{mark}.%d"
        self._marks = re.compile(rb'"%b\.(-?\d+)"' % mark.encode())
        self._lists: dict[int, list[bytes]] = {}

    def begin(self, number: int) -> str:
        """What stands for the list, wherever it is told."""
        self._lists[number] = []
        return self._mark % number

    def add(self, number: int, entries: list[Body]) -> str:
        """What stands for these entries, until others come."""
        self._lists[_LATEST] = [json_line(entries)[1:-1]] if entries else []
        self._lists[number] += self._lists[_LATEST]
        return self._mark % _LATEST

    def put_into(self, written: bytes) -> bytes:
        """JSON, with lists in the places of their marks."""
        pieces = self._marks.split(written)
        return b"".join(self._list(int(piece)) if place % 2 else piece for place, piece in enumerate(pieces))

    def _list(self, number: int) -> bytes:
        return b"[%b]" % b",".join(self._lists[number])
