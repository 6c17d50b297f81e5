"""How families of models write calls of tools. A format is data: one reader and one grammar serve all whose arguments
are JSON. Python's syntax and XML have a reader each, XML rules of its own in the grammar.

    hermes        <tool_call>\\n{"name": "f", "arguments": {"a": 1}}\\n</tool_call>
    llama3_json   {"name": "f", "parameters": {"a": 1}}; {...}       instead of text
    mistral       [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, ...]
    mistral_args  [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]...
    pythonic      [f(a=1), g(b="x")]                                 instead of text
    qwen3_coder  <tool_call>\\n<function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>
    glm45        <tool_call>f\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>

Sources: the chat templates of Hermes 2 Pro and Qwen 2.5 and 3, of Llama 3.1 to 3.3, of Mistral 7B v0.3 and Nemo, of
Mistral Small 3.2, of Llama 3.2 and 4, of Qwen3-Coder, and of GLM-4.5.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

NAME_PLACE = "NAME"  # in `before`
KEY_PLACE, VALUE_PLACE = "KEY", "VALUE"  # in `argument`
ARGUMENTS_MARKER = "[ARGS]"


@dataclass(frozen=True, slots=True)
class XmlSyntax:
    """What stands around names and values. Those of names and keys are regexes; `argument` is how one is written."""

    name_opens: str
    name_closes: str
    key_opens: str
    key_closes: str
    value_closes: str
    closings: tuple[str, ...]
    argument: str
    space: str = ""  # of which one is dropped on each side of a value
    has_python_words: bool = False  # True, False and None, where no other JSON is around them


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is written `before` + arguments + `after`; several are `opening`, calls with `between`, `closing`."""

    name: str
    before: str
    after: str
    between: str = ""
    opening: str = ""
    closing: str = ""
    opens: str = ""  # what tells calls from text, wherever it stands; empty: calls stand at the beginning
    closes: str = ""
    is_python: bool = False
    xml: XmlSyntax | None = None
    id_chars: int = 24  # of a call
    id_prefix: str = "call_"

    @property
    def is_bare(self) -> bool:
        """Calls stand at the beginning of an answer, and nothing before them says so."""
        return not self.opens

    @property
    def is_json(self) -> bool:
        """Whether arguments are JSON, so that any schema of them is a grammar."""
        return not self.is_python and self.xml is None

    def new_id(self) -> str:
        return self.id_prefix + secrets.token_hex(16)[: self.id_chars]


HERMES = ToolFormat(
    name="hermes",
    before='<tool_call>\n{"name": "NAME", "arguments": ',
    after="}\n</tool_call>",
    between="\n",
    opens="<tool_call>",
    closes="</tool_call>",
)
LLAMA3_JSON = ToolFormat(name="llama3_json", before='{"name": "NAME", "parameters": ', after="}", between="; ")
MISTRAL = ToolFormat(
    name="mistral",
    opening="[TOOL_CALLS] [",
    before='{"name": "NAME", "arguments": ',
    after="}",
    between=", ",
    closing="]",
    opens="[TOOL_CALLS]",
    id_chars=9,  # the template takes no others
    id_prefix="",
)
MISTRAL_ARGS = ToolFormat(
    name="mistral_args",
    before=f"[TOOL_CALLS]NAME{ARGUMENTS_MARKER}",
    after="",
    opens="[TOOL_CALLS]",
    id_chars=9,
    id_prefix="",
)
PYTHONIC = ToolFormat(
    name="pythonic", opening="[", before="NAME(", after=")", between=", ", closing="]", is_python=True
)
QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    before="<tool_call>\n<function=NAME>\n",
    after="</function>\n</tool_call>",
    between="\n",
    opens="<tool_call>",
    closes="</tool_call>",
    xml=XmlSyntax(
        name_opens="<function=",
        name_closes=">",
        key_opens="<parameter=",
        key_closes=">",
        value_closes="</parameter>",
        closings=("</function>", "</tool_call>"),
        argument="<parameter=KEY>\nVALUE\n</parameter>\n",
        space="\n",
        has_python_words=True,
    ),
)
GLM45 = ToolFormat(
    name="glm45",
    before="<tool_call>NAME\n",
    after="</tool_call>",
    between="\n",
    opens="<tool_call>",
    closes="</tool_call>",
    xml=XmlSyntax(
        name_opens="",
        name_closes="(?=<arg_key>|</tool_call>)",
        key_opens="<arg_key>",
        key_closes=r"</arg_key>\s*<arg_value>",
        value_closes="</arg_value>",
        closings=("</tool_call>",),
        argument="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
    ),
)

FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {each.name: each for each in (HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS, PYTHONIC, QWEN3_CODER, GLM45)}
)

# What a chat template says where it tells the model how to call, or writes earlier calls. The first one found counts.
_SIGNS: tuple[tuple[str, ToolFormat | None], ...] = (
    ("<parameter=", QWEN3_CODER),
    ("<function=", None),  # with JSON within, which no parser here reads
    ("<arg_key>", GLM45),
    (ARGUMENTS_MARKER, MISTRAL_ARGS),
    ("[TOOL_CALLS]", MISTRAL),
    ("<tool_call>", HERMES),
    ("func_name1(", PYTHONIC),
    ('{"name": function name, "parameters"', LLAMA3_JSON),
)
# Tokens that are shown where calls are read, although they are special.
MARKERS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", ARGUMENTS_MARKER, "[CALL_ID]", "<|python_tag|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)


def format_of_template(template: str) -> ToolFormat | None:
    """By what a chat template writes; None where no format is known for it."""
    return next((found for sign, found in _SIGNS if sign in template), None)
