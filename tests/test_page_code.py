"""Code that pages tell users to write runs as it stands, with small models and data; other tests have other blocks.

docs/extending.md: test_extending.py; classes of docs/agents.md, functions of docs/rewards.md, `Sums` of docs/data.md:
test_docs.py; commands: test_commands.py; notebooks: test_notebooks.py.
"""

import json
import pathlib
import re
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest

from examples import arithmetic
from jppo import evaluate, export, init, settings, train
from jppo.data.stream import Cursor, next_batch, seen, user_order
from jppo.learner.make import make_chain
from jppo.models import hf
from jppo.plugins.agents.tools import read_tools
from jppo.rewards import check
from jppo.types import Prompt, Reward
from tests import make, test_cookbook

SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 512}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def blocks(page, kind=""):
    text = (make.ROOT / page).read_text(encoding="utf-8")
    return [code for found, code in re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M) if found == kind]


def block(page, word, kind=""):
    """The one block of the page that has the word."""
    [found] = [one for one in blocks(page, kind) if word in one]
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of one layer whose tokenizer reads any text and has a chat template."""
    path = tmp_path_factory.mktemp("page") / "model"
    arithmetic.write_model(path)
    test_cookbook.write_tokenizer(path)
    described = json.loads((path / "tokenizer_config.json").read_text())
    more = {"model_max_length": 128, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(described | more))
    (path / "config.json").write_text(json.dumps(arithmetic.MODEL | SHAPE | {"max_position_embeddings": 128}))
    make.write_weights(path)
    return path


def test_the_readme_leads_from_prompts_and_a_function_to_a_tested_model(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [line] = block("README.md", "> train.jsonl").splitlines()
    subprocess.run(["bash", "-c", line], check=True)
    reward = block("README.md", "# reward.py", "python")
    pathlib.Path("reward.py").write_text(reward)
    lines = [line.partition("#")[0].split() for line in block("README.md", "jppo init").splitlines()]
    commands = {words[1]: [word.replace("DIR", str(model)) for word in words[2:]] for words in lines}
    small = ["rollout.name=inprocess", "data.max_response_length=8", "trainer.total_training_steps=1"]
    small = [f"--config.{setting}" for setting in small]
    init.main(commands.pop("init"))
    check.main(commands.pop("rewards.check"))
    train.main([*commands.pop("train"), *small])
    evaluate.main([*commands.pop("evaluate"), "--max_response_length=8", "--config.rollout.name=inprocess"])
    assert hf.final_model(*commands.pop("serve")) == "runs/train-ppo/hf"
    assert not commands and pathlib.Path("runs/evaluate/summary.json").is_file()
    steps = make.read_lines("runs/train-ppo/metrics.jsonl")
    assert steps[-1]["step"] == 1 and pathlib.Path("runs/train-ppo/hf/config.json").is_file()


def test_the_page_on_lora_leads_from_a_config_to_adapters_and_a_whole_model(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make.write_lines(pathlib.Path("train.jsonl"), [{"prompt": name} for name in ("One", "Two", "Six", "Ten")])
    pathlib.Path("reward.py").write_text(block("README.md", "# reward.py", "python"))
    init.main(["train.jsonl", "--model", str(model), "--reward", "reward.py"])
    lines = [line.partition("#")[0].split()[1:] for line in block("docs/lora.md", "jppo train").splitlines()]
    assert [line[0] for line in lines] == ["train", "evaluate", "export", "export"]
    small = ["rollout.name=inprocess", "data.max_response_length=8", "trainer.total_training_steps=1"]
    train.main([*lines[0][1:], *(f"--config.{setting}" for setting in small)])
    for line in lines[2:]:
        export.main(line[1:])
    adapter, merged = json.loads(pathlib.Path("adapter/adapter_config.json").read_text()), pathlib.Path("merged")
    assert (adapter["r"], adapter["lora_alpha"]) == (32, 32) and (merged / "config.json").is_file()
    assert pathlib.Path("runs/train-ppo/adapter/adapter_config.json").is_file()
    whole = "model.safetensors"
    assert (merged / whole).read_bytes() == pathlib.Path("runs/train-ppo/hf", whole).read_bytes()
    evaluate.main([*lines[1][1:], "--max_response_length=8", "--config.rollout.name=inprocess"])


def test_the_loop_of_the_page_trains(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = block("docs/your-own-loop.md", "jppo.open", "python")
    own = block("docs/your-own-loop.md", "def reinforce", "python")
    smaller = {
        '"path/to/model", engine="inprocess"': f'"{model}", engine=dict(name="inprocess", kv_cache_memory_bytes=2**20)',
        "range(100)": "range(1)",
        "max_prompt_length=256, max_response_length=256": "max_prompt_length=8, max_response_length=6, row_lengths=1",
        "dict(lr=1e-6)": "dict(lr=1e-6, ppo_mini_batch_size=4)",
        '(batch, "ppo")\n': '(batch, "ppo")\n        m.forward_backward(batch, reinforce)\n',
    }
    for said, done in smaller.items():
        assert code.count(said) == 1, said
        code = code.replace(said, done)
    exec(own + code, {"prompts": ["One", "Two"], "reward": len})
    assert list((tmp_path / "runs/mine").rglob("about"))


def test_an_exported_model_answers_in_transformers(model, capsys):
    code = block("docs/serving.md", "AutoModelForCausalLM", "python")
    assert code.count("runs/train-ppo/hf") == 2
    exec(code.replace("runs/train-ppo/hf", str(model)), {})
    assert capsys.readouterr().out.startswith("What is 50 plus 7?")


def test_the_optimizer_of_the_page_makes_a_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = block("docs/algorithms.md", "def adam_with_noise", "python")
    pathlib.Path("optimizers.py").write_text(code)
    [line] = [one for one in blocks("docs/algorithms.md") if "optimizers.py" in one]
    words = line.replace("configs/quickstart.py", "jppo://quickstart").split()[3:]
    c = settings.typed(settings.parse(words, "", settings.default())[0])
    chain = make_chain(c.actor, "actor")(0.1)
    params = {"w": jnp.ones((2, 3))}
    updates, _ = chain.update({"w": jnp.ones((2, 3))}, chain.init(params), params)
    expected = -0.1 * (1 + c.actor.weight_decay)  # Adam's first step has the size of the learning rate
    np.testing.assert_allclose(updates["w"], np.full((2, 3), expected), rtol=2e-2)


def test_the_orders_of_prompts_of_the_page_draw_batches(tmp_path):
    prompts = [Prompt(f"p{i}", "", "", np.array([i], np.int32), "1" * (9 - i), {}) for i in range(6)]
    orders = {}
    for name in ("easy_first", "Uncertain"):
        (tmp_path / f"{name}.py").write_text(block("docs/data.md", f" {name}", "python"))
        orders[name] = user_order(f"{tmp_path}/{name}.py:{name}", prompts, seed=3, batch_size=2)
    how = dict(n=6, batch_size=2, seed=3, shuffle=True)
    indices, _ = next_batch(Cursor(), order_of=orders["easy_first"], **how)
    assert indices.tolist() == [5, 4]  # the shortest answers
    indices, cursor = next_batch(Cursor(), order_of=orders["Uncertain"], **how)
    cursor = seen(cursor, orders["Uncertain"], [prompts[i] for i in indices], [Reward(1.0, {}, None)] * 2)
    state = json.loads(cursor.curriculum)
    assert state["batches"] == 1 and [state["solved"][i] for i in indices] == [1.0, 1.0] and sum(state["solved"]) == 4


def test_the_tools_of_the_page_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("tools.yaml").write_text(block("docs/agents.md", "class_name: search"))
    for folder in ("data", "mine"):
        pathlib.Path(folder).mkdir()
    make.write_lines(pathlib.Path("data/corpus.jsonl"), [{"text": "Rome is the capital of Italy."}])
    pathlib.Path("mine/weather.py").write_text(block("docs/agents.md", "class Weather"))
    names = [tool.schema["function"]["name"] for tool in read_tools("tools.yaml", allow_code=False)]
    assert names == ["calculator", "search", "weather"]
