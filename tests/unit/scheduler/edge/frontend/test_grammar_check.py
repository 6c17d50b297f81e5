"""Grammars of calls: each is compiled once for each tenant, within bounds; what cannot be used is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

import coppice
from coppice.grammar import Grammars, Matcher
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind
from coppice_scheduler.edge.frontend import grammar_check
from coppice_scheduler.edge.frontend.generation_spec import GenerationSpec, TextPrompt
from coppice_scheduler.edge.frontend.grammar_check import KNOWN_OVERHEAD, GrammarCheck
from coppice_scheduler.edge.frontend.grammars.compiler_process import CPU_MAX_S
from coppice_scheduler.edge.frontend.text_work import TextWork
from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text
from coppice_scheduler.edge.text.output_format import FormatKind, OutputFormat, grammar_of

CHECKPOINT = load_checkpoint_text(Path(coppice.__file__).parent / "demo_model")
TOKENIZER = CHECKPOINT.raw.to_str()
VOCAB_SIZE = CHECKPOINT.raw.get_vocab_size(with_added_tokens=True)
WAIT_S = 60
SPEC = GenerationSpec("m", (TextPrompt("x"),))


class Counting(Grammars):
    """Remembers what it compiled. Each takes `cost_s` of the clock that it has."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER, VOCAB_SIZE, CHECKPOINT.eos_token_ids)
        self.compiled: list[str] = []
        self.cost_s = 0.0
        self.now_s = 0.0

    def compile(self, grammar: str) -> Matcher:
        self.compiled.append(grammar)
        self.now_s += self.cost_s
        return super().compile(grammar)


class World:
    """A check, and what it has others do."""

    def __init__(self, load: Callable[[], Grammars] | None = None) -> None:
        self.grammars = Counting()
        self.num_loaded = 0
        self._load = load or (lambda: self.grammars)
        self.check = GrammarCheck(self._loaded, TextWork(), lambda: self.grammars.now_s)

    def _loaded(self) -> Grammars:
        self.num_loaded += 1
        return self._load()

    @property
    def num_compiled(self) -> int:
        return len(self.grammars.compiled)

    async def ask(self, wanted: OutputFormat | None, tenant: str = "a", spec: GenerationSpec = SPEC) -> str:
        return await self.check.grammar_of(tenant, replace(spec, output_format=wanted))

    async def refusal(
        self, wanted: OutputFormat | None, tenant: str = "a", spec: GenerationSpec = SPEC
    ) -> tuple[str | None, str | None, str]:
        with pytest.raises(ApiError) as caught:
            await self.ask(wanted, tenant, spec)
        assert caught.value.kind is ErrorKind.INVALID
        return caught.value.param, caught.value.code, caught.value.message


def regex(text: str, field: str = "guided_regex") -> OutputFormat:
    return OutputFormat(FormatKind.REGEX, text, field)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await test()

    asyncio.run(bounded())


def test_the_same_form_is_compiled_once_for_each_tenant() -> None:
    async def test() -> None:
        world = World()
        first = await world.ask(regex("a+"))
        assert first == grammar_of(regex("a+"))
        assert [await world.ask(regex("a+")) for _ in range(3)] == [first] * 3
        assert world.grammars.compiled == [first]
        assert await world.ask(regex("a+"), tenant="b") == first
        assert world.grammars.compiled == [first] * 2, "one tenant must not find out what another one has asked for"
        assert await world.ask(regex("b+"), tenant="b") != first
        assert world.num_compiled == 3

    run(test)


def test_nothing_is_loaded_before_a_form_is_asked_for_and_then_once() -> None:
    async def test() -> None:
        world = World()
        assert await world.ask(None) == ""
        assert world.num_loaded == 0
        many = [world.ask(regex(f"a{number}"), tenant=str(number)) for number in range(8)]
        assert len(set(await asyncio.gather(*many))) == 8
        assert (world.num_loaded, world.num_compiled) == (1, 8)

    run(test)


def make_room_for(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For so many of the forms `regex(f"a{number}")` with one digit of each tenant."""
    each = KNOWN_OVERHEAD + len("a0") + len(grammar_of(regex("a0")))
    monkeypatch.setattr(grammar_check, "KNOWN_BYTES_MAX", count * each)


def test_known_forms_of_a_tenant_are_bounded_and_the_last_asked_for_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    make_room_for(4, monkeypatch)

    async def test() -> None:
        world = World()
        forms = [regex(f"a{number}") for number in range(5)]
        for form in [*forms[:4], forms[0]]:
            await world.ask(form)
        assert world.num_compiled == 4
        await world.ask(forms[4])  # there is no room: the second has not been asked for the longest
        await world.ask(forms[0])
        assert world.num_compiled == 5
        await world.ask(forms[1])
        assert world.num_compiled == 6

    run(test)


def test_a_long_form_takes_the_room_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    make_room_for(4, monkeypatch)

    async def test() -> None:
        world = World()
        forms = [regex(f"a{number}") for number in range(4)]
        for form in forms:
            await world.ask(form)
        await world.ask(regex("x" * KNOWN_OVERHEAD))  # of three: it, its grammar, and what any counts for
        assert world.num_compiled == 5
        await world.ask(forms[3])
        assert world.num_compiled == 5
        await world.ask(forms[0])
        assert world.num_compiled == 6
        await world.ask(regex("x" * 5 * KNOWN_OVERHEAD))  # never fits, and is used all the same
        await world.ask(regex("x" * 5 * KNOWN_OVERHEAD))
        assert world.num_compiled == 8

    run(test)


def test_the_same_form_at_the_same_time_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    make_room_for(2, monkeypatch)

    async def test() -> None:
        world = World()
        await asyncio.gather(*[world.ask(regex("a0")) for _ in range(5)])
        before = world.num_compiled
        await world.ask(regex("a1"))
        for number in range(2):
            await world.ask(regex(f"a{number}"))
        assert world.num_compiled == before + 1

    run(test)


def test_one_tenant_takes_no_room_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    make_room_for(2, monkeypatch)

    async def test() -> None:
        world = World()
        await world.ask(regex("a0"), tenant="b")
        for number in range(6):
            await world.ask(regex(f"a{number}"))
        before = world.num_compiled
        await world.ask(regex("a0"), tenant="b")
        assert world.num_compiled == before

    run(test)


def test_tenants_with_known_forms_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "TENANTS_MAX", 2)

    async def test() -> None:
        world = World()
        for tenant in ("a", "b", "a", "c"):  # "b" has not been here for the longest
            await world.ask(regex("x"), tenant)
        assert world.num_compiled == 3
        await world.ask(regex("x"), "a")
        assert world.num_compiled == 3
        await world.ask(regex("x"), "b")
        assert world.num_compiled == 4

    run(test)


def test_what_takes_too_long_to_compile_is_refused_and_not_kept() -> None:
    async def test() -> None:
        world = World()
        world.grammars.cost_s = CPU_MAX_S
        assert await world.ask(regex("a"))
        world.grammars.cost_s = CPU_MAX_S * 1.01
        assert await world.ask(regex("a")), "it is known"
        for _ in range(2):
            param, code, message = await world.refusal(regex("b"))
            assert (param, code) == ("guided_regex", "invalid_output_format")
            assert message.startswith("guided_regex cannot be used: compiling it takes more than the 0.25 s")
        assert world.num_compiled == 3
        world.grammars.cost_s = 0
        assert await world.ask(regex("b"))

    run(test)


def test_what_is_wrong_is_refused_each_time_and_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    make_room_for(1, monkeypatch)

    async def test() -> None:
        world = World()
        await world.ask(regex("a0"))
        for _ in range(2):
            assert "unclosed group" in (await world.refusal(regex("(")))[2]
            assert "empty" in (await world.refusal(regex("")))[2]
        before = world.num_compiled
        await world.ask(regex("a0"))
        assert world.num_compiled == before

    run(test)


def test_an_error_names_the_field_that_this_call_used() -> None:
    async def test() -> None:
        world = World()
        for field in ("guided_regex", "structured_outputs.regex", "guided_regex"):
            param, code, message = await world.refusal(regex("(", field))
            assert (param, code) == (field, "invalid_output_format")
            assert message.startswith(f"{field} cannot be used: ")

    run(test)


def test_what_is_wrong_is_shown_in_part() -> None:
    async def test() -> None:
        _, _, message = await World().refusal(regex("(" + "x" * 10_000))
        assert message.endswith("...")
        assert len(message) < 500

    run(test)


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (lambda: Grammars(TOKENIZER, VOCAB_SIZE, ()), "no end token"),
        (lambda: Grammars("{}", VOCAB_SIZE, CHECKPOINT.eos_token_ids), "the model's tokenizer cannot be used"),
    ],
    ids=["without an end", "of no kind"],
)
def test_a_tokenizer_that_cannot_be_used_refuses_every_form_and_nothing_else(
    load: Callable[[], Grammars], words: str
) -> None:
    async def test() -> None:
        world = World(load)
        for text in ("a", "a", "b"):
            param, code, message = await world.refusal(regex(text))
            assert (param, code) == ("guided_regex", "invalid_output_format")
            assert words in message
        assert world.num_loaded == 1, "the next load would fail as well, and take as long"
        assert await world.ask(None) == ""

    run(test)


def test_what_contradicts_a_form_is_refused_before_it_is_compiled() -> None:
    async def test() -> None:
        world = World()
        for field, spec in (
            ("ignore_eos", replace(SPEC, ignore_eos=True)),
            ("min_tokens", replace(SPEC, min_tokens=1)),
        ):
            param, code, message = await world.refusal(regex("a"), spec=spec)
            assert (param, code) == (field, "unsupported_parameter")
            assert "guided_regex" in message
            assert await world.ask(None, spec=spec) == ""
        assert (world.num_loaded, world.num_compiled) == (0, 0)

    run(test)
