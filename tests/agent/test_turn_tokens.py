"""Chat templates that keep what was said, and those that do not."""

import copy
import json

import pytest

from jppo.agent import turn_tokens
from jppo.data.prompts import read_prompts
from jppo.settings import UserError

KEEPS = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n{% endif %}"
    "[{{ m.role }}]{{ m.content }}[end]{% endfor %}{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)
COUNTS = "{{ messages | length }}{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
LAST_ONLY = "{{ messages[-1].content }}"
REFUSES = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}"
    "{% endfor %}"
)
SCHEMA = {"type": "function", "function": {"name": "oven", "parameters": {}}}


def with_template(tokenizer, template):
    made = copy.deepcopy(tokenizer)
    made.chat_template = template
    return made


@pytest.mark.parametrize("template", [COUNTS, LAST_ONLY])
def test_a_template_that_does_not_keep_what_was_said_is_refused(characters, template):
    with pytest.raises(UserError, match="chat template changes the beginning of a conversation") as e:
        turn_tokens.templated(with_template(characters, template), [], roles=("user",), name="hermes")
    assert "\n" not in str(e.value)


def test_a_template_that_refuses_tools_or_does_not_tell_of_them_is_refused(characters):
    with pytest.raises(UserError, match="refuses the prompt: no tools"):
        turn_tokens.templated(with_template(characters, REFUSES), [], roles=("tool",), name="hermes")
    with pytest.raises(UserError, match="does not show the tools to the model: oven"):
        turn_tokens.templated(with_template(characters, KEEPS), [SCHEMA], roles=("tool",), name="hermes")
    with pytest.raises(UserError, match="format='hermes' needs a chat template"):
        turn_tokens.templated(with_template(characters, None), [], roles=("tool",), name="hermes")


def test_what_a_template_puts_before_a_last_turn_is_no_loss(characters):
    tokenizer = with_template(characters, KEEPS.replace("[", "<").replace("]", ">"))
    made = turn_tokens.templated(tokenizer, [], roles=("tool", "user"), name="hermes")
    ids = made.between([{"role": "tool", "content": "12"}], last=0)
    # Of these characters the tokenizer has e, o, r, digits and angles.
    assert tokenizer.decode(ids) == "<e><oo>12<e><><>"


def test_qwen_renders_what_follows_a_turn(hermes):
    made = turn_tokens.templated(hermes.tokenizer, [SCHEMA], roles=("tool", "user"), name="hermes")
    end, other = hermes.tokenizer.eos_token_id, hermes.encode("<|endoftext|>")[0]
    user = [{"role": "user", "content": "Go on."}]
    expected = "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    assert hermes.tokenizer.decode(made.between(user, end)) == expected
    assert hermes.tokenizer.decode(made.between(user, other)) == f"<|im_end|>{expected}"
    assert made.opening("text", [1, 2], "more") == [1, 2, *hermes.encode("more")]


def test_prompts_tell_the_model_of_its_tools(hermes, tmp_path):
    messages = [{"role": "user", "content": "What is 12*34?"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": messages, "ground_truth": "408", "data_source": "exact"}))
    schemas = [tool.schema for tool in hermes.tools]
    read = dict(tokenizer=hermes.tokenizer, max_prompt_length=500, filter_overlong=True)
    [prompt] = read_prompts(str(file), tools=schemas, **read).prompts
    text = hermes.tokenizer.apply_chat_template(messages, tools=schemas, add_generation_prompt=True, tokenize=False)
    assert prompt.ids.tolist() == hermes.encode(text) and '"name": "calculator"' in text
    [without] = read_prompts(str(file), **read).prompts
    assert len(without.ids) < len(prompt.ids)
