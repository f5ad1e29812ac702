"""Hostile templates end in a refusal: they neither hang, nor fill memory, nor get out."""

from __future__ import annotations

import threading
import tracemalloc

import pytest

from ninfer.errors import ArtifactError, InvalidRequest
from ninfer.frontend.budget import MAX_DEPTH, WORK, WORK_PER_CHARACTER, Budget, TemplateLimit
from ninfer.frontend.template import ChatTemplate

GROW = "{% set ns = namespace(x=%s, y=%s) %}{% for i in range(200) %}%s{% endfor %}%s"


def grow(step: str, last: str = "{{ ns.x|length }}", start: str = "'abcdefgh'") -> str:
    return GROW.replace("%s", start, 2).replace("%s", step, 1).replace("%s", last, 1)


LONG = "x" * 100_000
KEEP = "{% set ns.x = x %}"
BOTH = "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}"
UNBOUNDED = {
    "nested loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loop without end": "{% for i in range(10**18) %}{% endfor %}",
    "loop over text": "{% for i in range(9999) %}" + LONG + "{% endfor %}",
    "loop in a test": "{% for i in range(100000) if i in range(100000)|list %}{% endfor %}",
    "recursive loop": "{% for x in [1] recursive %}{% set outer = loop %}"
    "{% for y in range(999) %}{{ outer(range(999)) }}{% endfor %}{% endfor %}",
    "recursive loop, wide": "{% for x in [1] recursive %}{{ loop(range(10**9)) }}{% endfor %}",
    "macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro tree": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    "macro with text": "{% macro m() %}" + LONG + "{% endmacro %}{% for i in range(9999) %}{{ m() }}{% endfor %}",
    "caller with text": "{% macro m() %}{% for i in range(9999) %}{{ caller() }}{% endfor %}{% endmacro %}"
    "{% call m() %}" + LONG + "{% endcall %}",
    "list of a range": "{{ range(10**9)|list }}",
    "sum of a range": "{{ range(10**9)|sum }}",
    "repetition": "{{ 'a' * 10**9 }}",
    "repetition, left": "{{ 10**9 * 'a' }}",
    "repeated list": "{{ [1] * 10**9 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "power tower": grow("{% set ns.x = ns.x * ns.x %}", "{{ ns.x }}", "99"),
    "concatenation": grow("{% set ns.x = ns.x ~ ns.x %}"),
    "addition": grow("{% set ns.x = ns.x + ns.x %}"),
    "adding lists": grow("{% set ns.x = ns.x + ns.x %}", start="[1]"),
    "captured text": grow("{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}" + KEEP),
    "filtered text": grow("{% set x %}{% filter trim %}{{ ns.x }}{{ ns.x }}{% endfilter %}{% endset %}" + KEEP),
    "join": grow("{% set ns.x = [ns.x, ns.x]|join %}"),
    "join method": grow("{% set ns.x = ns.x.join([ns.x, ns.x]) %}"),
    "join with a separator": "{{ ('a' * 10000)|join('b' * 100000) }}",
    "join method with a separator": "{{ ('b' * 100000).join('a' * 10000) }}",
    "replace": "{{ ('a' * 10000)|replace('a', 'b' * 100000) }}",
    "replace by name": "{{ ('a' * 10000)|replace(old='a', new='b' * 100000) }}",
    "replace method": "{{ ('a' * 10000).replace('a', 'b' * 100000) }}",
    "replace nothing": "{{ ('a' * 10000).replace('', 'b' * 100000) }}",
    "padding": "{{ 'a'.center(10**10) }}",
    "padding left": "{{ 'a'.ljust(10**10) }}",
    "zero padding": "{{ 'a'.zfill(10**10) }}",
    "tabs": "{{ ('\t' * 1000).expandtabs(10**9) }}",
    "indent": "{{ ('\n' * 10000)|indent(10**6) }}",
    "indent by text": "{{ ('\n' * 10000)|indent(width='x' * 10000) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent precision": "{{ '%.1000000000f' % 1.5 }}",
    "percent width behind a key": "{{ '%(a)1000000000d' % {'a': 1} }}",
    "percent width behind a nested key": "{{ '%(a(b)c)1000000000d' % {'a(b)c': 1} }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format nested width": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "format by map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format repeated": "{{ ('{0}' * 10000).format('a' * 100000) }}",
    "shared list printed": grow("{% set ns.x = [ns.x, ns.x] %}", "{{ ns.x }}"),
    "shared list as text": grow("{% set ns.x = [ns.x, ns.x] %}", "{{ ns.x|string }}"),
    "shared list as JSON": grow("{% set ns.x = [ns.x, ns.x] %}", "{{ ns.x|tojson }}"),
    "shared mapping as JSON": grow("{% set ns.x = {'a': ns.x, 'b': ns.x} %}", "{{ ns.x|tojson }}"),
    "shared list joined": grow("{% set ns.x = [ns.x, ns.x] %}", "{{ 'a' ~ ns.x }}"),
    "shared list formatted": grow("{% set ns.x = [ns.x, ns.x] %}", "{{ '%s' % ns.x }}{{ '{}'.format(ns.x) }}"),
    "shared lists compared": grow(BOTH, "{{ ns.x == ns.y }}"),
    "shared lists tested": grow(BOTH, "{{ ns.x is eq(ns.y) }}"),
    "shared lists searched": grow(BOTH, "{{ [ns.y].index(ns.x) }}"),
    "JSON indent": grow("{% set ns.x = [ns.x] %}", "{{ ns.x|tojson(indent=10**9) }}"),
    "comparing long texts": "{% set s = 'a' * 10**6 %}{% set u = 'a' * 10**6 %}"
    "{% for i in range(9999) %}{{ s == u }}{% endfor %}",
    "searching long texts": "{% set s = 'a' * 10**6 %}"
    "{% for i in range(9999) %}{{ s.find('b') }}{{ 'b' in s }}{% endfor %}",
    "slicing long texts": "{% set s = 'a' * 10**6 %}{% for i in range(100000) %}{% set u = s[1:] %}{% endfor %}",
    "expanded arguments": "{{ dict(*range(10**9)) }}",
    "expanded filter arguments": "{{ 'a'|replace(*range(10**9)) }}",
    "expanded keywords": grow("{% set ns.x = {'a': ns.x, 'b': ns.x} %}", "{{ dict(**ns.x) }}"),
    "sum of lists": "{{ ([[1]] * 100000)|sum(start=[])|length }}",
    "sum of lists by place": "{{ ([[1]] * 100000)|sum(none, [])|length }}",
    "rounding": "{{ 1.5|round(10**9, 'ceil') }}",
    "rounding left": "{{ 15|round(precision=-(10**9)) }}",
    "stripping": "{{ ('a' * 10**5).strip('b' * 10**5 ~ 'a') }}",
    "trimming": "{{ ('a' * 10**5)|trim('b' * 10**5 ~ 'a') }}",
    "namespace printed": grow("{% set ns.x = [ns.x, ns.x] %}", "{{ '%s' % ns }}"),
    "namespace as text": grow("{% set ns.x = [ns.x, ns.x] %}", "{{ ns|string }}"),
    "namespace in a list": grow("{% set ns.x = [ns.x, ns.x] %}", "{{ [ns] }}"),
    "namespace in itself": "{% set ns = namespace() %}{% set ns.x = [ns, ns] %}{{ [ns] }}",
    "namespace spelled": grow("{% set ns.x = [ns.x, ns.x] %}", "{{ '{0.x!r:.5}'.format(ns) }}"),
    "namespace member": grow("{% set ns.x = [ns.x, ns.x] %}", "{{ '{0.x}'.format(ns) }}"),
    "sorting": "{% set x = range(1000)|list * 1000 %}{% for i in range(1000) %}{% set y = x|sort %}{% endfor %}",
    "grouping": "{% set x = [{'a': 1}] * 100000 %}{% for i in range(1000) %}{% set y = x|groupby('a') %}{% endfor %}",
    "mapping": "{% set x = ['a'] * 100000 %}{% for i in range(1000) %}{% set y = x|map('upper') %}{% endfor %}",
    "calls": "{% for i in range(1000000) %}{{ 'a'.find('b') }}{% endfor %}",
    "time format": "{{ strftime_now('%c' * 10**5) }}",
}  # fmt: skip


@pytest.mark.parametrize("case", UNBOUNDED)
def test_unbounded_work_is_refused(case):
    """In a plain thread, with a modest stack: no signals, no clock."""
    outcome: list[BaseException | str] = []

    def render():
        try:
            outcome.append(ChatTemplate(UNBOUNDED[case], {}).render([{"role": "user", "content": "x"}], None, {}))
        except (ArtifactError, InvalidRequest) as error:
            outcome.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(outcome[0], InvalidRequest)
    assert outcome[0].field == "messages"
    assert "failed" not in outcome[0].reason  # by the rules, not by an accident


def test_memory_stays_small():
    """The worst a doubling text can reach is set by the budget, not by the machine."""
    template = ChatTemplate(UNBOUNDED["concatenation"], {})
    tracemalloc.start()
    with pytest.raises(InvalidRequest):
        template.render([{"role": "user", "content": "x"}], None, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


ESCAPES = {
    "class": "{{ ''.__class__.__mro__ }}",
    "class by item": "{{ ''['__class__']['__mro__'] }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "namespace": "{{ namespace.__init__.__globals__ }}",
    "format attribute": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format map": "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "format of format": "{{ ''.format.__self__.__class__ }}",
    "loop": "{% for i in [1] %}{{ loop.__class__ }}{{ loop._iterator }}{% endfor %}",
    "macro": "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}{{ m._func }}",
    "self": "{{ self.__init__.__globals__ }}{{ self._TemplateReference__context }}",
    "caller": "{% macro m() %}{{ caller._func.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "cycler": "{{ cycler.__init__.__globals__.os }}",
    "lipsum": "{{ lipsum.__globals__.os }}",
    "undefined": "{{ nothing.__class__ }}",
    "map attribute": "{{ ['']|map(attribute='__class__')|list }}",
    "printed function": "{{ raise_exception }}",
    "printed class": "{{ namespace }}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update(role='x') }}",
    "mutate by name": "{{ dict.update(messages[0], {'a': 1}) }}",
}


@pytest.mark.parametrize("case", ESCAPES)
def test_escapes_reach_nothing(case):
    """Either refused, or the forbidden name is undefined."""
    messages = [{"role": "user", "content": "x"}]
    try:
        text = ChatTemplate(ESCAPES[case], {}).render(messages, None, {})
    except (ArtifactError, InvalidRequest):
        text = ""
    assert text.strip("[]") in ("", "Undefined")
    assert messages == [{"role": "user", "content": "x"}]


def test_budget_grows_with_the_input():
    """A long honest conversation renders; its cost per character is far below what input earns."""
    source = (
        "{% for m in messages %}{% for n in messages[:9] %}{{ n.role ~ ': ' ~ m.content|trim }}{% endfor %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 200}] * 2000
    assert len(ChatTemplate(source, {}).render(messages, None, {})) > WORK


def test_a_render_starts_with_a_whole_budget():
    template = ChatTemplate("{% for i in range(n) %}{% endfor %}", {})
    for _ in range(3):
        template.render([], None, {"n": WORK - 1000})
    with pytest.raises(InvalidRequest):
        template.render([], None, {"n": WORK + 1000 * WORK_PER_CHARACTER})


def test_depth_is_counted_per_call_not_in_all():
    source = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(" + str(MAX_DEPTH - 2) + ") }}"
    ChatTemplate(source * 5, {}).render([], None, {})


def test_weighing():
    budget = Budget(1000)
    budget.weigh({"k": ["12345678", 1, None]})
    # mapping 1 + 2, key 1, list 1 + 3, text 1 + 2, two scalars
    assert budget.left == 1000 - (3 + 1 + 4 + 3 + 2)
    with pytest.raises(TemplateLimit):
        Budget(3).weigh("a" * 80)
