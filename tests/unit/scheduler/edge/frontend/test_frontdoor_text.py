"""Detokeniser, stop strings, tokeniser and chat template, with other libraries' answers as the oracle."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import coppice
from coppice.errors import UsageError
from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.frontend.admission import size_of
from coppice_scheduler.edge.frontend.generation_spec import ChatPrompt
from coppice_scheduler.edge.text.chat import ChatMessage, ChatTemplate
from coppice_scheduler.edge.text.checkpoint_text import CheckpointText, SamplingDefaults, load_checkpoint_text
from coppice_scheduler.edge.text.detokenizer import DetokenizerFactory, byte_level_alphabet
from coppice_scheduler.edge.text.stops import StopScanner
from coppice_scheduler.edge.text.tokenizer import Tokenizer as PromptTokenizer
from coppice_scheduler.edge.text.tokenizer import pack_tokens, unpack_tokens

DEMO = Path(coppice.__file__).parent / "demo_model"
TEXT = "Grüße, 東京! 🌲🌲 naïve — ok\n\tdef f(x): return x\n"


def byte_level() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def sentencepiece_like() -> Tokenizer:
    """A vocabulary in the manner of Llama 2: words with a leading mark, and bytes for what no word covers."""
    words = ["▁the", "▁forest", "▁", "s", "grow", "▁is", ".", "a", "b"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {word: 259 + place for place, word in enumerate(words)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    return raw


TOKENIZERS = {"byte-level": byte_level(), "sentencepiece-like": sentencepiece_like()}


def pieces_of(raw: Tokenizer, ids: list[int], sizes: list[int], context: list[int] | None = None) -> list[str]:
    stream = DetokenizerFactory(raw).start(context or [])
    pieces, place = [], 0
    for size in sizes:
        if ids[place : place + size]:
            pieces.append(stream.feed(ids[place : place + size]))
        place += size
    while place < len(ids):
        pieces.append(stream.feed([ids[place]]))
        place += 1
    return [*pieces, stream.flush()]


# --- detokeniser --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_join_to_what_decoding_at_once_gives(name: str, data: st.DataObject) -> None:
    raw = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, raw.get_vocab_size() - 1), max_size=40))
    sizes = data.draw(st.lists(st.integers(1, 4), max_size=10))
    assert "".join(pieces_of(raw, ids, sizes)) == raw.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_piece_holds_half_a_character(name: str) -> None:
    raw = TOKENIZERS[name]
    ids = raw.encode(TEXT, add_special_tokens=False).ids
    pieces = pieces_of(raw, ids, [])
    assert "".join(pieces) == raw.decode(ids)
    assert not any("�" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 8  # it does stream


def test_a_first_token_keeps_the_space_before_its_word() -> None:
    raw = TOKENIZERS["sentencepiece-like"]
    prompt, answer = raw.encode("the").ids, [raw.token_to_id("▁forest"), raw.token_to_id("s")]
    assert "".join(pieces_of(raw, answer, [], context=[1, *prompt])) == " forests"
    assert "".join(pieces_of(raw, answer, [], context=[])) == "forests"


def test_special_tokens_in_between_take_no_space_away() -> None:
    raw = TOKENIZERS["sentencepiece-like"]
    the, forest = raw.token_to_id("▁the"), raw.token_to_id("▁forest")
    ids = [1, the, 2, forest, 2, 1, forest]
    assert "".join(pieces_of(raw, ids, [])) == raw.decode(ids) == "the forest forest"


def test_broken_bytes_do_not_hold_up_a_stream_for_ever() -> None:
    raw = TOKENIZERS["sentencepiece-like"]
    stream = DetokenizerFactory(raw).start([])
    held = [stream.feed([3 + 0xFF]) for _ in range(300)]
    assert sum(map(len, held)) >= 200


def test_the_alphabet_is_the_one_of_byte_level_vocabularies() -> None:
    assert set(byte_level_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for byte in (0x00, 0x20, 0x41, 0x7F, 0x7E):
        ((character, _),) = splitter.pre_tokenize_str(chr(byte))
        assert byte_level_alphabet()[character] == byte


# --- stop strings -------------------------------------------------------------------------------------------------


def first_complete(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Slow and plain: the text before the stop whose last character comes first."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_stops_cut_where_they_should_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    expected, expected_stop = first_complete("".join(pieces), stops)
    sent = ""
    for piece in pieces:
        scanned = scanner.feed(piece)
        sent += scanned.text
        assert expected.startswith(sent), "a part of a stop string leaked"
        if scanned.stop is not None:
            assert (sent, scanned.stop) == (expected, expected_stop)
            return
    assert (sent + scanner.flush(), None) == (expected, expected_stop)


def test_text_that_cannot_become_a_stop_is_sent_at_once() -> None:
    scanner = StopScanner(["###", "User:"])
    assert scanner.feed("Hello ").text == "Hello "
    assert scanner.feed("#").text == ""
    assert scanner.feed("1").text == "#1"


# --- tokeniser ----------------------------------------------------------------------------------------------------


def checkpoint_at(path: Path, raw: Tokenizer, **config: Any) -> CheckpointText:
    path.mkdir(exist_ok=True)
    raw.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config})
    )
    return load_checkpoint_text(path)


def with_bos(raw: Tokenizer) -> Tokenizer:
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return raw


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("flag", [None, True, False])
def test_completions_get_the_start_token_as_in_transformers_and_chats_none(
    tmp_path: Path, adds: bool, flag: bool | None
) -> None:
    transformers = pytest.importorskip("transformers")
    raw = with_bos(sentencepiece_like()) if adds else sentencepiece_like()
    config = {"bos_token": "<s>"} if flag is None else {"bos_token": "<s>", "add_bos_token": flag}
    tokenizer = PromptTokenizer(checkpoint_at(tmp_path, raw, **config))
    body = list(sentencepiece_like().encode("the forest").ids)
    completion = unpack_tokens(tokenizer.encode_now("the forest", add_special_tokens=True))
    assert completion == ([1, *body] if adds else body)
    assert completion == transformers.AutoTokenizer.from_pretrained(tmp_path)("the forest").input_ids
    assert unpack_tokens(tokenizer.encode_now("the forest", add_special_tokens=False)) == body


def test_the_lower_bound_of_tokens_is_one(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer(load_checkpoint_text(DEMO))
    for text in (TEXT, "a" * 1000, " " * 1000, "東" * 50):
        bound = tokenizer.at_least_tokens(text)
        assert 0 < bound <= len(unpack_tokens(tokenizer.encode_now(text, add_special_tokens=True)))
    assert PromptTokenizer(checkpoint_at(tmp_path, sentencepiece_like())).at_least_tokens("the " * 99) == 0


def test_packing_is_little_endian_u32() -> None:
    assert pack_tokens([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"
    assert unpack_tokens(pack_tokens([7, 2**32 - 1])) == [7, 2**32 - 1]


# --- checkpoint files ---------------------------------------------------------------------------------------------


def test_defaults_and_end_tokens_come_from_the_files(tmp_path: Path) -> None:
    demo = load_checkpoint_text(DEMO)
    assert demo.defaults == SamplingDefaults(temperature=0.7, top_p=0.9, top_k=0, max_new_tokens=80)
    assert demo.eos_token_ids == {0}
    bare = checkpoint_at(tmp_path, sentencepiece_like(), eos_token="</s>")
    assert bare.defaults == SamplingDefaults()
    assert bare.eos_token_ids == {2}
    (tmp_path / "config.json").write_text('{"eos_token_id": [5, 6]}')
    assert load_checkpoint_text(tmp_path).eos_token_ids == {5, 6}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7, "top_k": 40}')
    assert load_checkpoint_text(tmp_path).eos_token_ids == {7}
    assert load_checkpoint_text(tmp_path).defaults.top_k == 40


def test_a_broken_checkpoint_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no directory"):
        load_checkpoint_text(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"tokenizer\.json is missing"):
        load_checkpoint_text(tmp_path)
    whole = (DEMO / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"tokenizer\.json cannot be read"):
        load_checkpoint_text(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(whole)
    for name, text in (
        ("generation_config.json", "{"),
        ("generation_config.json", '{"temperature": "hot"}'),
        ("tokenizer_config.json", "[]"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=name):
            load_checkpoint_text(tmp_path)
        (tmp_path / name).unlink()


# --- chat template ------------------------------------------------------------------------------------------------

CHATML = (
    "{%- for message in messages %}\n    {{- '<|im_start|>' + message.role + '\\n' + message['content'] }}\n"
    "    {%- if not loop.last %}\n    {{- '<|im_end|>\\n' }}\n    {%- endif %}\n{%- endfor %}\n"
    "{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}\n"
)
TEMPLATES = {
    "chatml": CHATML,
    "bos, eos, trim and tojson": "{{ bos_token }}{% for m in messages %}\n  {% set x = m.content | trim %}\n"
    "{{ {'r': m.role, 'c': x, 'é': '<&>'} | tojson }}{{ eos_token }}\n  {% endfor %}{{ [1, 2] | tojson(indent=2) }}",
    "loop controls and generation": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "tools and a namespace": "{% set ns = namespace(n=0) %}{% if tools is none and not documents %}plain{% endif %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }} {{ strftime_now('%Y') }}",
    "slices and tests": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% else %}{% set loop_messages = messages %}{% endif %}{% for m in loop_messages %}"
    "{{ m.content.split('</x>')[-1].strip() | upper }}|{{ m.name is defined }}\n{% endfor %}",
}
CHATS = (
    [("user", "hi")],
    [("system", ' Be <kind> & "short". '), ("user", "Grüße 🌲"), ("assistant", "</x>ok\n"), ("user", "more\n\n")],
)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("in_file", [False, True])
def test_rendering_equals_transformers(tmp_path: Path, name: str, in_file: bool) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    if in_file:
        (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name])
        checkpoint = checkpoint_at(tmp_path, with_bos(sentencepiece_like()), chat_template="not this", **tokens)
    else:
        checkpoint = checkpoint_at(tmp_path, with_bos(sentencepiece_like()), chat_template=TEMPLATES[name], **tokens)
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    template, tokenizer = ChatTemplate(checkpoint), PromptTokenizer(checkpoint)
    for chat in CHATS:
        plain = [{"role": role, "content": content} for role, content in chat]
        text = template.render_now([ChatMessage(role, content) for role, content in chat])
        assert text == oracle.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        ids = oracle.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
        assert unpack_tokens(tokenizer.encode_now(text, add_special_tokens=False)) == ids


@pytest.mark.parametrize("values", [{}, {"enable_thinking": False}, {"enable_thinking": True, "level": [1, "é"]}])
def test_values_for_a_template_are_as_in_transformers(tmp_path: Path, values: dict[str, object]) -> None:
    transformers = pytest.importorskip("transformers")
    template = (
        "{% macro quote(x) %}<{{ x }}{{ mark }}>{% endmacro %}{% if enable_thinking is not defined %}"
        "{% set enable_thinking = true %}{% endif %}{{ quote(level) }}{{ enable_thinking }}"
        "{% for m in messages %}{{ m.content }}{{ level | tojson if level is defined }}{% endfor %}"
    )
    checkpoint = checkpoint_at(tmp_path, sentencepiece_like(), chat_template=template)
    assert ChatTemplate(checkpoint).variables == {"enable_thinking", "level", "mark"}
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = oracle.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, **values)
    assert ChatTemplate(checkpoint).render_now([ChatMessage("user", "x")], values) == expected


def test_the_demo_model_renders_and_tokenises_as_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(DEMO)
    checkpoint = load_checkpoint_text(DEMO)
    template, tokenizer = ChatTemplate(checkpoint), PromptTokenizer(checkpoint)
    for chat in CHATS:
        plain = [{"role": role, "content": content} for role, content in chat]
        text = template.render_now([ChatMessage(role, content) for role, content in chat])
        ids = oracle.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
        assert unpack_tokens(tokenizer.encode_now(text, add_special_tokens=False)) == ids
    assert unpack_tokens(tokenizer.encode_now(TEXT, add_special_tokens=True)) == oracle(TEXT).input_ids


def render(tmp_path: Path, template: str | None, max_chars: int = 1000) -> str:
    config = {} if template is None else {"chat_template": template}
    checkpoint = checkpoint_at(tmp_path, sentencepiece_like(), **config)
    return ChatTemplate(checkpoint, max_chars=max_chars).render_now([ChatMessage("user", "hi", "bo")])


def test_a_checkpoint_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match=r"no chat template .*chat_template\.jinja.*Use /v1/completions") as caught:
        render(tmp_path, None)
    assert caught.value.kind.http_status == 400


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content + 1 }}", "chat template"),
        ("{{ 1 / 0 }}", "chat template failed"),
        ("{{ nothing.here }}", "chat template refused"),
        ("{{ messages.append(1) }}", "chat template refused"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template refused"),
        ("{% for i in range(1000) %}xx{% endfor %}", "more than 1000 characters"),
    ],
)
def test_a_template_that_fails_is_the_clients_error(tmp_path: Path, template: str, words: str) -> None:
    with pytest.raises(ApiError, match=words):
        render(tmp_path, template)


def test_names_reach_the_template_and_the_named_default_is_used(tmp_path: Path) -> None:
    assert render(tmp_path, "{{ messages[0].name }}") == "bo"
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    checkpoint = checkpoint_at(tmp_path, sentencepiece_like(), chat_template=several)
    assert ChatTemplate(checkpoint).render_now([ChatMessage("user", "x")]) == "yes"


def test_a_template_with_a_syntax_error_is_found_at_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 1"):
        render(tmp_path, "{% for %}")


def test_the_demo_checkpoint_survives_a_move(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "demo", ignore=shutil.ignore_patterns("*.safetensors"))
    assert load_checkpoint_text(tmp_path / "demo").chat_template


def test_a_long_stream_costs_little_per_token() -> None:
    """Linear work: the windows stay short, whatever has been sent."""
    raw = TOKENIZERS["sentencepiece-like"]
    rng = random.Random(1)
    decoded: list[int] = []

    class Counting:
        decoder = raw.decoder
        get_added_tokens_decoder = staticmethod(raw.get_added_tokens_decoder)
        get_vocab = staticmethod(raw.get_vocab)

        @staticmethod
        def decode(ids: list[int], skip_special_tokens: bool) -> str:
            decoded.append(len(ids))
            return str(raw.decode(ids, skip_special_tokens=skip_special_tokens))

    stream = DetokenizerFactory(Counting()).start([])  # type: ignore[arg-type]
    words = [raw.token_to_id(word) for word in ("▁the", "▁forest", "s", "▁is")]
    for _ in range(2000):
        stream.feed([rng.choice(words)])
    assert max(decoded) <= 8


def test_all_that_a_template_is_given_counts_as_work() -> None:
    plain = ChatPrompt((ChatMessage("user", "x"),) * 10)
    message = ChatMessage("user", "x", "n" * 500, "r" * 7000)
    assert size_of(ChatPrompt((message,) * 10)) == size_of(plain) + 10 * 7500
    assert size_of(replace(plain, template_values={"a": "v" * 1000})) > size_of(plain) + 10 * 1000
