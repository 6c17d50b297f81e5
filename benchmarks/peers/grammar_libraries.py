"""llguidance beside xgrammar: time to compile a grammar, and to find the tokens that may come next.

    python -m benchmarks.peers.grammar_libraries --site FOLDER [--vocabulary 32768 --vocabulary 131072] [--json]

FOLDER has the unpacked wheels of xgrammar 0.2.8 and apache-tvm-ffi (benchmarks/README.md says how). The vocabularies
are made of the commonest pieces of words of Python's own library, so that anybody gets the same ones from the same
Python. Each grammar is compiled anew, then walked along a text that it allows: mask, token, mask, token. Times are
processor time of the thread, medians of the rounds in which the libraries take turns.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from coppice_bench.report import describe_run, note, print_report

ROUNDS = 5
PIECES = re.compile(rb"\s?[A-Za-z]+|\s?[0-9]{1,3}|\s+|[^\sA-Za-z0-9]{1,4}")
TEXT_BYTES = 24 << 20
LIMIT_S = 20.0  # a grammar that takes longer is not compiled again


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    kind: str  # json or regex
    grammar: str
    text: bytes  # that it allows


def cases() -> Iterator[Case]:
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
    answer = {"name": "Ada Lovelace", "age": 36, "tags": ["first", "of many"]}
    yield _json("any object", {"type": "object"}, {"a": [1, 2.5, None, True], "b": {"c": "some words in a row"}})
    yield _json("person", person, answer)
    yield _json("fifty persons", {"type": "array", "items": person}, [answer] * 50)
    words = [f"value {number} of the list" for number in range(1_000)]
    yield _json("enum of 1,000", {"enum": words}, words[777])
    names = [f"field_{number}" for number in range(100)]
    fields = {name: {"type": ["string", "null"], "maxLength": 80} for name in names}
    closed = {"type": "object", "properties": fields, "required": names, "additionalProperties": False}
    yield _json("100 fields", closed, dict.fromkeys(names, "a value"))
    loose = {**closed, "required": []}
    yield _json("100 fields, optional", loose, dict.fromkeys(names[::3], "a value"))
    yield Case("regex", "regex", r"[a-z]+@[a-z]+\.(com|org) [0-9]{3}-[0-9]{4}", b"someone@example.org 555-1234")


def _json(name: str, schema: Any, value: Any) -> Case:
    return Case(name, "json", json.dumps(schema), json.dumps(value, separators=(",", ":")).encode())


def vocabulary(size: int) -> list[bytes]:
    """Bytes, then the commonest pieces and their beginnings, then an end token."""
    library, read, counts = Path(sysconfig.get_path("stdlib")), 0, Counter[bytes]()
    for path in sorted(library.rglob("*.py")):
        text = path.read_bytes()
        read += len(text)
        for piece in PIECES.findall(text):
            counts.update(piece[:end] for end in range(2, min(len(piece), 12) + 1))
        if read > TEXT_BYTES:
            break
    tokens = [bytes([value]) for value in range(256)]
    common = sorted(counts, key=lambda piece: (-counts[piece], piece))[: size - 257]
    assert len(common) == size - 257, f"the library has {len(common)} pieces only"
    return [*tokens, *common, b"<end>"]


class Encoder:
    """The longest token first."""

    def __init__(self, tokens: list[bytes]) -> None:
        self._ids = {token: place for place, token in enumerate(tokens[:-1])}
        self._longest = max(map(len, tokens))

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.encode() if isinstance(text, str) else text
        ids, start = [], 0
        while start < len(text):
            end = next(e for e in range(start + self._longest, start, -1) if text[start:e] in self._ids)
            ids.append(self._ids[text[start:end]])
            start += len(text[start:end])
        return ids


class _Tokenizer:
    """As llguidance asks for it."""

    def __init__(self, tokens: list[bytes], encode: Encoder) -> None:
        self.tokens, self._encode = tokens, encode
        self.eos_token_id, self.bos_token_id, self.unk_token_id = len(tokens) - 1, None, None
        self.special_token_ids = [len(tokens) - 1]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text)


Step = Callable[[int], None]  # finds what may come next, then takes the token


class LlGuidance:
    def __init__(self, tokens: list[bytes], encode: Encoder) -> None:
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Tokenizer(tokens, encode)), n_vocab=len(tokens))
        self._mask = np.zeros(-(-len(tokens) // 32), np.int32)

    def compile(self, case: Case) -> Step:
        make = LLMatcher.grammar_from_json_schema if case.kind == "json" else LLMatcher.grammar_from_regex
        matcher = LLMatcher(self._tokenizer, make(case.grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()

        def step(token: int) -> None:
            matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            assert matcher.consume_token(token), matcher.get_error()

        return step


class XGrammar:
    def __init__(self, tokens: list[bytes], _: Encoder) -> None:
        import xgrammar

        self._library = xgrammar
        self._info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[len(tokens) - 1]
        )
        self._mask = xgrammar.allocate_token_bitmask(1, len(tokens))

    def compile(self, case: Case) -> Step:
        compiler = self._library.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        if case.kind == "json":
            compiled = compiler.compile_json_schema(case.grammar, any_whitespace=True, strict_mode=False)
        else:
            compiled = compiler.compile_regex(case.grammar)
        matcher = self._library.GrammarMatcher(compiled)

        def step(token: int) -> None:
            matcher.fill_next_token_bitmask(self._mask)
            assert matcher.accept_token(token), "the token is not allowed"

        return step


def measure(libraries: dict[str, Any], case: Case, ids: list[int]) -> dict[str, Any]:
    compiles: dict[str, list[float]] = {name: [] for name in libraries}
    steps: dict[str, list[float]] = {name: [] for name in libraries}
    for _ in range(ROUNDS):
        for name, library in libraries.items():
            if compiles[name] and compiles[name][-1] > LIMIT_S * 1e3:
                continue
            began = time.thread_time_ns()
            step = library.compile(case)
            compiles[name].append((time.thread_time_ns() - began) / 1e6)
            for token in ids:
                began = time.thread_time_ns()
                step(token)
                steps[name].append((time.thread_time_ns() - began) / 1e3)
    return {
        name: {
            "compile_ms": statistics.median(compiles[name]),
            "step_us": statistics.median(steps[name]),
            "step_us_p99": float(np.percentile(steps[name], 99)),
        }
        for name in libraries
    }


def _versions(site: Path, package: str) -> Iterator[str]:
    """Of what was unpacked."""
    for folder in site.glob(f"{package}-*.dist-info"):
        yield folder.name.removeprefix(f"{package}-").removesuffix(".dist-info")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", required=True, help="folder with the unpacked wheels of xgrammar")
    parser.add_argument("--vocabulary", type=int, action="append", help="tokens; may be given several times")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.site)
    results: dict[str, Any] = {}
    for size in arguments.vocabulary or [32_768, 131_072]:
        note(f"a vocabulary of {size} tokens")
        tokens = vocabulary(size)
        encode = Encoder(tokens)
        libraries = {"llguidance": LlGuidance(tokens, encode), "xgrammar": XGrammar(tokens, encode)}
        found = {}
        for case in cases():
            note(f"  {case.name}")
            ids = encode(case.text)
            found[case.name] = {"tokens": len(ids), **measure(libraries, case, ids)}
        results[str(size)] = found
    versions = {"llguidance": version("llguidance"), "xgrammar": next(_versions(Path(arguments.site), "xgrammar"))}
    print_report({"bench": "grammar_libraries", "of": versions, **results, **describe_run()}, as_json=arguments.json)


if __name__ == "__main__":
    main()
