"""jppo.init: the config that it writes is lawful, and fits data, model and machine."""

import json
from types import SimpleNamespace

import pytest

from examples import arithmetic
from jppo import init, settings
from jppo.errors import UserError
from jppo.preflight.accelerators import NvidiaGpu
from jppo.run.inputs import read_inputs
from jppo.settings import table
from tests.make import one_line, write_rows

REWARD = "def compute_score(completions, **kwargs):\n    return [float(len(text)) for text in completions]\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A new user's folder: 50 rows, a reward, a model with weights of no use."""
    monkeypatch.chdir(tmp_path)
    arithmetic.write_model(tmp_path / "model")
    file = tmp_path / "model/config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"max_position_embeddings": 64}))
    write_rows(tmp_path / "rows.jsonl", *({"prompt": f"{a}+{a}="} for a in range(50)))
    (tmp_path / "reward.py").write_text(REWARD)
    monkeypatch.setattr("jppo.models.hf.check_weights", lambda *_, **__: None)
    return tmp_path


def written(*words):
    """The settings that the written config leads to, once checked as a run checks them."""
    init.main([*map(str, words), "--model=model"])
    config, _ = settings.parse(["--config=config.py"], "", settings.default())
    read_inputs(settings.typed(config, settings.Settings))
    return table.by_name(config)


def test_the_config_of_50_rows_is_lawful_and_explains_itself(folder, capsys):
    found = written("rows.jsonl", "--reward=reward.py")
    said = capsys.readouterr().out
    assert (found["data.max_prompt_length"], found["data.max_response_length"]) == (8, 56)  # "49+49=", of 64 positions
    assert (found["data.train_batch_size"], found["actor.ppo_mini_batch_size"]) == (32, 8)
    assert found["reward.function"] == "reward.py" and found["data.val_max_samples"] == -1
    assert (found["data.train_files"], found["data.val_files"]) == ("rows.jsonl[:-10]", "rows.jsonl[-10:]")
    assert found["trainer.run_dir"] == "runs/rows-ppo"
    lines = [line for line in said.splitlines() if line.startswith("    config.")]
    assert len(lines) > 15 and all("  # " in line for line in lines)
    assert "python -m jppo.rewards.check --config=config.py\n  python -m jppo.train --config=config.py\n" in said
    assert said.endswith("config.py --model=runs/rows-ppo\n  python -m jppo.chat runs/rows-ppo\n")
    assert "config.py is there already" in one_line(capsys, init.main, "rows.jsonl")


@pytest.mark.parametrize(
    ("parameters", "algorithm", "sizes"), [(135e6, "ppo", (16, 8)), (1e6, "ppo", (32, 8)), (135e6, "grpo", (4, 8))]
)
def test_a_step_on_a_cpu_is_short(parameters, algorithm, sizes):
    values = {choice.name: choice.value for choice in init.size_choices(50, "cpu", parameters, algorithm)}
    assert (values["data.train_batch_size"], values["actor.ppo_mini_batch_size"]) == sizes


def test_answers_of_the_data_give_the_length_of_a_response(folder):
    write_rows(folder / "rows.jsonl", *({"question": "1+1=", "answer": "1" * 20} for _ in range(5)))
    write_rows(folder / "test.jsonl", {"question": "2+2="})
    found = written("rows.jsonl", "--reward=reward.py", "--val=test.jsonl")
    assert found["data.train_files"] == "rows.jsonl"
    assert found["data.max_response_length"] == 32 and found["data.prompt_key"] == "question"  # 20 * 3 / 2, of 8
    assert found["data.ground_truth_key"] == "ground_truth"  # the test has no other column in its place
    assert found["data.val_files"] == "test.jsonl" and found["data.val_max_samples"] == -1
    assert (found["data.train_batch_size"], found["actor.ppo_mini_batch_size"]) == (4, 4)


@pytest.mark.parametrize("column", ["answer", "expected"])
def test_a_function_gets_the_column_of_right_answers_and_room_for_more(folder, column):
    write_rows(folder / "rows.jsonl", *({"question": f"{a}+1=", column: str(a + 1)} for a in range(5)))
    found = written("rows.jsonl", "--reward=reward.py", "--val=rows.jsonl")
    assert found["data.ground_truth_key"] == column and found["data.max_response_length"] == 56  # 64 positions less 8
    config, _ = settings.parse(["--config=config.py"], "", settings.default())
    prompts = read_inputs(settings.typed(config, settings.Settings)).train.prompts
    assert [prompt.ground_truth for prompt in prompts] == ["1", "2", "3", "4", "5"]


def test_columns_that_could_be_the_ground_truth_are_named(folder, capsys):
    write_rows(folder / "rows.jsonl", *({"question": f"{a}+1=", "reply\n": a + 1, "id": a} for a in range(5)))
    written("rows.jsonl", "--reward=reward.py")
    said = "gets no ground truth: --truth_key names the column of the ground truth, perhaps 'id' or 'reply\\n'\n"
    assert f"Note: reward.function {said}" in capsys.readouterr().out


def test_no_other_column_takes_the_place_of_answers_that_a_row_lacks(folder, capsys):
    rows = [{"question": f"{a}+1=", "response": "?"} | ({"answer": str(a + 1)} if a else {}) for a in range(5)]
    write_rows(folder / "rows.jsonl", *rows)
    assert written("rows.jsonl", "--reward=reward.py")["data.ground_truth_key"] == "ground_truth"
    assert "gets no ground truth: --truth_key names" in capsys.readouterr().out


def test_what_the_policy_does_not_read_is_named(folder, capsys):
    rows = [{"question": f"{a}+1=", "context": "sums", "answer": str(a + 1), "id": a} for a in range(5)]
    write_rows(folder / "rows.jsonl", *rows)
    written("rows.jsonl", "--reward=reward.py")
    assert "Note: the policy reads the column 'question' alone, not 'context'\n" in capsys.readouterr().out


def test_answers_in_the_prompts_are_named(folder, capsys):
    said = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    (folder / "model/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    write_rows(folder / "rows.jsonl", *({"messages": said} for _ in range(5)))
    written("rows.jsonl", "--reward=reward.py", "--prompt_key=messages")
    assert "Note: 5 prompts end with an assistant's message" in capsys.readouterr().out


def test_prompts_that_do_not_fit_are_counted_and_the_batch_fits_the_others(folder, capsys):
    rows = [{"prompt": f"{a}+" * (20 if a % 2 else 1), "response": "1" * 40} for a in range(40)]
    write_rows(folder / "rows.jsonl", *rows)
    found = written("rows.jsonl", "--reward=reward.py", "--val=rows.jsonl")
    assert (found["data.max_prompt_length"], found["data.train_batch_size"]) == (32, 16)  # of 20 that fit
    assert "; 40 that are longer are left out, by the model's 64 positions" in capsys.readouterr().out  # 20 of each set


def test_csv_with_columns_of_any_name_and_several_files(folder):
    (folder / "a.csv").write_text("ask,right,id\n" + "".join(f"{a}+1=,{a + 1},{a}\n" for a in range(12)))
    (folder / "b.csv").write_text("ask,right,id\n" + "".join(f"{a}+2=,{a + 2},{a}\n" for a in range(7)))
    keys = ["--prompt_key=ask", "--truth_key=right"]
    found = written("a.csv, b.csv", "--reward=reward.py", *keys)
    assert found["data.train_files"] == "a.csv[:-2],b.csv[:-1]" and found["data.val_files"] == "a.csv[-2:],b.csv[-1:]"
    config, _ = settings.parse(["--config=config.py"], "", settings.default())
    inputs = read_inputs(settings.typed(config, settings.Settings))
    prompts = [(prompt.messages, prompt.ground_truth) for prompt in (*inputs.val.prompts, inputs.train.prompts[0])]
    assert prompts == [("10+1=", "11"), ("11+1=", "12"), ("6+2=", "8"), ("0+1=", "1")]


def test_a_held_out_part_without_a_data_source_is_named(folder, capsys):
    write_rows(folder / "rows.jsonl", *({"prompt": f"{a}+1=", "data_source": "ab"[a > 9]} for a in range(20)))
    written("rows.jsonl", "--reward=reward.py")
    assert "# held out for tests: the last rows, without data_source='a'; --val names" in capsys.readouterr().out


def test_rows_are_held_out_where_there_are_enough(folder):
    def split(count, entry="rows.jsonl"):
        return init.split_entries(entry, [init.Source("rows", [None] * count)])

    assert split(4) == ("rows.jsonl", "") and split(5) == ("rows.jsonl[:-1]", "rows.jsonl[-1:]")
    assert split(10**6) == ("rows.jsonl[:-256]", "rows.jsonl[-256:]")
    assert split(100, "rows.jsonl[:100]") == ("rows.jsonl[:100]", "")
    assert split(100, "tfds:a/train@x") == ("tfds:a/train@x", "")
    assert split(100, "hub:a/b/train") == ("hub:a/b/train[:-20]", "hub:a/b/train[-20:]")


@pytest.mark.parametrize("reward", [[], ["--reward=reward.py"]])
def test_an_agent_program_plays_the_rows(folder, capsys, reward):
    (folder / "agent.py").write_text("def play(task): return {'reward': 1}\n")
    found = written("rows.jsonl", "--agent=agent.py:play", *reward)
    assert found["rollout.agent"] == "agent.py:play" and found["rollout.agent_format"] == "plain"
    assert found["rollout.agent_reward"] == ("graders" if reward else "reported")
    assert (
        found["data.prompt_role"] == "" and found["data.max_prompt_length"] == found["data.max_response_length"] == 32
    )
    assert "Check reward and agent, train" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        init.main(["rows.jsonl", "--agent=bash nothing.sh", "--model=model", "--out=other.py"])
    assert "error: rollout.agent='bash nothing.sh': there is no file nothing.sh" in capsys.readouterr().err


def test_adapters_are_trained_where_they_are_wanted(folder):
    found = written("rows.jsonl", "--reward=reward.py", "--lora", "--algorithm=grpo")
    assert (found["model.lora_rank"], found["model.param_dtype"]) == (32, "float32")
    assert found["actor.lr"] == 1e-3 and found["trainer.run_dir"] == "runs/rows-grpo"  # ten times 1e-4


def test_grpo_has_groups_and_no_critic(folder, capsys):
    found = written("rows.jsonl", "--reward=reward.py", "--algorithm=grpo")
    assert (found["algorithm.adv_estimator"], found["rollout.n"], found["data.train_batch_size"]) == ("grpo", 8, 4)
    assert (found["actor.ppo_mini_batch_size"], found["data.packing"]) == (8, "auto")
    assert "config.critic" not in capsys.readouterr().out


def test_a_run_that_is_there_is_not_continued(folder):
    (folder / "runs/rows-ppo").mkdir(parents=True)
    (folder / "runs/rows-ppo-2").mkdir()
    assert written("rows.jsonl", "--reward=reward.py")["trainer.run_dir"] == "runs/rows-ppo-3"


def test_text_for_a_chat_model_becomes_a_message(folder):
    file = folder / "model/tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "{{ messages[0].content }}"}))
    assert written("rows.jsonl", "--reward=reward.py")["data.prompt_role"] == "user"
    config, _ = settings.parse(["--config=config.py", "--config.data.system_prompt=42"], "", settings.default())
    prompt = read_inputs(settings.typed(config, settings.Settings)).train.prompts[0]
    assert prompt.messages == [{"role": "system", "content": "42"}, {"role": "user", "content": "0+0="}]


def test_rows_with_a_rule_need_no_reward(folder):
    row = {"prompt": "1+1=", "ground_truth": "2", "data_source": "arithmetic"}
    write_rows(folder / "rows.jsonl", row, row)
    assert written("rows.jsonl")["reward.function"] == ""


@pytest.mark.parametrize(
    ("rows", "words", "said"),
    [
        ([{"text": "1"}], [], "has no column of prompts among text with a usual name; name it by --prompt_key"),
        (
            [{"prompt": "1"}],
            ["--prompt_key=Prompt", "--reward=reward.py"],
            "--prompt_key=Prompt is no column of rows.jsonl, which has prompt; did you mean 'prompt'?",
        ),
        (
            [{"prompt": "1", "data_source": "exact", "right": "1"}],
            [],
            "rules need a ground truth; --truth_key names the column of the ground truth, perhaps 'right'",
        ),
        (
            [{"instruction": "add", "input": "1+1"}],
            ["--reward=reward.py"],
            "rows.jsonl has the columns instruction and input: write prompts as one column",
        ),
        ([{"prompt": "1", "data_source": ["a"]}], [], "no rule scores data_source=['a']; give --reward=FILE.py"),
        ([{"prompt": "1"}], [], "no rule scores data_source=None; give --reward=FILE.py"),
        ([{"prompt": "1"}], ["--reward=no.py"], "reward.function='no.py': there is no such file"),
        ([{"prompt": "1"}], ["--reward=reward.py", "--val=no.jsonl"], "--val: no file no.jsonl"),
        ([{"prompt": "1" * 99}], ["--reward=reward.py"], "longer than data.max_prompt_length=63"),
    ],
)
def test_what_cannot_be_trained_is_one_line_and_no_file(folder, capsys, rows, words, said):
    write_rows(folder / "rows.jsonl", *rows)
    with pytest.raises(SystemExit) as ended:
        init.main(["rows.jsonl", "--model=model", *words])
    *stages, error = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and said in error and all(stage.startswith("jppo.init: ") for stage in stages)
    assert not (folder / "config.py").exists()


GIB = 2**30
NOT_INSTALLED = UserError("vLLM is not installed")


def stand_in(platform, kind, capability=None, room=None):
    """A device of JAX."""
    stats = None if room is None else {"bytes_limit": room}
    known = {} if capability is None else {"compute_capability": capability}
    return SimpleNamespace(platform=platform, device_kind=kind, memory_stats=lambda: stats, **known)


T4 = stand_in("gpu", "Tesla T4", "7.5", 11 * GIB)
A100 = stand_in("gpu", "NVIDIA A100-SXM4-40GB", "8.0", 30 * GIB)
H100 = stand_in("gpu", "NVIDIA H100 80GB HBM3", "9.0", 60 * GIB)
V5E = stand_in("tpu", "TPU v5 lite", room=15 * GIB)
OLD = NvidiaGpu("NVIDIA A100-SXM4-40GB", "550.54.15", 40 * GIB, (8, 0))
NEW = NvidiaGpu("NVIDIA A100-SXM4-40GB", "580.65.06", 40 * GIB, (8, 0))


@pytest.mark.parametrize(
    ("device", "vllm", "card", "engine", "dtypes", "why"),
    [
        (T4, None, NEW, "inprocess", ("float16", "float16"), "no vLLM here: the trainer samples by itself"),
        (A100, None, NEW, "inprocess", ("bfloat16", "bfloat16"), "no vLLM here: the trainer samples by itself"),
        (A100, "gpu", NEW, "vllm", ("bfloat16", "bfloat16"), "vLLM for the GPU is installed"),
        (A100, "gpu", OLD, "inprocess", ("bfloat16", "bfloat16"), "does not run here (driver 550.54.15; CUDA 13 needs"),
        (V5E, "gpu", None, "inprocess", ("bfloat16", "bfloat16"), "no vLLM here: the trainer samples by itself"),
    ],
)
def test_the_machine_chooses_engine_and_dtypes(monkeypatch, device, vllm, card, engine, dtypes, why):
    def check(_):
        if vllm is None:
            raise NOT_INSTALLED
        return vllm

    monkeypatch.setattr(init, "check_vllm", check)
    monkeypatch.setattr(init, "torch_cuda", lambda _: 13)
    cfg = SimpleNamespace(head_dim=64)
    found = {one.name: one for one in init.machine_choices(device, cfg, [] if card is None else [card])}
    assert found["rollout.name"].value == engine and why in found["rollout.name"].reason
    assert (found["model.compute_dtype"].value, found["rollout.dtype"].value) == dtypes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_cpu_gets_unrolled_layers_and_the_dtype_that_it_has_instructions_for(monkeypatch, dtype):
    monkeypatch.setattr(init, "check_vllm", lambda _: "cpu")
    monkeypatch.setattr(init.settings, "cpu_dtype", lambda: dtype)
    found = {
        one.name: one.value for one in init.machine_choices(stand_in("cpu", "cpu"), SimpleNamespace(head_dim=64), [])
    }
    dtypes = {"model.compute_dtype": dtype, "rollout.dtype": dtype} if dtype == "bfloat16" else {}
    assert found == {"rollout.name": "vllm", "model.scan_layers": False} | dtypes


@pytest.mark.parametrize(
    ("device", "parameters", "algorithm", "adapters"),
    [
        (T4, 0.49e9, "ppo", True),  # 36 bytes of each: 16.4 GiB
        (T4, 0.49e9, "grpo", False),  # 20 bytes of each: 9.1 GiB
        (T4, 1.54e9, "grpo", True),
        (V5E, 0.49e9, "ppo", True),
        (H100, 0.49e9, "ppo", False),
        (H100, 7.6e9, "grpo", True),
        (stand_in("cpu", "cpu"), 7.6e9, "ppo", False),
    ],
)
def test_adapters_are_trained_where_all_weights_do_not_fit(device, parameters, algorithm, adapters):
    found = {one.name: one.value for one in init.adapter_choices(device, parameters, algorithm)}
    expected = {"model.lora_rank": 32, "model.lora_alpha": 32, "model.param_dtype": "bfloat16"}
    assert found == (expected if adapters else {})


def test_a_small_gpu_gets_a_config_that_trains_adapters(folder, monkeypatch, capsys):
    monkeypatch.setattr(init, "check_vllm", lambda _: (_ for _ in ()).throw(NOT_INSTALLED))
    monkeypatch.setattr(init, "gpus", lambda: [])
    monkeypatch.setattr(init.jax, "local_devices", lambda: [stand_in("gpu", "Tesla T4", "7.5", 2**20)])
    found = written("rows.jsonl", "--reward=reward.py")
    assert (found["rollout.name"], found["rollout.dtype"], found["model.lora_rank"]) == ("inprocess", "float16", 32)
    assert (found["actor.lr"], found["critic.lr"]) == (1e-3, 3e-3)  # ten times 1e-4 and 3e-4
    said = capsys.readouterr().out
    assert "no vLLM here: the trainer samples by itself" in said and "fast on a Tesla T4, which has no bfloat16" in said
