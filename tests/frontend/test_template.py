"""Rendering equals Hugging Face's ``apply_chat_template`` on the published template."""

from __future__ import annotations

import hashlib
import random
import re

import pytest
from jinja2.exceptions import TemplateError

from ninfer.errors import ArtifactError, InvalidRequest
from ninfer.frontend.messages import read_messages
from ninfer.frontend.template import ChatTemplate
from ninfer.frontend.tools import read_tools

WORDS = [
    "Ada",
    "<think>",
    "</think>",
    "<|im_end|>",
    "naïve",
    "東京",
    "😀",
    "\n\n",
    "",
    "x=1",
    "{{",
    "y",
    "}}",
    "<tool_response>",
    '"quoted"',
    "<b>&amp;</b>",
    "\t",
]
VALUES = [
    "text",
    "",
    " padded ",
    "two\nlines",
    "<tag>",
    7,
    -1.5,
    1e100,
    True,
    False,
    None,
    [1, "a", None],
    {"k": {"n": []}},
]


def words(rng: random.Random, most: int = 6) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(0, most)))


def content(rng: random.Random):
    if rng.random() < 0.7:
        return words(rng)
    return [{"type": "text", "text": words(rng)} for _ in range(rng.randint(0, 3))]


def call(rng: random.Random) -> dict:
    arguments = {f"key{i}": rng.choice(VALUES) for i in range(rng.randint(0, 3))}
    function = {"name": rng.choice(["f", "get_weather"]), "arguments": arguments}
    return {"id": f"call_{rng.randint(0, 9)}", "type": "function", "function": function}


def assistant(rng: random.Random) -> dict:
    message = {"role": "assistant", "content": rng.choice([content(rng), words(rng), None])}
    if rng.random() < 0.5:
        message["reasoning_content"] = words(rng)
    if rng.random() < 0.4:
        message["tool_calls"] = [call(rng) for _ in range(rng.randint(1, 3))]
    return message


def conversation(seed: int) -> tuple[list[dict], list[dict], dict]:
    """Messages, tools and template variables. Most are renderable, some are not."""
    rng = random.Random(seed)
    messages = [{"role": "system", "content": content(rng)}] if rng.random() < 0.5 else []
    wrapped = rng.random() < 0.1
    for _ in range(rng.randint(1, 4)):
        query = "<tool_response>x</tool_response>" if wrapped else content(rng)
        messages.append({"role": "user", "content": query})
        while rng.random() < 0.6:
            messages.append(assistant(rng))
            messages += [{"role": "tool", "content": words(rng)} for _ in range(rng.choice([0, 0, 1, 2]))]
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool{i}",
                "description": words(rng),
                "parameters": {"type": "object", "properties": {"x": {"type": "string", "enum": ["é", "<"]}}},
            },
        }
        for i in range(rng.choice([0, 0, 1, 3]))
    ]
    variables = {"add_generation_prompt": rng.random() < 0.8}
    if rng.random() < 0.6:
        variables["enable_thinking"] = rng.random() < 0.5
    return messages, tools, variables


@pytest.fixture(scope="module")
def template(template_source):
    return ChatTemplate(template_source, {})


@pytest.fixture(scope="module")
def reference(tiny, template_source):
    """``apply_chat_template`` of a transformers tokenizer that carries the published template."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tiny.tokenizer_json().decode()))
    tokenizer.chat_template = template_source

    def render(messages, tools, variables):
        return tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **variables)

    return render


def test_equal_to_transformers_over_generated_conversations(template, reference):
    rendered = refused = 0
    for seed in range(200):
        messages, tools, variables = conversation(seed)
        values = [turn.value for turn in read_messages(messages)]
        declared = [declaration.value for declaration in read_tools(tools)]
        try:
            expected = reference(messages, tools, variables)
        except TemplateError as error:
            reason = error.message
        else:
            rendered += 1
            assert template.render(values, declared or None, variables) == expected
            continue
        refused += 1
        with pytest.raises(InvalidRequest, match=re.escape(reason)):
            template.render(values, declared or None, variables)
    assert rendered > 150
    assert refused > 0


def digest(text: str) -> tuple[int, str]:
    data = text.encode()
    return len(data), hashlib.sha256(data).hexdigest()


def test_published_texts(template):
    """Lengths and hashes of the family's fixed texts and of two whole prompts."""
    function = {"name": "f", "description": "d", "parameters": {
        "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}  # fmt: skip
    tools = [{"type": "function", "function": function}]
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "reasoning_content": "R", "content": None,
         "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "content": "T"},
    ]  # fmt: skip
    values = [turn.value for turn in read_messages(messages)]
    text = template.render(values, tools, {"add_generation_prompt": True})
    assert digest(text) == (1335, "669cc7e80bd55daa9108420235cb131d2ec64c2ee512158eefa359a073d73993")
    head = text[text.index("# Tools") : text.index("<tools>") + len("<tools>")]
    assert digest(head) == (61, "c1ac20d770de32b1f158c730a299681c8cc51b3868454fbba102ac9aeacad7bf")
    instructions = text[text.index("</tools>") + len("</tools>") : text.index("</IMPORTANT>") + len("</IMPORTANT>")]
    assert digest(instructions) == (817, "c618bf70de036a3337fbf9cfaf7171d7b700d3e116d61b6f4a40511e1ab4e25b")
    hi = template.render([{"role": "user", "content": "Hi"}], None, {"add_generation_prompt": True})
    assert digest(hi) == (60, "7562ba8388193b82d95953831c2d4d61f85796a9ea065d8d3e3db7b30d9a9447")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "assistant", "content": "x"}], "No user query found in messages."),
        ([{"role": "tool", "content": "x"}], "No user query found in messages."),
        (
            [{"role": "user", "content": "x"}, {"role": "system", "content": "s"}],
            "System message must be at the beginning.",
        ),
    ],
)
def test_the_template_speaks_for_itself(template, messages, reason):
    with pytest.raises(InvalidRequest) as refusal:
        template.render(messages, None, {})
    assert (refusal.value.field, refusal.value.reason) == ("messages", reason)


def test_a_tail_of_tool_results_renders(template):
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "c"},
        {"role": "tool", "content": "t"},
    ]
    assert template.render(messages, None, {}).endswith("<tool_response>\nt\n</tool_response><|im_end|>\n")


@pytest.mark.parametrize("source",
    ["", "{% for %}", "{{ x|nofilter }}", "{{ 'a' }", "{% include 'x' %}", "{% block b %}{% endblock %}",
     "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", "x" * (1 << 20) + "x"],
)  # fmt: skip
def test_broken_sources(source):
    with pytest.raises(ArtifactError) as refusal:
        ChatTemplate(source, {})
    assert refusal.value.where.startswith("chat_template.jinja")


def test_variables_reach_the_template():
    template = ChatTemplate("{{ eos_token }}|{{ mode }}|{{ tools is none }}|{{ x is defined }}", {"eos_token": "<e>"})
    assert template.render([], None, {"mode": 3}) == "<e>|3|True|False"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ strftime_now('%Y')|length }}", "4"),
        ("{{ {'a': [1, 'é', '<']}|tojson }}", '{"a": [1, "é", "<"]}'),
        ("{{ {'b': 1, 'a': 2}|tojson(indent=1) }}", '{\n "b": 1,\n "a": 2\n}'),
        ("{% for i in range(9) %}{% if i > 2 %}{% break %}{% elif i > 0 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
         "0"),
        ("{% generation %}a{{ 1 }}{% endgeneration %}b", "a1b"),
        ("{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ dict(a=1).items()|list }}", "[('a', 1)]"),
        ("{% for k, v in {'x': 1}|items %}{{ loop.index0 }}{{ loop.last }}{{ k ~ v }}{% endfor %}", "0Truex1"),
        ("{% for i in [1, 2, 3] if i != 2 %}{{ loop.previtem }}{{ i }}{{ loop.nextitem }};{% else %}-{% endfor %}",
         "13;13;"),
        ("{% for n in [{'c': [{'c': []}]}] recursive %}<{{ loop(n.c) }}>{% endfor %}", "<<>>"),
        ("{% macro m(a, b='d') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}"
         "{{ m(1) }}{% call m(2) %}c{% endcall %}", "1d2dc"),
        ("{% filter upper %}abc{% endfilter %}{% set x %}y{% endset %}{{ x }}", "ABCy"),
        ("{{ 'a,b'.split(',')[-1] }}{{ 'abc'[::-1] }}{{ [1, 2, 3][1:] }}", "bcba[2, 3]"),
        ("{{ '%s-%03d' % ('a', 7) }}{{ '{:>3}'.format(5) }}{{ '%s'|format('z') }}", "a-007  5z"),
        ("{{ ['b', 'a']|sort|join(', ') }}{{ [3, 1]|max }}{{ 'x'|default('y') }}{{ u|default('z') }}", "a, b3xz"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list|length }}", "1"),
        ("{{ 'a' if x is not defined and 1 in [1] and 'k' not in {'j': 1} else 'b' }}", "a"),
        ("{{ 2 ** 10 // 3 % 7 - -1 }}{{ 7 / 2 }}", "63.5"),
        ("{{ none }}{{ u }}{{ true }}{{ 1.5 }}", "NoneTrue1.5"),
        ("{{ '<a>'|safe }}{{ '<a>'|e }}", "<a>&lt;a&gt;"),
        ("{{ messages[0].role }}{{ messages[0]['content'] }}{{ messages[0].get('x', 'd') }}", "userhid"),
    ],
)  # fmt: skip
def test_what_chat_templates_use(source, expected):
    """Each also agrees with Hugging Face's own renderer."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": "hi"}]
    assert ChatTemplate(source, {}).render(messages, None, {}) == expected
    assert render_jinja_template([messages], chat_template=source)[0] == [expected]
