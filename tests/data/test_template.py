import pytest

from jppo.data import template_worker
from jppo.data.rows import Row
from jppo.data.template import make_renderer
from jppo.data.tokenizer import load_tokenizer
from jppo.settings import UserError

ASKED = [{"role": "user", "content": "1"}]


def render(tokenizer, template, messages=ASKED):
    tokenizer.chat_template = template
    return make_renderer(tokenizer)(messages, Row("d.jsonl", 3, {}, "line"))


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
    assert make_renderer(tokenizer)(ASKED, Row("d", 1, {})) == whole


THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{% if think is defined and think is false %}={% endif %}"


@pytest.mark.parametrize(("arguments", "text"), [({}, "1"), ({"think": True}, "1"), ({"think": False}, "1=")])
def test_arguments_reach_the_template(characters, arguments, text):
    characters.chat_template = THINKS
    assert make_renderer(characters, arguments=arguments)(ASKED, Row("d.jsonl", 3, {})) == text


@pytest.mark.parametrize(
    ("template", "name", "reads"),
    [(THINKS, "thinking", "think"), (THINKS, "add_generation_prompt", "think"), (None, "think", "no arguments")],
)
def test_an_argument_that_changes_nothing_is_an_error(characters, template, name, reads):
    characters.chat_template = template
    with pytest.raises(
        UserError, match=f"has '{name}', which the tokenizer's chat template does not read; it reads {reads}"
    ):
        make_renderer(characters, arguments={name: False})
