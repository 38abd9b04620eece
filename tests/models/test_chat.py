"""Chat templates: in the style of six model families, the rules of Hugging Face, hostile ones."""

from __future__ import annotations

import datetime
import threading
import time

import pytest

from tilegrad.core.errors import UserError
from tilegrad.models.tokens.chat import ChatTemplate
from tilegrad.models.tokens.sandbox import Limits

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi! "},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Why?"},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"type": "object"}}}]

CHATML = """
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nA default.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- set first = messages[0] %}
{%- if first.role == 'system' %}
    {%- set system = first['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n" + system }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.seen and message.role == "user" and message.content is string %}
        {%- set ns.seen = true %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" and '</think>' in message.content %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- else %}
        {%- set content = message.content %}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
{%- endfor %}
{{- ns.last }}
"""
GEMMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('no system role') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + (message['content'] | trim) + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
MISTRAL = """
{%- set system, rest = (messages[0].content, messages[1:]) if messages[0].role == "system"
    else ("", messages) %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message.role == "user" and loop.last and system %}
        {{- "[INST] " + system + "\\n\\n" + message.content + "[/INST]" }}
    {%- elif message.role == "user" %}
        {{- "[INST] " + message.content + "[/INST]" }}
    {%- elif message.role == "assistant" %}
        {%- generation %}{{- " " + message.content + eos_token }}{%- endgeneration %}
    {%- else %}{% continue %}
    {%- endif %}
{%- endfor %}
"""
PHI3 = """{% for message in messages %}
{% if message['role'] in ['system', 'user', 'assistant'] %}
{{'<|' ~ message['role'] ~ '|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|assistant|>\\n' }}{% else %}
{{ eos_token }}{% endif %}
"""


def test_smollm_style() -> None:
    assert ChatTemplate(CHATML).render(CHAT[1:]) == (
        "<|im_start|>system\nA default.<|im_end|>\n<|im_start|>user\n Hi! <|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    text = ChatTemplate(CHATML).render(CHAT, add_generation_prompt=False)
    assert text.startswith("<|im_start|>system\nBe brief.") and text.endswith("Why?<|im_end|>\n")


def test_llama3_style() -> None:
    template = ChatTemplate(LLAMA3)
    text = template.render(CHAT[:2], bos_token="<B>", date_string="1 May 2026")
    assert text == (
        "<B><|start_header_id|>system<|end_header_id|>\n\nToday: 1 May 2026\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    years = {datetime.datetime.now().strftime("%Y")}
    text = template.render(CHAT, bos_token="")
    years.add(datetime.datetime.now().strftime("%Y"))
    assert any(year in text for year in years)


def test_qwen_style_with_tools() -> None:
    chat = [*CHAT[:2], {"role": "assistant", "content": "<think>x</think>\n\nHm."}, CHAT[3]]
    text = ChatTemplate(QWEN).render(chat, tools=TOOLS)
    assert '\n{"type": "function", "function": {"name": "größe", "parameters": ' in text
    assert "<|im_start|>assistant\nHm.<|im_end|>" in text and text.endswith("3")
    assert "größe" not in ChatTemplate(QWEN).render(chat)


def test_gemma_style_refuses() -> None:
    template = ChatTemplate(GEMMA)
    assert template.render(CHAT[1:2], bos_token="<bos>") == (
        "<bos><start_of_turn>user\nHi!<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(UserError, match=r"line 4: it refuses these messages: no system role"):
        template.render(CHAT, bos_token="<bos>")
    with pytest.raises(UserError, match="roles must alternate"):
        template.render([CHAT[1], CHAT[1]], bos_token="<bos>")


def test_mistral_style_with_generation_and_continue() -> None:
    chat = [*CHAT, {"role": "tool", "content": "x"}, CHAT[3]]
    text = ChatTemplate(MISTRAL).render(chat, bos_token="<s>", eos_token="</s>")
    assert text == (
        "<s>[INST]  Hi! [/INST] Hello.</s>[INST] Why?[/INST][INST] Be brief.\n\nWhy?[/INST]"
    )


def test_phi3_style_and_trimmed_blocks() -> None:
    assert ChatTemplate(PHI3).render(CHAT[:2]) == (
        "<|system|>\nBe brief.<|end|>\n<|user|>\n Hi! <|end|>\n<|assistant|>\n"
    )
    text = ChatTemplate("  {% if true %}\na\n  {% endif %}\nb").render([])
    assert text == "a\nb"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("{{ {'a': '<é>', 'b': [1, none, true]} | tojson }}", '{"a": "<é>", "b": [1, null, true]}'),
        ("{{ {'b': 1} | tojson(indent=2) }}", '{\n  "b": 1\n}'),
        ("{{ messages | map(attribute='role') | join(', ') }}", "system, user, assistant, user"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "2"),
        ("{{ (messages | rejectattr('role', 'equalto', 'user') | list)[0].role }}", "system"),
        ("{% for k, v in {'x': 1, 'y': 2}.items() %}{{ k }}{{ v }}{% endfor %}", "x1y2"),
        ("{% for k in {'x': 1} | dictsort %}{{ k }}{% endfor %}", "('x', 1)"),
        ("{{ 'a-b'.split('-')[0].upper() ~ 1 ~ none }}", "A1None"),
        ("{{ 'x\\ny' | indent(2, first=true) }}", "  x\n  y"),
        ("{{ missing | default('d') }}{{ missing }}", "d"),
        ("{{ '%s is %d' % ('a', 3) }}{{ 2 ** 10 }}{{ 7 // 2 }}{{ 'ab' * 2 }}", "a is 310243abab"),
        ("{% macro m(a, b=2) %}{{ a + b }}{% endmacro %}{{ m(1) }}{{ m(1, b=5) }}", "36"),
        (
            "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }} "
            "{% endfor %}",
            "1/2 2/2 ",
        ),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{{ x | length }}", "a12"),
        ("{{ messages | first | string | length > 9 }}{{ [3, 1] | sort | last }}", "True3"),
        ("{{ 'abc' | replace('b', 'x') | title | reverse }}{{ ['a'] + ['b'] }}", "cxA['a', 'b']"),
        ("{{ [1, 2, 3] | sum }}{{ dict(a=1).get('a') }}{{ 'ab'[::-1] }}{{ 3.0 | int }}", "61ba3"),
    ],
)
def test_what_templates_use(expression: str, text: str) -> None:
    assert ChatTemplate(expression).render(CHAT) == text


DOUBLE = "{% set n = namespace(x='aaaa') %}{% for i in range(99) %}"
HOSTILE = {
    "loop in loop": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "loop that skips": "{% for i in range(99999) if false %}{% endfor %}" * 20,
    "repeat": "{{ 'a' * 10**10 }}",
    "repeat a list": "{{ [1] * 10**10 }}",
    "repeat often": "{% for i in range(9999) %}{% set x = 'a' * 3000000 %}{% endfor %}",
    "plus": DOUBLE + "{% set n.x = n.x + n.x %}{% endfor %}",
    "tilde": DOUBLE + "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "block": DOUBLE + "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "nested lists": DOUBLE + "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "nested dicts": DOUBLE + "{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}{{ n.x | tojson }}",
    "calls of dict": DOUBLE + "{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
    "namespaces": DOUBLE + "{% set n.x = namespace(a=[n.x, n.x]) %}{% endfor %}{{ n.x }}",
    "numbers": "{% set n = namespace(x=99) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}"
    "{% endfor %}",
    "much output": "{% set x = 'a' * 9999 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "much text": "{% set b %}{% for i in range(9999) %}" + "x" * 50000 + "{% endfor %}{% endset %}",
    "slices": "{% set x = 'a' * 3000000 %}" + "{% set y = x[::-1] %}" * 1000,
    "many parts": "{{ a }}" * 14000,
    "comparisons": "{% set x = ['a'] * 99999 %}{% set y = ['a'] * 99999 %}"
    "{% for i in range(99999) %}{% if x == y %}{% endif %}{% endfor %}",
    "text of a list": "{% set x = ['a'] * 99999 %}{% for i in range(99999) %}{% set y = x | safe %}"
    "{% endfor %}",
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "recursive loop": "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "width": "{{ '%999999999d' % 1 }}",
    "width of an argument": "{{ '%*d' % (999999999, 1) }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "format map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "justify": "{{ 'a'.ljust(999999999) }}",
    "center": "{{ 'a' | center(999999999) }}",
    "indent": "{{ 'a' | indent(999999999, true) }}",
    "json": "{{ messages | tojson(indent=999999999) }}",
    "precision": "{{ 1.5 | round(999999999) }}",
    "replace": "{{ ('a' * 9999).replace('', 'b' * 99999) }}",
    "replace filter": "{{ ('a' * 9999) | replace('a', 'b' * 99999) }}",
    "join": "{{ ('a,' * 99999).split(',') | join('b' * 99999) }}",
    "join method": "{{ ('b' * 99999).join(('a,' * 99999).split(',')) }}",
    "range": "{{ range(999999999) | list }}",
    "date": "{{ strftime_now('%999999999Y') }}",
    "class": "{{ ''.__class__ }}",
    "class as item": "{{ ''['__class__'] }}",
    "class by filter": "{{ '' | attr('__class__') }}",
    "class by map": "{{ messages | map(attribute='__class__') | list }}",
    "class in parts": "{{ ''['__cla' ~ 'ss__']['__mro__'] }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "globals as item": "{{ namespace['__init__']['__globals__'] }}",
    "import": "{% import 'os' as os %}{{ os }}",
    "include": "{% include '/etc/passwd' %}",
    "extends": "{% extends 'x' %}",
    "change": "{{ messages.append(1) }}",
    "pop": "{{ messages[0].pop('role') }}",
    "deep": "{{" + "(" * 40000 + "1" + ")" * 40000 + "}}",
    "deep lists": "{{" + "[" * 3000 + "]" * 3000 + "}}",
    "deep ifs": "{% if true %}" * 3000 + "{% endif %}" * 3000,
    "long": "x" * 200_000,
    "syntax": "{% if %}",
    "long number": "{{ " + "9" * 9000 + " }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_refused(name: str) -> None:
    """Half a second at most as a rule; what is not bounded would run for minutes."""
    start = time.thread_time()
    with pytest.raises(UserError) as found:
        ChatTemplate(HOSTILE[name]).render(CHAT)
    assert time.thread_time() - start < 20
    assert "chat template" in str(found.value)


def test_errors_name_the_line() -> None:
    for text, line, said in [
        ("a\n\n{{ 1 + 'a' }}", 3, "TypeError"),
        ("a\n{% if %}", 2, "Syntax"),
        ("\n\n\n{{ a.b.c }}", 4, "'a' is undefined"),
        ("\n{{ x | nothing }}", 2, "nothing"),
    ]:
        with pytest.raises(UserError, match=rf"line {line}: .*{said}"):
            ChatTemplate(text).render([])


def test_large_chats_are_no_attack() -> None:
    chat = [{"role": "user", "content": "word " * 200_000}] * 10
    assert len(ChatTemplate(CHATML).render(chat)) > 10_000_000
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 1000
    assert ChatTemplate(QWEN).render(chat).count("<|im_end|>") == 2000
    assert ChatTemplate(GEMMA).render(chat, bos_token="").count("<end_of_turn>") == 2000


def test_limits_can_be_set() -> None:
    loop = "{% for i in range(20) %}{{ i }}{% endfor %}"
    assert len(ChatTemplate(loop).render([])) == 30
    with pytest.raises(UserError, match="more than 25 turns"):
        ChatTemplate(loop * 2, Limits(steps=25)).render([])
    with pytest.raises(UserError, match="a range of 20"):
        ChatTemplate(loop, Limits(steps=10)).render([])
    with pytest.raises(UserError, match="too"):
        ChatTemplate("{{ 'a' * 9999 }}", Limits(output=100)).render([])


def test_messages_and_variables_are_checked() -> None:
    template = ChatTemplate(CHATML)
    for messages in (
        "hi",
        {"role": "user"},
        [1],
        [{"content": "x"}],
        [{"role": 1, "content": "x"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": object()}],
        [{"role": "user", "content": "a", 1: 2}],
    ):
        with pytest.raises(UserError):
            template.render(messages)
    deep: list = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(UserError, match="nested"):
        template.render([{"role": "user", "content": deep}])
    assert ChatTemplate("{{ mood }}").render([], mood="good") == "good"


def test_messages_are_not_changed_and_threads_do_not_meet() -> None:
    template, out = ChatTemplate(CHATML), []

    def work(number: int) -> None:
        for _ in range(20):
            out.append(template.render([{"role": "user", "content": str(number)}] * number))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(text.count("user") for text in out) == [n for n in range(1, 5) for _ in range(20)]
