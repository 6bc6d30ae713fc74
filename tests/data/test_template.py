import contextlib
import pathlib
import threading
import time

import pytest

from jppo.data import template_worker
from jppo.data import tokenizer as template_module
from jppo.data.rows import Row
from jppo.data.tokenizer import Renderer, load_tokenizer
from jppo.errors import UserError

ASKED = [{"role": "user", "content": "1"}]


def render(tokenizer, template, messages=ASKED):
    tokenizer.chat_template = template
    return Renderer(tokenizer)(messages, Row("d.jsonl", 3, {}, "line"))


@pytest.mark.parametrize(
    "template",
    [
        "{{ greeting }}{{ messages[0].content }}",
        "{% for m in greeting %}{{ m }}{% endfor %}",
        "{{ greeting.text }}",
        "{{ 'a' + greeting }}",
        "{% generation %}{{ greeting|upper }}{% endgeneration %}",
    ],
)
def test_a_name_that_nobody_gives_is_an_error_where_it_is_used(characters, template):
    with pytest.raises(UserError, match=r"d\.jsonl, line 3: the chat template refuses the prompt: 'greeting' is undef"):
        render(characters, template)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% if thinking %}2{% else %}1{% endif %}", "1"),
        ("{% if thinking is defined %}2{% endif %}{{ thinking|default('3') }}", "3"),
        ("{% if not day is defined %}{% set day = '4' %}{% endif %}{{ day }}", "4"),
        ("{% if effort == 'high' %}2{% endif %}{{ messages[0].content }}", "1"),
        ("{% if messages[0].tool_calls %}2{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}", "1"),
        ("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}{% if tools %}2{% endif %}", "<eos>True"),
        ("{% set ns = namespace(n=1) %}{% for i in range(2) %}{{ ns.n }}{% break %}{% endfor %}", "1"),
    ],
)
def test_a_template_may_ask_whether_there_is_one(characters, template, text):
    assert render(characters, template) == text


def test_a_fault_in_a_template_is_one_line(characters):
    with pytest.raises(UserError, match="the chat template is invalid: line 1") as e:
        render(characters, "{% for %}")
    assert "\n" not in str(e.value)
    with pytest.raises(UserError, match="refuses the prompt: can only concatenate"):
        render(characters, "{{ 'a' + 1 }}")


def test_the_template_of_a_real_model_reads_no_other_name(shared):
    tokenizer = load_tokenizer(str(shared / "tokenizers/qwen2.5"))
    assert template_worker.unknown_names(tokenizer.chat_template) == []
    whole = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False)
    assert Renderer(tokenizer)(ASKED, Row("d", 1, {})) == whole


THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{% if think is defined and think is false %}={% endif %}"


@pytest.mark.parametrize(("arguments", "text"), [({}, "1"), ({"think": True}, "1"), ({"think": False}, "1=")])
def test_arguments_reach_the_template(characters, arguments, text):
    characters.chat_template = THINKS
    assert Renderer(characters, arguments=arguments)(ASKED, Row("d.jsonl", 3, {})) == text


@pytest.mark.parametrize(
    ("template", "name", "reads"),
    [(THINKS, "thinking", "think"), (THINKS, "add_generation_prompt", "think"), (None, "think", "no arguments")],
)
def test_an_argument_that_changes_nothing_is_an_error(characters, template, name, reads):
    characters.chat_template = template
    with pytest.raises(
        UserError, match=f"has '{name}', which the tokenizer's chat template does not read; it reads {reads}"
    ):
        Renderer(characters, arguments={name: False})


BOMBS = {
    "a long text": "{{ 'a' * 3000000000 }}",
    "a long text of a variable": "{% set n = 3000000000 %}{{ messages[0].content * n }}",
    "doubled": "{% set ns = namespace(x='a') %}{% for i in range(40) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "prints in loops": "{% for i in range(99999) %}{% for j in range(99999) %}aaaaaaaaaa{% endfor %}{% endfor %}",
    "a large number": "{{ 10 ** (10 ** 9) }}",
    "padded": "{{ 'a'.ljust(3000000000) }}",
    "centred": "{{ 'a'|center(3000000000) }}",
    "formatted": "{{ '%3000000000d' % 1 }}",
    "indented": "{{ messages|tojson(indent=3000000000) }}",
    "a list": "{{ ([0] * 3000000000)|length }}",
    "recursive": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "nested": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
}


@contextlib.contextmanager
def watched(worker):
    """Yields the peaks of the resident memory of a worker's process, in KiB, read while it renders.

    The kernel's own account of ended children starts at the size of the process that forked them.
    """
    peaks, done = [], threading.Event()

    def watch():
        while not done.wait(0.002):
            process = worker._process
            with contextlib.suppress(OSError):
                folder = pathlib.Path(f"/proc/{process.pid if process else 0}")
                if (folder / "cmdline").read_bytes().endswith(b"worker\0"):  # not the fork before it
                    said = (folder / "status").read_text().splitlines()
                    peaks.extend(int(line.split()[1]) for line in said if line.startswith("VmHWM"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


SLOW = ("prints in loops", "a large number", "recursive")


@pytest.mark.parametrize(
    "template", [pytest.param(BOMBS[n], id=n, marks=[pytest.mark.slow] if n in SLOW else []) for n in BOMBS]
)
def test_a_template_without_end_is_one_line_in_bounded_time_and_memory(characters, template, monkeypatch):
    monkeypatch.setattr(template_module, "_WORKER", template_module._Worker())
    began = time.monotonic()
    raised = pytest.raises(UserError, match=r"the chat template (refuses the prompt|is invalid)")
    with watched(template_module._WORKER) as peaks, raised as e:
        render(characters, template)
    template_module._WORKER.close()
    assert "\n" not in str(e.value) and time.monotonic() - began < 60
    assert 0 < max(peaks) < 2**21  # KiB


@pytest.mark.slow
def test_after_a_row_that_takes_too_long_others_are_rendered(characters):
    characters.chat_template = "{% for i in range(messages[0].content|int) %}{% for j in range(99999) %}{% endfor %}"
    characters.chat_template += "{% endfor %}{{ messages[0].content }}"
    renderer = Renderer(characters)
    rows = [Row("d.jsonl", i, {}, "line") for i in range(3)]
    with pytest.raises(UserError, match=r"d\.jsonl, line 1: the chat template refuses the prompt: it takes too long"):
        renderer.all([[{"role": "user", "content": n}] for n in ("0", "90000", "1")], rows)
    assert renderer.all([[{"role": "user", "content": n}] for n in ("0", "1")], rows[:2]) == ["0", "1"]


def test_the_worker_renders_as_transformers(shared, characters):
    odd = [
        [{"role": "user", "content": text}] for text in ("1", "a\ud800b", "\x00\u2028\n", "{{ 1 + 1 }}", "é" * 10**5)
    ]
    tokenizer = load_tokenizer(str(shared / "tokenizers/qwen2.5"))
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    for given in ((), tools):
        wanted = [
            tokenizer.apply_chat_template(one, tools=given or None, add_generation_prompt=True, tokenize=False)
            for one in odd
        ]
        assert Renderer(tokenizer, given).all(odd, [Row("d", 1, {})] * len(odd)) == wanted
