"""What an answer may look like: grammars, compiled for the tokenizer of a checkpoint.

    JSON schema, regex, choices, EBNF --> grammar: a text --> Matcher: which tokens may come next
                        front door        travels with a request        worker

A front door compiles a grammar to refuse what cannot be used; a worker compiles it once more to use it. llguidance does
the work, without a clock or a thread of its own. Its limits are counted in its own steps, so that both processes find
the same: what a front door lets through, a worker can use.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

UInt32 = npt.NDArray[np.uint32]

GRAMMAR_BYTES_MAX = 1 << 16  # of a grammar's text

# Of compiling. `a{1000000}b` takes 70 MB and 0.25 s with the library's own 1,000,000, and 20 MB with this.
_INITIAL_LEXER_FUEL = 200_000
# Of one mask: some ms; 20 ms for a literal of 60,000 characters. Less fuel stops ordinary regexes half-way. A state
# of the lexer takes 2 KiB, and compiled grammars are kept.
_STEP_ITEMS_MAX = 20_000
_STEP_LEXER_FUEL = 200_000
_LEXER_STATES_MAX = 10_000
_NOTHING_MATCHES = "NoExtension"  # how the library begins to say so
# An option of the library's that no caller has, and what a caller can do.
_ONE_OF_OPTION = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
_ONE_OF = "where its schemas do not exclude each other by their types or constants; anyOf is"


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or cannot be followed any further; the message says why."""


class Grammars:
    """Compiles grammars for one tokenizer. Any thread may use it."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`tokenizer_json` is the text of a tokenizer.json; the model has `vocab_size` logits, some maybe of no token.

        Takes a second for 128,000 tokens. Raises GrammarError for a tokenizer that it cannot use.
        """
        self.vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        if not self._eos_token_ids:
            raise GrammarError("the model has no end token, so no answer in a given form could ever end")
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
        except Exception as error:  # the binding raises whatever its tokenizer library says
            raise GrammarError(f"the model's tokenizer cannot be used for grammars: {error}") from error

    def compile(self, grammar: str) -> Matcher:
        """A matcher at the beginning of an answer. Raises GrammarError."""
        limits = LLParserLimits(
            initial_lexer_fuel=_INITIAL_LEXER_FUEL,
            step_max_items=_STEP_ITEMS_MAX,
            step_lexer_fuel=_STEP_LEXER_FUEL,
            max_lexer_states=_LEXER_STATES_MAX,
            verbose_errors=False,
        )
        inner = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if not inner.is_error():
            inner.compute_bitmask()  # what is too wide at its very beginning is found here
        _raise_error(inner)
        return Matcher(inner, self._eos_token_ids)


class Matcher:
    """One answer in the making. Calls must not overlap."""

    def __init__(self, inner: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self._inner = inner
        self._eos_token_ids = eos_token_ids
        self._is_ended = False

    def copy(self) -> Matcher:
        """Another one that begins where this one is."""
        copied = Matcher(self._inner.deep_copy(), self._eos_token_ids)
        copied._is_ended = self._is_ended
        return copied

    def take(self, tokens: UInt32) -> None:
        """These tokens are next in the answer. What follows an end token is nobody's. Raises GrammarError."""
        for token in tokens.tolist():
            if self._is_ended:
                return
            self._inner.consume_token(token)
            _raise_error(self._inner)
            self._is_ended = token in self._eos_token_ids

    def fill(self, words: UInt32) -> None:
        """Sets the bits of the tokens that may come next, in words [vocab_size / 32, rounded up]: token t is bit t % 32
        of word t // 32. Raises GrammarError, and the words mean nothing."""
        if self._is_ended:
            words[:] = np.uint32(0xFFFFFFFF)
            return
        assert words.flags.c_contiguous
        if not self._inner.is_error():
            self._inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        _raise_error(self._inner)


def _raise_error(inner: LLMatcher) -> None:
    if inner.is_error():
        said = " ".join(inner.get_error().removesuffix("<non-verbose/>").split())
        said = said.replace(f". {_ONE_OF_OPTION}", f" {_ONE_OF}")
        raise GrammarError("no text matches it" if said.startswith(_NOTHING_MATCHES) else said)
