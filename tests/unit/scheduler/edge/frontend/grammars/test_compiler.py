"""A hostile grammar is refused by a process that it may bring down, and leaves nothing behind for the next one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import coppice
from coppice.grammar import GrammarError
from coppice_scheduler.edge.frontend.grammars.compiler import GrammarCompiler
from coppice_scheduler.edge.frontend.grammars.compiler_process import MODULE, STACK_MAX_BYTES
from coppice_scheduler.edge.text.output_format import FormatKind, OutputFormat, grammar_of

TOKENIZER = (Path(coppice.__file__).parent / "demo_model/tokenizer.json").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, 4096, (0,))


def made(kind: FormatKind, wanted: Any) -> str:
    text = wanted if isinstance(wanted, str) else json.dumps(wanted, separators=(",", ":"))
    return grammar_of(OutputFormat(kind, text, "f"))


SLOW_OR_LARGE = "compiling it takes more"
HOSTILE: dict[str, tuple[FormatKind, Any, str]] = {
    "patterns of one string": (
        FormatKind.JSON,
        {"allOf": [{"type": "string", "pattern": f"a.{{{count}}}b"} for count in range(1, 60)]},
        SLOW_OR_LARGE,
    ),
    "expressions that must all match": (
        FormatKind.GRAMMAR,
        "start: A\nA: " + " & ".join(f"/(.*a.{{{count}}}b.*)/" for count in range(1, 30)),
        SLOW_OR_LARGE,
    ),
    "a rule that is nothing but another, in a circle": (
        FormatKind.GRAMMAR,
        "start: a0\n" + "\n".join(f'a{place}: a{(place + 1) % 3000} | "x"' for place in range(3000)),
        SLOW_OR_LARGE,
    ),
    "properties": (
        FormatKind.JSON,
        {"type": "object", "properties": {f"p{number}": {} for number in range(5_500)}},
        "more than the 0.25 s",
    ),
    "optional letters": (FormatKind.REGEX, "a?" * 20_000 + "a" * 20_000, SLOW_OR_LARGE),
    "a schema that means itself": (
        FormatKind.JSON,
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}}},
        "circular",
    ),
    "nesting": (FormatKind.REGEX, "(" * 30_000 + "a" + ")" * 30_000, "nest"),
}
HONEST: dict[str, tuple[FormatKind, Any]] = {
    "any object": (FormatKind.JSON_OBJECT, ""),
    "regex": (FormatKind.REGEX, "[a-z]+@[a-z]+"),
    "enum": (FormatKind.JSON, {"enum": [f"v{number}" for number in range(5_000)]}),
    "fields": (FormatKind.JSON, {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(200)}}),
    "repetitions": (FormatKind.REGEX, "(?:[a-z]{0,300}){0,300}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_and_the_next_one_is_taken(compiler: GrammarCompiler, name: str) -> None:
    kind, wanted, words = HOSTILE[name]
    before = compiler._process.pid
    with pytest.raises(GrammarError, match=words):
        compiler.compile(made(kind, wanted))
    compiler.compile(made(FormatKind.REGEX, "ab"))
    assert compiler._process.pid == before


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_one_is_taken(compiler: GrammarCompiler, name: str) -> None:
    compiler.compile(made(*HONEST[name]))


# Where a processor's time is no limit, memory is.
LITTLE_MEMORY = f"""
import sys
from coppice.grammar import Grammars
from {MODULE.rpartition(".")[0]} import compiler_process
compiler_process.CPU_MAX_S, compiler_process.MEMORY_MAX_BYTES = 60, int(sys.argv[1]) << 20
print(compiler_process._check(Grammars(sys.stdin.read(), 4096, (0,)), sys.argv[2]))
"""
LITERAL = f"start: /{'abcdefgh' * 8_000}/"  # takes 30 MB and not 0.1 s
MILLION = "start: /a{1000000}b/"  # takes 30 MB, and several times as much if a lexer may be prepared for longer


def said_by(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, input=TOKENIZER, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


@pytest.mark.parametrize("num_mb", [8, 256])
def test_memory_is_a_limit_of_its_own(num_mb: int) -> None:
    said = said_by(LITTLE_MEMORY, str(num_mb), LITERAL)
    assert "more memory" in said if num_mb == 8 else said == ""


def test_what_a_lexer_is_prepared_with_is_bounded() -> None:
    assert said_by(LITTLE_MEMORY, "60", MILLION) == ""
    assert "more memory" in said_by(LITTLE_MEMORY, "16", MILLION)


# The system gives the main thread more of its stack when something below is touched, as far as the limit goes.
DEEP_STACK = f"""
import ctypes
import sys
from {MODULE.rpartition(".")[0]} import compiler_process

class Deep:
    def compile(self, depth):
        (line,) = (line for line in open("/proc/self/maps") if line.endswith("[stack]\\n"))
        top = int(line.split()[0].partition("-")[2], 16)
        ctypes.memset(top - int(depth), 1, 1)

print(compiler_process._check(Deep(), sys.argv[1]))
"""


@pytest.mark.parametrize("is_within", [True, False])
def test_the_stack_is_a_limit_of_its_own(is_within: bool) -> None:
    assert STACK_MAX_BYTES == 2 << 20, "as a thread has on every platform, or less"
    said = said_by(DEEP_STACK, str(STACK_MAX_BYTES // 2 if is_within else STACK_MAX_BYTES + (1 << 20)))
    assert said == "" if is_within else "nests too deep" in said


def test_a_process_that_somebody_ended_is_started_again() -> None:
    compiler = GrammarCompiler(TOKENIZER, 4096, (0,))
    compiler._process.kill()
    compiler._process.wait()
    compiler.compile(made(FormatKind.REGEX, "ab"))


def test_a_tokenizer_that_cannot_be_used_is_told() -> None:
    with pytest.raises(GrammarError, match="tokenizer cannot be used"):
        GrammarCompiler("{}", 4096, (0,))
