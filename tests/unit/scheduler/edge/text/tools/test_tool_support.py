"""Which checkpoints can use tools, and how their calls are written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.base.settings import ServiceSettings
from coppice_scheduler.edge.frontend.admission import size_of
from coppice_scheduler.edge.frontend.generation_spec import ChatPrompt
from coppice_scheduler.edge.text.chat import ChatMessage, ChatTemplate
from coppice_scheduler.edge.text.checkpoint_text import CheckpointText, load_checkpoint_text
from coppice_scheduler.edge.text.output_format import FormatKind, OutputFormat
from coppice_scheduler.edge.text.tools.call_parser import CallDelta
from coppice_scheduler.edge.text.tools.formats import FORMATS, MISTRAL
from coppice_scheduler.edge.text.tools.json_calls import JsonCalls
from coppice_scheduler.edge.text.tools.python_calls import PythonCalls
from coppice_scheduler.edge.text.tools.tool import MAX_TOOL_CHARS, Tool, ToolCall, ToolMode, ToolUse, check_tools
from coppice_scheduler.edge.text.tools.tool_support import AUTO, NO_PARSER, ToolSupport
from coppice_scheduler.edge.text.tools.xml_calls import XmlCalls
from coppice_up.options import TOOL_PARSERS
from tests.fakes.api.rest import DEMO

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
TOOL = Tool("f", SCHEMA, "does f")
USE = ToolUse((TOOL,), ToolMode.AUTO, frozenset({"f"}))
# What the templates of families have in common; the rest of them changes nothing here.
TEMPLATES = {
    "hermes": "{% if tools %}Write <tool_call>\n{...}\n</tool_call>{% endif %}",
    "llama3_json": '{% if tools %}Respond in the format {"name": function name, "parameters": {...}}.{% endif %}',
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{% endif %}{{ '[TOOL_CALLS] [' }}",
    "mistral_args": "{% if tools %}[AVAILABLE_TOOLS]{% endif %}{{ '[TOOL_CALLS]' + 'f' + '[ARGS]' }}",
    "pythonic": "{% if tools %}Use [func_name1(params_name1=params_value1), func_name2()]{% endif %}",
    "qwen3_coder": "{% if tools %}<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>{% endif %}",
    "glm45": "{% if tools %}<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>{% endif %}",
}
READERS = {"pythonic": PythonCalls, "qwen3_coder": XmlCalls, "glm45": XmlCalls}
XML = "{% if tools %}<function=f>{...}</function>{% endif %}"


def checkpoint_with(template: str | None, tool_template: str | None = None) -> CheckpointText:
    return replace(load_checkpoint_text(DEMO), chat_template=template, tool_template=tool_template)


def support(template: str | None, parser: str = AUTO, tool_template: str | None = None) -> ToolSupport:
    checkpoint = checkpoint_with(template, tool_template)
    return ToolSupport(checkpoint, ChatTemplate(checkpoint), parser)


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_is_that_of_the_template(name: str) -> None:
    assert support(TEMPLATES[name]).format_name == name
    parser = support(TEMPLATES[name]).parser(USE)
    assert isinstance(parser, READERS.get(name, JsonCalls))


@pytest.mark.parametrize("name", FORMATS)
def test_of_schemas_what_says_how_values_are_read_is_kept(name: str) -> None:
    tools = support(TEMPLATES[name])
    use = replace(USE, tools=(replace(TOOL, parameters='{"properties": {"a": {"type": "string"}}}'),))
    kept = tools.read_by(use)
    assert kept.tools == ()
    assert kept.texts == ({("f", "a")} if name in ("qwen3_coder", "glm45") else set())
    for each in (kept, use) if kept.texts else ():
        parser = tools.parser(each)
        assert parser is not None
        parser.feed("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>")
        parser.feed("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>")
        assert [found.arguments for found in parser.take() if isinstance(found, CallDelta)] == ['{"a": "1"}']


def test_an_operator_may_say_which_format_it_is_or_that_there_is_none() -> None:
    assert support(XML).format_name == ""
    assert support('{% if tools %}{"tool_name": "f", "parameters": {}}{% endif %}').format_name == ""
    assert support(XML, "hermes").format_name == "hermes"
    assert support(TEMPLATES["hermes"], "pythonic").format_name == "pythonic"
    assert support(TEMPLATES["hermes"], NO_PARSER).format_name == ""
    offered = get_args(ServiceSettings.model_fields["tool_parser"].annotation)
    assert set(offered) == set(TOOL_PARSERS) == {AUTO, NO_PARSER, *FORMATS}


@pytest.mark.parametrize(
    ("template", "parser", "words"),
    [
        (None, AUTO, "does not read tools"),
        ("{{ messages }}", AUTO, "does not read tools"),
        ("{{ messages }}", "hermes", "does not read tools"),
        (XML, AUTO, "--tool-parser hermes | llama3_json"),
        (TEMPLATES["hermes"], NO_PARSER, "switched off"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(template: str | None, parser: str, words: str) -> None:
    with pytest.raises(ApiError, match=r"[tT]ools") as caught:
        support(template, parser).output_format(USE, None)
    assert words in str(caught.value)
    assert caught.value.param == "tools"
    assert caught.value.code == "unsupported_parameter"


def test_a_checkpoint_may_have_a_template_of_its_own_for_tools() -> None:
    checkpoint = checkpoint_with("plain", "{{ tools | tojson }} <tool_call>")
    template = ChatTemplate(checkpoint)
    assert template.render_now([ChatMessage("user", "x")]) == "plain"
    assert template.render_now([ChatMessage("user", "x")], {}, (TOOL,)).endswith(" <tool_call>")
    assert ToolSupport(checkpoint, template).format_name == "hermes"


def test_a_file_of_its_own_wins_over_all_templates(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(DEMO / name, tmp_path)
    templates = [
        {"name": "default", "template": "old"},
        {"name": "tool_use", "template": "old {{ tools }} {{ level }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    named = ChatTemplate(load_checkpoint_text(tmp_path))
    assert (named.reads_tools, named.variables) == (True, {"level"})
    (tmp_path / "chat_template.jinja").write_text("new")
    text = load_checkpoint_text(tmp_path)
    assert (text.chat_template, text.tool_template) == ("new", None)


def test_what_the_template_would_not_show_is_refused() -> None:
    plain = ChatTemplate(checkpoint_with("{{ messages }}"))
    with pytest.raises(ApiError, match="does not read tools"):
        plain.render_now([ChatMessage("user", "x")], {}, (TOOL,))
    with pytest.raises(ApiError, match="does not read calls"):
        plain.render_now([ChatMessage("assistant", "", calls=(ToolCall("c", "f", "{}"),))])
    both = ChatTemplate(checkpoint_with("plain", "with {{ messages[0].tool_calls[0].id }}"))
    assert both.render_now([ChatMessage("assistant", "", calls=(ToolCall("c", "f", "{}"),))]) == "with c"


def test_a_template_sees_tools_and_calls_as_those_of_transformers_do() -> None:
    text = (
        "{{ tools[0] | tojson }}/{% for m in messages %}{{ m.content }}/{{ m.tool_call_id }}/"
        "{% for c in m.tool_calls %}{{ c.id }} {{ c.type }} {{ c.function.name }} {{ c.function.arguments | tojson }} "
        "{% endfor %}{% endfor %}"
    )
    chat = [
        ChatMessage("assistant", "", calls=(ToolCall("c1", "f", '{"a":1,"é":[true]}'), ToolCall("c2", "f", "{broken"))),
        ChatMessage("tool", "42", call_id="c1"),
    ]
    assert ChatTemplate(checkpoint_with(text)).render_now(chat, {}, (TOOL,)) == (
        '{"type": "function", "function": {"name": "f", "description": "does f", "parameters": {"type": "object", '
        '"properties": {"a": {"type": "integer"}}}}}///'
        'c1 function f {"a": 1, "é": [true]} c2 function f "{broken" 42/c1/'
    )


def test_nothing_is_read_and_calls_are_forbidden_where_none_may_be_called() -> None:
    use = replace(USE, mode=ToolMode.NONE)
    hermes = support(TEMPLATES["hermes"])
    assert hermes.parser(use) is None
    assert hermes.output_format(use, None) is None
    assert hermes.forbidden_token(use) is None, "this tokenizer has no token for it"
    checkpoint = checkpoint_with(TEMPLATES["hermes"])
    checkpoint.raw.add_tokens(["<tool_call>"])
    marked = ToolSupport(checkpoint, ChatTemplate(checkpoint))
    assert marked.forbidden_token(use) == checkpoint.raw.token_to_id("<tool_call>")
    assert marked.forbidden_token(USE) is None
    assert marked.opening_token(USE) == checkpoint.raw.token_to_id("<tool_call>")
    assert marked.opening_token(use) is None
    assert hermes.opening_token(USE) is None


@pytest.mark.parametrize("name", FORMATS)
def test_when_an_answer_is_bound(name: str) -> None:
    tools = support(TEMPLATES[name])

    def is_bound(use: ToolUse) -> bool:
        found = tools.output_format(use, None)
        assert found is None or found.kind is FormatKind.TOOL_CALLS
        return found is not None

    strict = replace(USE, tools=(replace(TOOL, is_strict=True),))
    part = replace(USE, tools=(TOOL, replace(TOOL, name="g")))
    assert is_bound(replace(USE, mode=ToolMode.REQUIRED))
    assert not is_bound(USE)
    assert is_bound(strict) == (name != "pythonic"), "no grammar knows it"
    assert is_bound(part) == (name != "pythonic")
    assert tools.ignores_strict(strict) == (name == "pythonic")
    assert not tools.ignores_strict(USE)
    assert not tools.ignores_strict(replace(strict, mode=ToolMode.REQUIRED))


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_calls_in_xml_whose_schema_says_what_xml_cannot(name: str) -> None:
    """Forced as JSON and read as JSON; free where nothing forces them."""
    tools = support(TEMPLATES[name])
    dated = replace(TOOL, parameters='{"properties": {"a": {"type": "string", "format": "date"}}}', is_strict=True)
    free = replace(USE, tools=(dated,))
    forced = replace(free, mode=ToolMode.REQUIRED)
    assert tools.output_format(free, None) is None
    assert tools.ignores_strict(free)
    assert isinstance(tools.parser(free), XmlCalls)
    grammar = tools.output_format(forced, None)
    assert grammar is not None
    assert '"parameters' in str(grammar.value)
    for use in (forced, tools.read_by(forced)):
        parser = tools.parser(use)
        assert parser is not None
        parser.feed('{"name": "f", "parameters": {"a": "2026-01-02"}}')
        assert "".join(each.arguments for each in parser.take() if isinstance(each, CallDelta)) == '{"a": "2026-01-02"}'
    plain = replace(USE, mode=ToolMode.REQUIRED)
    for use in (plain, tools.read_by(plain)):
        assert isinstance(tools.parser(use), XmlCalls)


def test_a_form_beside_tools() -> None:
    form = OutputFormat(FormatKind.JSON, '{"type": "boolean"}', "response_format")
    found = support(TEMPLATES["hermes"]).output_format(USE, form)
    assert found is not None
    assert "answer" in str(found.value)
    none = replace(USE, mode=ToolMode.NONE)
    assert support(TEMPLATES["hermes"]).output_format(none, form) is form
    forced = support(TEMPLATES["hermes"]).output_format(replace(USE, mode=ToolMode.REQUIRED), form)
    assert forced is not None
    assert "answer" not in str(forced.value)
    for name, wanted in (
        ("hermes", replace(form, kind=FormatKind.REGEX, value="a")),
        ("llama3_json", form),
        ("pythonic", form),
    ):
        with pytest.raises(ApiError, match="tools cannot be combined with response_format"):
            support(TEMPLATES[name]).output_format(USE, wanted)


def test_there_are_no_more_tools_than_a_prompt_should_have() -> None:
    check_tools([Tool("f", "{}", "x" * (MAX_TOOL_CHARS - 2))], "")
    for tools in ([Tool("f", "{}", "x" * MAX_TOOL_CHARS)], [Tool("f", "x" * (MAX_TOOL_CHARS + 1))]):
        with pytest.raises(ApiError, match="characters"):
            check_tools(tools, "")


def test_tools_and_calls_count_for_the_time_that_a_prompt_takes() -> None:
    user = ChatMessage("user", "x")
    plain = size_of(ChatPrompt((user,)))
    assert size_of(ChatPrompt((user,), tools=(Tool("f", "p" * 500, "d" * 300),))) >= plain + 800
    assert size_of(ChatPrompt((replace(user, calls=(ToolCall("c", "f", "a" * 700),)),))) >= plain + 700


def test_ids_are_of_the_shape_that_templates_want() -> None:
    ids = {MISTRAL.new_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert FORMATS["hermes"].new_id().startswith("call_")
