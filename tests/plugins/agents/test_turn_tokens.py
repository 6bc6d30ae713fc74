"""The tokens of the next turn, by templates that keep earlier turns and others that change them."""

import copy
import json

import pytest

from jppo.data.prompts import read_prompts
from jppo.errors import UserError
from jppo.plugins.agents import turn_tokens
from jppo.plugins.agents.calls import hermes as hermes_calls

KEEPS = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n{% endif %}"
    "[{{ m.role }}]{{ m.content }}[end]{% endfor %}{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)
REFUSES = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}"
    "{% endfor %}"
)
SCHEMA = {"type": "function", "function": {"name": "oven", "parameters": {}}}


def with_template(tokenizer, template):
    made = copy.deepcopy(tokenizer)
    made.chat_template = template
    return made


def chat_of(tokenizer, schemas, roles, **how):
    return turn_tokens.template_chat(tokenizer, schemas, roles=roles, **dict(name="hermes", parse=hermes_calls) | how)


def test_a_template_that_refuses_tools_or_does_not_tell_of_them_is_refused(characters):
    with pytest.raises(UserError, match="refuses the prompt: no tools"):
        chat_of(with_template(characters, "{{ tools | string }}" + REFUSES), [SCHEMA], ["tool"], history="sampled")
    with pytest.raises(UserError, match="does not show the tools to the model: oven"):
        chat_of(with_template(characters, KEEPS), [SCHEMA], ["tool"])
    with pytest.raises(UserError, match="format='hermes' needs a chat template"):
        chat_of(with_template(characters, None), [], ["tool"])


@pytest.mark.parametrize("roles", [["user"], ["tool"]])
def test_a_template_that_hides_answers_is_refused(characters, roles):
    template = "{{ tools | string }}{{ messages[0].content }}{% for m in messages if m.role == 'assistant' %}"
    template += "{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match=f"leaves out messages of the role '{roles[0]}' that answer the policy") as e:
        chat_of(with_template(characters, template), [SCHEMA] if roles == ["tool"] else [], roles, history="sampled")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("history", ["template", "sampled"])
def test_a_template_with_calls_in_another_format_is_refused_unless_turns_stay_as_sampled(characters, history):
    call = "{% for c in m.tool_calls or [] %}!{{ c.function.name }}({{ c.function.arguments | tojson }})!{% endfor %}"
    template = "{{ tools | string }}{% for m in messages %}[{{ m.role }}]{{ m.content }}" + call + "[end]{% endfor %}"
    made = with_template(characters, template)
    if history == "sampled":
        assert not chat_of(made, [SCHEMA], ["tool"], history=history).form.parsed
        return
    with pytest.raises(UserError, match=r"writes a call as '!oven.{}.!', and the run reads .*format='hermes'") as e:
        chat_of(made, [SCHEMA], ["tool"])
    assert "\n" not in str(e.value)


def spoken(tokenizer, asked, text, end):
    """A turn after a rendered prompt."""
    ids = tokenizer.encode(tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False))
    said = tokenizer.encode(text) + end
    return turn_tokens.SampledTurn(asked, {"role": "assistant", "content": text}, text, ids + said, len(said))


ASKED = [{"role": "user", "content": "12"}]


def test_a_turn_that_the_template_changes_begins_a_branch_or_stays_as_it_was_sampled(characters):
    tokenizer = with_template(characters, KEEPS.replace("[", "<").replace("]", ">"))
    turn = spoken(tokenizer, ASKED, "34", [])
    tool = [{"role": "tool", "content": "12"}]
    # Of these characters the tokenizer has e, o, r, digits and angles.
    ids, same = chat_of(tokenizer, [], ["tool"]).follow(turn, tool)
    assert not same and tokenizer.decode(ids) == "<er>12<e><>34<e><oo>12<e><><>"  # without the opened thought
    ids, same = chat_of(tokenizer, [], ["tool"], history="sampled").follow(turn, tool)
    assert same and tokenizer.decode(ids) == "<er>12<e><><>34<e><oo>12<e><><>"


@pytest.mark.parametrize("history", ["template", "sampled"])
def test_qwen_renders_what_follows_a_turn(hermes, history):
    made = chat_of(hermes.tokenizer, [], ["tool", "user"], history=history)
    end, other = hermes.tokenizer.eos_token_id, hermes.encode("<|endoftext|>")[0]
    user = [{"role": "user", "content": "Go on."}]
    expected = "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    turn = spoken(hermes.tokenizer, ASKED, "So.", [end])
    assert made.follow(turn, user) == (turn.ids + hermes.encode(expected), True)
    turn = spoken(hermes.tokenizer, ASKED, "So.", [other])  # the template has another end here
    ids, same = made.follow(turn, user)
    assert same == (history == "sampled") and hermes.tokenizer.decode(ids).endswith(f"<|im_end|>{expected}")
    assert made.opening("text", [1, 2], "more")[0] == [{"role": "user", "content": "text\nmore"}]


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
