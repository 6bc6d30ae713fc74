"""Replays of recorded steps: equal to the bit where nothing changed, and each fault at the first stage it touches."""

import dataclasses
import itertools
import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
import rich.console

from jppo import replay, settings, train
from jppo.errors import UserError
from jppo.plugins.replay import compare
from jppo.plugins.replay.record import make_recorder
from jppo.rewards import graders
from jppo.rollout.servers import make as rollout
from jppo.runlog.trajectories import deserialise, serialise
from jppo.types import Reward
from tests import conftest
from tests.make import one_line, read_lines, write_weights

pytestmark = pytest.mark.usefixtures("quick_compilation")

SCORE = "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) / 4"
FIRST = re.compile(r"first difference: ([^:]+): (.+): recorded (\S+), recomputed ([^\s;]+)")


def replayed(run, *words):
    """Replays the recorded step; returns whether something differs, and the output."""
    console = rich.console.Console(width=200, record=True)
    differs = replay.replay_step([str(run), *map(str, words)], console)
    return differs, console.export_text()


def first_difference(run, *words):
    """Returns stage, place, recorded and recomputed number of the first difference; None without one."""
    differs, text = replayed(run, *words)
    found = FIRST.search(text)
    assert differs == (found is not None)
    assert differs or "nothing differs" in text
    return found and found.groups()


def record(c, changes):
    """Trains with these changes and records the second step; returns the run's folder."""
    c.update_from_flattened_dict({"trainer.replay_steps": "2", "critic.value_head_std": 0.2} | changes)
    settings.check(c)
    train.train(c)
    return pathlib.Path(c.trainer.run_dir)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """A recorded run with critic, reference, KL in the reward, two optimizer steps, and a reward of the user's."""
    folder, before = tmp_path_factory.mktemp("recorded"), jax.config.read(conftest.QUICK)
    c = conftest.write_small_run(conftest.with_paths(), folder)
    write_weights(folder / "model")
    (folder / "my_reward.py").write_text(SCORE)
    jax.config.update(conftest.QUICK, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "start_vllm", lambda *_, **__: conftest.RandomEngine())
        record(
            c,
            {
                "model.init": "pretrained",
                "reward.function": f"{folder / 'my_reward.py'}:score",
                "algorithm.use_kl_in_reward": True,
                "actor.ppo_mini_batch_size": 2,
                "actor.lr": 1e-2,
                "trainer.test_freq": -1,
                "trainer.val_before_train": False,
            },
        )
    jax.config.update(conftest.QUICK, before)
    return folder


@pytest.fixture
def run(recorded, tmp_path):
    """A copy of the recorded run's folder, whose bundle a test may change."""
    return pathlib.Path(shutil.copytree(recorded / "run/replay", tmp_path / "run/replay")).parent


def table_rows(text, heading):
    """The cells of each row of the printed table that begins with this heading."""
    lines = text[text.index(f"  {heading}  ") :].splitlines()[2:]
    return [line.split() for line in itertools.takewhile(str.strip, lines)]


def test_a_step_is_recomputed_to_the_bit_and_a_sample_is_printed_by_token(run):
    differs, text = replayed(run, "--step=2", "--sample=1")
    assert not differs and "every number must be equal" in text
    for stage in compare.STAGES:
        assert re.search(rf"^\s*{stage} +same +\d", text, re.MULTILINE), stage
    with np.load(run / "replay/step_2/batch.npz") as file:
        data = {name: file[name][1] for name in file.files if file[name].ndim == 2}
    rows = table_rows(text, "token")
    assert len(rows) == data["mask"].sum() > 0
    for k, row in enumerate(rows):
        new, old, ratio, reward, kl, value, advantage = map(float, row[2:9])
        expected = [data[name][k] for name in ("old_logprob", "reward", "value", "advantage")]
        assert [old, reward, value, advantage] == pytest.approx(expected, abs=6e-5)
        assert kl == pytest.approx(data["old_logprob"][k] - data["ref_logprob"][k], abs=6e-5)
        assert ratio == pytest.approx(np.exp(new - old), abs=3e-4)
        assert (row[9:] == ["yes"]) == (ratio > 1.2 if advantage > 0 else ratio < 0.8)
    assert any(abs(float(row[4]) - 1) > 1e-3 for row in rows), "the update has moved the policy"


def test_another_algorithm_is_computed_on_the_same_samples(run):
    """REINFORCE++: the sum of the rewards to come, whitened over the batch."""
    differs, text = replayed(run, "--with=reinforce_plus_plus")
    assert not differs
    with np.load(run / "replay/step_2/batch.npz") as file:
        mask, reward, advantage = (file[name] for name in ("mask", "reward", "advantage"))
    returns = np.where(mask, np.cumsum(reward[:, ::-1], axis=1)[:, ::-1], 0.0)
    whitened = (returns - returns[mask].mean()) / returns[mask].std()
    means = [[x[i][mask[i]].mean() for i in range(4)] for x in (advantage, whitened)]
    rows = np.array(table_rows(text, "sample"), float)
    np.testing.assert_allclose(rows[:, 2], means[0], atol=6e-5)
    np.testing.assert_allclose(rows[:, 3] / means[1], (rows[:, 3] / means[1])[0], rtol=1e-3)
    numbers = [
        float(x)
        for x in re.search(r"gradient norm +([\d.]+) +([\d.]+)", text.partition("recorded algorithm")[2]).groups()
    ]
    assert numbers[0] != numbers[1] and -1 < float(re.search(r"cosine .* ([\d.-]+)", text)[1]) < 0.9999
    warm = (
        "--config.trainer.critic_warmup=1",
        "--config.algorithm.lam_alpha=1.5",
    )  # no algorithm without critic has them
    assert "cosine of the two gradients" in replayed(run, "--with=reinforce_plus_plus", *warm)[1]
    same = replayed(run, "--with=gae")[1]
    assert float(re.search(r"cosine of the two gradients +([\d.]+)", same)[1]) == 1.0


@pytest.mark.parametrize(
    "override,stage,place",
    [
        ("rollout.temperature=0.7", "log-probs", "old_logprob of sample 0, token 0"),
        ("algorithm.lam=0.5", "advantages", "returns of sample"),
        ("algorithm.kl_coef=0.5", "advantages", "reward of sample"),
        ("algorithm.adv_estimator=reinforce_plus_plus --config.critic.value_head_std=0", "values", "value"),
        ("actor.entropy_coeff=0.1", "loss", "loss of actor in optimizer step 1"),
        ("critic.cliprange_value=1e-6", "loss", "loss of critic in optimizer step 2"),
        ("actor.lr=1e-3", "update", "lr of actor in optimizer step 1"),
        ("critic.weight_decay=0.5", "update", "checksum of the weights of critic in optimizer step 1"),
    ],
)
def test_a_changed_setting_is_named_at_the_first_stage_that_it_touches(run, override, stage, place):
    found = first_difference(run, *f"--config.{override}".split())
    assert found[0] == stage and found[1].startswith(place), found


def test_a_changed_reward_is_named_with_its_sample(recorded, run):
    texts = [row["response"] for row in read_lines(recorded / "run/samples/step_2.jsonl")]
    worst = max(range(len(texts)), key=lambda i: len(texts[i]))
    (recorded / "other.py").write_text(SCORE + f" - ({texts[worst]!r} == solution_str)")
    found = first_difference(run, f"--config.reward.function={recorded / 'other.py'}:score")
    length = len(texts[worst]) / 4
    first = texts.index(texts[worst])
    assert found == ("rewards", f"score of sample {first}", f"{length:g}", f"{length - 1:g}")


def test_a_flipped_token_is_named(run):
    file = run / "replay/step_2/samples.json"
    content = json.loads(file.read_text())
    trajectories = deserialise(content["trajectories"])
    tokens = trajectories[1].tokens.copy()
    k = int(np.argmax(trajectories[1].sampled))
    tokens[k] ^= 1
    trajectories[1] = dataclasses.replace(trajectories[1], tokens=tokens)
    file.write_text(json.dumps(content | {"trajectories": serialise(trajectories)}))
    assert first_difference(run) == ("tokens", "tokens of sample 1, token 0", str(tokens[k] ^ 1), str(tokens[k]))


def test_a_sample_of_another_version_is_one_line(run, capsys):
    file = run / "replay/step_2/samples.json"
    content = json.loads(file.read_text())
    first, *others = deserialise(content["trajectories"])
    older = dataclasses.replace(first, version=first.version - 1)
    file.write_text(json.dumps(content | {"trajectories": serialise([older, *others])}))
    assert "samples.json: prompt" in one_line(capsys, replay.main, run)


def test_weights_may_name_a_source_that_the_step_lacks(run):
    file = run / "replay/step_2/about.json"
    about = json.loads(file.read_text())
    assert about["sources"] == ["arithmetic"]
    about["settings"]["reward"]["weights"] = "function_score=1,code:function_score=2"
    file.write_text(json.dumps(about))
    with pytest.raises(UserError, match="no row has data_source='code'"):
        replayed(run)
    file.write_text(json.dumps(about | {"sources": ["arithmetic", "code"]}))
    assert first_difference(run) is None


def test_another_reference_is_named_as_the_model(recorded, run, tmp_path):
    model = shutil.copytree(recorded / "model", tmp_path / "model")
    write_weights(model, seed=6)
    found = first_difference(run, f"--config.model.path={model}")
    assert found[:2] == ("model", "ref.path, checksum of the frozen weights")


RUNS = {
    "grpo": {
        "algorithm.adv_estimator": "grpo",
        "critic.value_head_std": 0.0,
        "rollout.n": 2,
        "actor.use_kl_loss": True,
        "actor.ppo_mini_batch_size": 4,
        "actor.ppo_epochs": 2,
    },
    "async": {
        "rollout.name": "inprocess",
        "rollout.mode": "async",
        "rollout.max_staleness": 1,
        "algorithm.old_logprob": "correction",
        "algorithm.rollout_is": "sequence",
        "algorithm.rollout_rs": "token_k1",
        "algorithm.rollout_rs_threshold": "0.8_1.25",
        "critic.value_norm_decay": 0.9,
    },
    "lora": {
        "model.lora_rank": 4,
        "model.lora_alpha": 8,
        "model.lora_dropout": 0.1,
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl_type": "adaptive",
    },
    "mixture": {"actor.router_aux_loss_coef": 0.1},
    "frozen": {
        "actor.freeze": "*.mlp.*",
        "critic.freeze": "*.self_attn.*",
        "actor.optimizer": "sgd",
        "actor.betas": (0.0, 0.999),
    },
}
MIXTURE = dict(
    model_type="qwen2_moe", architectures=["Qwen2MoeForCausalLM"], num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=16, shared_expert_intermediate_size=8, norm_topk_prob=True,
)  # fmt: skip


@pytest.mark.parametrize("kind", RUNS)
def test_runs_of_every_kind_are_recomputed_to_the_bit(small_run, tmp_path, monkeypatch, kind):
    monkeypatch.setitem(graders.GRADERS.own, "arithmetic", lambda text, _: Reward(int(f"0{text}"[-1]) / 9, {}, None))
    if kind == "mixture":
        file = tmp_path / "model/config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | MIXTURE))
    run = record(small_run, RUNS[kind])
    assert first_difference(run) is None
    with np.load(run / "replay/step_2/batch.npz") as file:
        kinds = {"grpo": "ref_logprob", "async": "weight", "lora": "ref_logprob", "mixture": "value", "frozen": "value"}
        assert np.abs(file[kinds[kind]]).max() > 0 and np.abs(file["advantage"]).max() > 0


@pytest.mark.parametrize(
    "hosts,steps,said",
    [
        (1, 6, "trainer.replay_steps='2,7': step 7 is none of this run, which has 6"),
        (2, 7, "is for one host, and this"),
    ],
)
def test_steps_that_cannot_be_recorded_end_the_start(hosts, steps, said):
    with pytest.raises(UserError, match=said):
        make_recorder("2,7", hosts, steps)


def test_what_is_not_recorded_is_said_in_one_line(run, capsys):
    said = one_line(capsys, replay.main, run, "--step=7")
    assert "--step=7 is not recorded" in said and "which has 2; name one of these" in said
    said = one_line(capsys, replay.main, run.parent)
    assert "has no recorded step; train with trainer.replay_steps=3" in said
    for folder in (run / "nowhere", run / "replay/step_2"):
        assert f"{folder} is no folder of a run" in one_line(capsys, replay.main, folder)
    said = one_line(capsys, replay.main, run, "--sample=9")
    assert "the step has 4 sequences, from 0 to 3" in said
    for word, why in (
        ("--config.data.max_response_length=2", "the samples and the schedule of the step are recorded"),
        ("--config.trainer.total_training_steps=90", "leave it out"),
        ("--tolerance=nan", "must be 0 or more, and finite"),
        ("--tolerance=-1", "must be 0 or more, and finite"),
    ):
        assert why in one_line(capsys, replay.main, run, word)
    for file in ("about.json", "samples.json", "batch.npz"):
        path = run / "replay/step_2" / file
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert "is no readable bundle" in one_line(capsys, replay.main, run, "--step=2")
        path.write_bytes(whole)


def test_a_damaged_state_is_one_line_with_its_remedy(run, capsys):
    state = run / "replay/step_2/state/1"
    for file in state.glob("state/**/d/*"):
        file.write_bytes(file.read_bytes()[:-100])
    said = one_line(capsys, replay.main, run)
    assert f"{state} is no readable checkpoint: state/ is missing or damaged (" in said
    assert said.endswith("); use another: record the step again\n")


def test_only_a_loss_with_ppos_clipping_has_its_column(run):
    assert "clipped" not in replayed(run, "--sample=1", "--config.actor.loss_mode=cispo")[1]


BROKEN = """
from jppo.learner.algorithm import Algorithm
broken = lambda: Algorithm(advantage=lambda view: view.reward / 0.0)
"""


def test_an_algorithm_with_infinities_is_told(run, tmp_path):
    (tmp_path / "mine.py").write_text(BROKEN)
    text = replayed(run, f"--with={tmp_path}/mine.py:broken")[1]
    assert "mine.py:broken gives NaN or infinities: largest advantage, " in text and "gradient norm; a run" in text


def test_a_model_of_another_shape_is_named_as_the_model(recorded, run, tmp_path):
    model = shutil.copytree(recorded / "model", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_attention_heads": 8}))
    found = first_difference(run, f"--config.model.path={model}", "--config.model.init=random")
    assert found == ("model", "policy.num_heads", "4", "8")
    with pytest.raises(SystemExit) as ended:
        replay.main([str(run), f"--config.model.path={model}", "--config.model.init=random"])
    assert ended.value.code == 1


def test_a_step_that_cannot_be_written_ends_no_run(small_run, capfd):
    run = pathlib.Path(small_run.trainer.run_dir)
    run.mkdir()
    (run / "replay").write_text("a file in its place")
    record(small_run, {})
    assert len(read_lines(run / "metrics.jsonl")) == 3
    assert "step 2 is not recorded (NotADirectoryError" in capfd.readouterr().out.replace("\n", " ")
