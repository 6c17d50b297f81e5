"""How a document is put before the model: as an answer, as a signature with its docstring, or as plain text.

One special token, END, stands before every document and after every answer, so that a model that has said what it has
to say emits END and stops. The chat form is the one that the tokenizer's chat template writes:

    END user: What does json.dumps do?\\nassistant:\\nSerialize ... END
"""

from __future__ import annotations

import random
import textwrap

from demo.corpus import Document

END = "<|endoftext|>"
ANSWER_CHARS_MAX = 700
CHAT_SHARE, SIGNATURE_SHARE = 0.5, 0.25
SYSTEM_SHARE = 0.15

QUESTIONS = (
    "What does {} do?",
    "What does {} do?",
    "What does `{}` do?",
    "What is {}?",
    "What is {} for?",
    "How do I use {}?",
    "Explain {}.",
    "Describe {}.",
    "Tell me about {}.",
    "Can you tell me what {} does?",
    "When would I use {}?",
    "Document {} for me.",
)

SYSTEM_LINES = (
    "You are a helpful assistant.",
    "You answer questions about Python.",
    "You know the standard library well.",
    "Answer in plain words.",
    "Keep your answers short.",
    "Be precise.",
    "The reader is new to the language.",
    "You work for the support desk of a software company.",
    "Write the way the documentation does.",
    "Stop when the question is answered.",
)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ 'You may call functions:\\n' }}"
    "{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
    '{{ \'To call one, write:\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>\\n\\n\' }}'
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}"
    "{{ 'user: ' + message['content'] | trim + '\\n' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ 'assistant:\\n' + message['content'] | trim }}"
    "{% for call in message['tool_calls'] %}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson + '}\\n</tool_call>' }}"
    "{{ '' if loop.last else '\\n' }}"
    "{% endfor %}"
    "{{ eos_token }}"
    "{% elif message['role'] == 'tool' %}"
    "{{ 'tool: ' + message['content'] | trim + '\\n' }}"
    "{% else %}"
    "{{ message['content'] | trim + '\\n\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)


def render(document: Document, rng: random.Random) -> str:
    """The document in one form drawn from `rng`, without END. Nameless documents are always plain text."""
    draw = rng.random()
    if not document.name:
        return document.text
    if draw < CHAT_SHARE:
        return system_prefix(rng) + chat(question(document, rng), answer(document))
    if draw < CHAT_SHARE + SIGNATURE_SHARE and document.signature:
        return signed(document)
    return document.text


def chat(asked: str, answered: str) -> str:
    return f"user: {asked}\nassistant:\n{answered}"


def question(document: Document, rng: random.Random) -> str:
    """One of QUESTIONS about the whole dotted name or, as often as not, its last part or two."""
    parts = document.name.split(".")
    return rng.choice(QUESTIONS).format(".".join(parts[-rng.choice((1, 2, 2, len(parts))) :]))


def answer(document: Document) -> str:
    """The leading paragraphs that fit ANSWER_CHARS_MAX characters, and the first one in any case."""
    paragraphs = document.text.split("\n\n")
    kept = paragraphs[0]
    for paragraph in paragraphs[1:]:
        if len(kept) + len(paragraph) + 2 > ANSWER_CHARS_MAX:
            break
        kept += "\n\n" + paragraph
    return kept


def signed(document: Document) -> str:
    return f'{document.signature}\n    """' + textwrap.indent(document.text, "    ").lstrip() + '"""'


def system_prefix(rng: random.Random) -> str:
    """Now and then a few plain lines ahead of the question: the place that the template gives a system message."""
    if rng.random() >= SYSTEM_SHARE:
        return ""
    return " ".join(rng.sample(SYSTEM_LINES, rng.randint(1, 3))) + "\n\n"
