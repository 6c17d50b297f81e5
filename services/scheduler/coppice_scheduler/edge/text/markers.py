"""Markers in text that comes in pieces, and text that is none."""

from __future__ import annotations

SPACE_MAX = 256  # characters of white space that wait for what follows


def whole_characters(text: str) -> str:
    """With U+FFFD for each half of a surrogate pair, which JSON may write and no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def length_begun(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`, and not all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
