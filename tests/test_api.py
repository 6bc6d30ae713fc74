"""`jppo.open`: loops written on it equal the commands', its gradients equal others', and what it refuses."""

import dataclasses
import json
import math
import re
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import jppo
from examples import arithmetic
from jppo import train
from jppo.algorithms import advantage, losses, masked
from jppo.errors import UserError
from jppo.models import hf
from jppo.rollout.protocol import RolloutError
from jppo.run.agreement import Mismatch
from jppo.run.api.losses import ResponsesView, cross_entropy, importance_sampling
from jppo.runlog.logger import read_metrics
from tests import make

DATA = dict(max_prompt_length=8, max_response_length=6, row_lengths=1)
ACTOR = dict(lr=1e-2, ppo_mini_batch_size=4, entropy_coeff=0.01)
SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
# The command logs these of the whole batch, or not as means over mini-batches.
OTHERWISE = ("actor/entropy", "actor/ratio_max", "actor/ratio_min")
ENGINE = dict(name="inprocess", kv_cache_memory_bytes=2**20)
HEAD = dict(head="lm", param_dtype="float32")
PROMPTS = ["12+34=", "5+6=", "78+9=", "4+44="]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of one layer with weights, so that a policy and another see the same ones."""
    path = tmp_path_factory.mktemp("own") / "model"
    arithmetic.write_model(path)
    (path / "config.json").write_text(json.dumps(arithmetic.MODEL | SHAPE))
    make.write_weights(path)
    return path


@pytest.fixture(scope="module")
def m(folder):
    """A policy with adapters and a critic with others, and the in-process engine, on a mesh of 8 devices."""
    with jppo.open(str(folder), engine=ENGINE, lora=4, critic=True, data=DATA, actor=ACTOR) as made:
        yield made


@pytest.fixture
def batch(m):
    """Samples, and everything that a loss may read of them."""
    m.publish()
    made = m.batch(m.sample(PROMPTS, n=2, seed=3))
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=made.mask.shape) for name in ("advantage", "value", "returns")}
    yield made.replace(old_logprob=m.logprobs(made) + 0.3 * drawn["value"], **drawn)
    m.discard()


def gradient(m):
    """The gradient of the policy, over all groups of devices, and starts anew."""
    carry = m.policy._carry
    carry = m.policy.trainable.exchange(carry) if m.policy.trainable.exchange is not None else carry
    grads = jax.tree.map(lambda x, p: np.asarray(x).reshape(-1, *p.shape)[0], carry[0], m.policy.params)
    m.discard()
    return jax.tree.leaves(grads)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(int, filter(str.isdigit, solution_str))) / 10


def grpo(scores, mask, n):
    """GRPO's advantages: a number for each response."""
    groups = np.asarray(scores, np.float32).reshape(-1, n)
    return ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)).reshape(-1)


def loop(m, prompts, steps, n, mini, critic):
    """A training loop as a user would write it; returns the metrics of each step."""
    history, per_step = [], len(prompts) // steps
    for step in range(steps):
        samples = m.sample(prompts[step * per_step : (step + 1) * per_step], n=n)
        scores = [compute_score("", t.text, "") for t in samples]
        b = m.batch(samples)
        b = b.replace(old_logprob=m.logprobs(b))
        if critic:
            ends = masked.at_kept(jnp.asarray(scores, jnp.float32), masked.last(b.mask))
            found, returns = advantage.gae(jnp.where(b.mask, ends, 0.0), m.values(b), b.mask, gamma=1.0, lam=1.0)
            b = b.replace(value=m.values(b), returns=returns, advantage=masked.whiten(found, b.mask))
        else:
            b = b.replace(advantage=grpo(scores, b.mask, n))
        minis = []
        for part in np.split(np.arange(len(b)), len(b) // mini):
            metrics = m.forward_backward(b[part]).metrics
            if critic:
                metrics |= m.forward_backward(b[part], "value").metrics
            minis.append(metrics | m.optim_step())
        history.append({name: np.mean([one[name] for one in minis]) for name in minis[0] if name not in OTHERWISE})
        m.publish()
    return history


@pytest.mark.slow
@pytest.mark.parametrize(
    "critic,more",
    [
        (False, {}),
        (True, {}),
        (False, dict(loss_mode="clip_cov", clip_cov_ratio=0.4, clip_cov_lb=-9.0, clip_cov_ub=9.0)),
    ],
    ids=["grpo", "critic", "drawn tokens"],
)
def test_a_loop_equals_the_command(folder, tmp_path, config, critic, more):
    rows = [
        dict(prompt=p, ground_truth="0", data_source="mine") for p in PROMPTS + [p[::-1][1:] + "=" for p in PROMPTS]
    ]
    config.data.train_files = config.data.val_files = make.write_rows(tmp_path / "rows.jsonl", *rows)
    wanted = dict(
        data=DATA | dict(train_batch_size=4), actor=ACTOR | more, critic=dict(lr=1e-2) if critic else {},
        model=dict(path=str(folder)), rollout=dict(name="inprocess", n=2),
        trainer=dict(run_dir=str(tmp_path / "run"), total_training_steps=2),
        algorithm=dict(adv_estimator="gae" if critic else "grpo"), reward=dict(function=f"{__file__}:compute_score"),
    )  # fmt: skip
    for section, values in wanted.items():
        config[section].update(values)
    config.data.shuffle = False
    train.train(config)
    lines = [one for one in read_metrics(tmp_path / "run") if "actor/loss" in one]
    with jppo.open(
        str(folder), engine="inprocess", critic=dict(lr=1e-2) if critic else None, data=DATA, actor=ACTOR | more
    ) as m:
        history = loop(m, [row["prompt"] for row in rows], steps=2, n=2, mini=4, critic=critic)
        m.export(tmp_path / "mine")
    for line, mine in zip(lines, history, strict=True):
        assert {"actor/loss", "actor/grad_norm", "actor/pg_clipfrac"} < mine.keys()
        assert not critic or {"critic/vf_loss", "critic/grad_norm"} < mine.keys()
        for name, value in mine.items():
            np.testing.assert_allclose(value, line[name], rtol=1e-4, atol=1e-6, err_msg=name)
    _, cfg = hf.read_config(folder)
    ours, theirs = (jax.tree.leaves(hf.load_params(p, cfg, **HEAD)) for p in (tmp_path / "mine", tmp_path / "run/hf"))
    start = jax.tree.leaves(hf.load_params(folder, cfg, **HEAD))
    for mine, other, before in zip(ours, theirs, start, strict=True):
        assert np.abs(mine - other).max() <= 1e-3 * np.abs(other - before).max()


def test_samples_are_of_the_policy(m, batch):
    np.testing.assert_allclose(m.logprobs(batch), batch.rollout_logprob, atol=1e-5)
    assert (batch.mask.sum(1) == [t.sampled.sum() for t in batch.trajectories]).all()
    assert [t.text for t in m.sample(PROMPTS, n=2, seed=3)] == [t.text for t in batch.trajectories]
    assert [t.tokens.tolist() for t in m.sample(PROMPTS, n=2)] != [t.tokens.tolist() for t in m.sample(PROMPTS, n=2)]


def test_the_engine_samples_from_a_quantised_base(folder, tmp_path):
    """Its log-probs are those of transformers with the exported model, whose base is decoded, after a step too."""
    how = dict(engine=ENGINE, lora=4, model=dict(base_quantization="int8"), data=DATA, actor=ACTOR)
    with jppo.open(str(folder), **how) as q:
        for number in range(2):
            b = q.batch(q.sample(PROMPTS, n=2))
            theirs = transformers.AutoModelForCausalLM.from_pretrained(q.export(tmp_path / str(number)))
            for t in b.trajectories:
                given = torch.tensor(t.tokens[None].astype(np.int64))
                with torch.no_grad():
                    found = theirs(given).logits[0, :-1].log_softmax(-1).gather(1, given[0, 1:, None])[:, 0]
                np.testing.assert_allclose(t.logprob[t.sampled], found.numpy()[t.sampled[1:]], atol=1e-4)
            q.forward_backward(b.replace(old_logprob=q.logprobs(b), advantage=np.arange(8.0)), "ppo")
            q.optim_step(lr=0.1)
            q.publish()


@pytest.mark.parametrize("loss", ["ppo", "cross_entropy", "importance_sampling", "gspo"])
def test_parts_of_a_batch_add_up_to_its_gradient(m, batch, loss):
    whole = m.forward_backward(batch, loss)
    expected = gradient(m)
    parts = [m.forward_backward(part, loss, of=batch) for part in (batch[:3], batch[3:])]
    assert sum(one.metrics["actor/loss"] for one in parts) == pytest.approx(whole.metrics["actor/loss"], rel=1e-5)
    np.testing.assert_allclose(np.concatenate([one.logprob for one in parts]), whole.logprob, atol=1e-5)
    for ours, theirs in zip(gradient(m), expected, strict=True):
        make.assert_close(ours, theirs)


def test_a_function_is_a_loss_as_a_name_is(m, batch):
    """The clipped surrogate and the squared error, written out, and jppo's own function of the first."""

    def surrogate(view):
        ratio, advantage = jnp.exp(view.logprob - view.old_logprob), view.advantage
        return jnp.maximum(-advantage * ratio, -advantage * jnp.clip(ratio, 0.9, 1.1))

    def own(view):
        arrays = view.logprob, view.old_logprob, view.advantage, view.mask, view.segment
        return losses.clipped(*arrays, clip_low=0.1, clip_high=0.1, clip_c=1e9)[0]

    named = m.forward_backward(batch, "vanilla", clip_ratio=0.1, clip_ratio_c=1e9, entropy_coeff=0.0)
    found = gradient(m)
    for loss in (surrogate, own):
        given = m.forward_backward(batch, loss)
        assert given.metrics["actor/loss"] == pytest.approx(named.metrics["actor/pg_loss"], rel=1e-5)
        for ours, theirs in zip(gradient(m), found, strict=True):
            make.assert_close(ours, theirs)
    value, mask = m.values(batch), batch.mask
    squared = m.forward_backward(batch, lambda view: (view.value - view.returns) ** 2).metrics["critic/vf_loss"]
    assert squared == pytest.approx(np.mean((value - batch.returns)[mask] ** 2), rel=1e-5)


def test_targets_and_weights_may_be_given(m, folder):
    inputs, targets = [[2, 3, 4, 5], [6, 7]], [[3, 9, 9, 1], [2, 1]]
    weight = [[0.0, 1.0, 0.5, 2.0], [1.0, 0.0]]
    _, cfg = hf.read_config(folder)
    values = hf.load_params(folder, cfg, **HEAD)
    expected, each = 0.0, []
    for x, y, w in zip(inputs, targets, weight, strict=True):
        found = np.asarray(jax.nn.log_softmax(make.logits(cfg, values, np.array([x]))[0]))
        each.append(found[np.arange(len(y)), y])
        expected -= float(each[-1] @ np.array(w))
    fresh = m.another(seed=5)  # adapters that no test has trained
    made = fresh.examples(inputs, targets, weight=weight)
    found = fresh.forward_backward(made, "cross_entropy", loss_agg_mode="token-sum")
    assert found.metrics["actor/loss"] == pytest.approx(expected, rel=1e-5)
    for row, one in zip(found.logprob, each, strict=True):
        np.testing.assert_allclose(row[: len(one)], one, atol=1e-5)
    assert fresh.examples([[2] * 8]).mask.shape == (1, 13), "more than 6: as many as 14 tokens have"
    assert fresh.examples([[2] * 14]).mask.tolist() == [[True] * 13]
    plain = fresh.examples([[2, 3, 4, 5]])  # the next tokens
    np.testing.assert_allclose(fresh.logprobs(plain), fresh.logprobs(fresh.examples([[2, 3, 4]], [[3, 4, 5]])))


def test_hyperparameters_of_a_step_are_adams(folder):
    """Two steps by a loop from the paper (Kingma & Ba; decoupled decay by Loshchilov & Hutter), clipped."""
    steps = [
        dict(lr=0.01, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.3, grad_clip=0.5),
        dict(lr=0.02, beta1=0.7, beta2=0.9, eps=1e-2, weight_decay=0.0, grad_clip=0),
    ]
    with jppo.open(str(folder), data=DATA, mesh=dict(data=1, fsdp=-1)) as m:
        moments = None
        for t, h in enumerate(steps, 1):
            m.forward_backward(m.examples([[2, 3, 4, 5], [6, 7, 8]]), "cross_entropy")
            grads = [np.float64(x) for x in jax.tree.leaves(m.policy._carry[0])]
            before = [np.float64(x) for x in jax.tree.leaves(m.policy.params)]
            norm = np.sqrt(sum((g**2).sum() for g in grads))
            assert m.optim_step(**h)["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
            grads = [g * min(1.0, h["grad_clip"] / norm) if h["grad_clip"] else g for g in grads]
            mu, nu = moments or ([0 * g for g in grads], [0 * g for g in grads])
            mu = [h["beta1"] * a + (1 - h["beta1"]) * g for a, g in zip(mu, grads, strict=True)]
            nu = [h["beta2"] * a + (1 - h["beta2"]) * g**2 for a, g in zip(nu, grads, strict=True)]
            moments = mu, nu
            for p, a, b, new in zip(before, mu, nu, jax.tree.leaves(m.policy.params), strict=True):
                step = (a / (1 - h["beta1"] ** t)) / (np.sqrt(b / (1 - h["beta2"] ** t)) + h["eps"])
                np.testing.assert_allclose(new, p - h["lr"] * (step + h["weight_decay"] * p), atol=2e-6)


def test_sets_of_weights_share_programs_and_nothing_else(m, batch):
    other = m.another(seed=7)
    assert jax.tree.leaves(other.policy.trainable.base)[0] is jax.tree.leaves(m.policy.trainable.base)[0]
    before, kept = m.logprobs(batch), m.keep()
    other.forward_backward(batch)
    other.optim_step(lr=0.1)
    assert np.array_equal(m.logprobs(batch), before) and not np.allclose(other.logprobs(batch), before, atol=1e-2)
    assert np.array_equal(other.logprobs(batch, weights=kept), before)
    other.publish()
    with pytest.raises(UserError, match="the engine has other weights than this model's"):
        m.sample(PROMPTS)
    with_kept = m.sample(PROMPTS, n=2, seed=3, weights=kept)
    assert [t.text for t in with_kept] == [t.text for t in batch.trajectories]
    with pytest.raises(UserError, match="publish"):
        other.sample(PROMPTS)


def test_a_checkpoint_is_the_whole_state(m, batch, tmp_path):
    def step():
        m.forward_backward(batch, "ppo")
        m.forward_backward(batch, "value")
        m.optim_step()
        return m.publish()

    step()
    path = m.save(tmp_path)
    number, after = step(), m.logprobs(batch)
    assert path.name == str(number - 1)
    assert m.load(tmp_path) == number - 1
    assert step() == number and np.array_equal(m.logprobs(batch), after)
    m.load(path, optimizer=False)
    step()
    assert not np.array_equal(m.logprobs(batch), after)
    others = [path, *(path.with_name(str(number + i)) for i in (20, 30, 40))]
    for later in others[1:]:
        shutil.copytree(path, later)
    saved = m.save(tmp_path)
    assert saved not in others and all(one.is_dir() for one in (saved, *others)), "a save removes none"


def test_any_token_may_end_a_response(m, batch):
    m.publish()
    found = m.sample([[3, 4]], n=2, stop_ids=list(range(m.vocab_size)))
    assert [t.sampled.sum() for t in found] == [1, 1]


def test_other_weights_in_the_engine_are_seen(m, batch):
    m.publish()
    b = m.batch(m.sample(PROMPTS))
    m.logprobs(b)
    wrong = [dataclasses.replace(t, logprob=t.logprob - 0.1) for t in b.trajectories]
    with pytest.raises(Mismatch, match="do not have the same policy"):
        m.logprobs(m.batch(wrong))
    m.sample(PROMPTS, top_k=2)  # the engine's log-probs are over two tokens from here on, as far as is known
    m.sample(PROMPTS)
    m.logprobs(m.batch(wrong))
    m.publish()
    wrong = [dataclasses.replace(t, logprob=t.logprob - 0.1) for t in m.sample(PROMPTS)]
    with pytest.raises(Mismatch, match="do not have the same policy"):
        m.logprobs(m.batch(wrong))


def test_a_checkpoint_of_training_is_read(finished_run):
    c = finished_run
    sections = dict(
        data=dict(max_prompt_length=8, max_response_length=6, row_lengths=1), model=dict(init="random"),
        critic=dict(value_head_std=0.2),
    )  # fmt: skip
    with jppo.open(c.model.path, **sections) as m:
        assert m.load(c.trainer.run_dir) == 2 and m.step == 2
        m.forward_backward(m.examples([[2, 3, 4, 5]]), "cross_entropy")
        m.optim_step()
        assert m.publish() == 3
    said = r"trainer\.seed=7 was 1 when the checkpoint was written"
    other = sections | {"trainer": dict(seed=7)}
    with jppo.open(c.model.path, **other) as m, pytest.raises(UserError, match=said):
        m.load(c.trainer.run_dir)


def test_what_is_refused(m, batch, folder, tmp_path):
    cases = {
        "loss='grpo' is not known; it is one of": lambda: m.forward_backward(batch, "grpo"),
        "reads value, which the batch lacks": lambda: m.forward_backward(m.batch(batch.trajectories), "value"),
        "has no attribute 'logprobs'": lambda: m.forward_backward(batch, lambda view: view.logprobs),
        "reads 'router'; a loss of a loop reads": lambda: m.forward_backward(
            batch, lambda view: 0 * view.mask * view.router.z[0]
        ),
        "of the policy, or value of the critic": lambda: m.forward_backward(
            batch, lambda view: view.logprob - view.value
        ),
        "it must return the loss of every token": lambda: m.forward_backward(batch, lambda view: view.logprob.sum()),
        "'clip' is no option of a loss": lambda: m.forward_backward(batch, "ppo", clip=0.1),
        "'lr' is no option of a loss like this": lambda: m.forward_backward(batch, "ppo", lr=1.0),
        "'shuffle' is no option": lambda: m.forward_backward(batch, "ppo", shuffle=True),
        "'clip_ratio' is no option of a loss like this; use loss_agg_mode": lambda: m.forward_backward(
            batch, "importance_sampling", clip_ratio=0.1
        ),
        "loss=3 is not known": lambda: m.forward_backward(batch, 3),
        "actor.use_kl_loss=1 is of type int; give a bool": lambda: m.forward_backward(batch, "ppo", use_kl_loss=1),
        "actor.kl_topk=True is of type bool": lambda: m.forward_backward(batch, "ppo", kl_topk=True),
        "actor.clip_ratio=-1": lambda: m.forward_backward(batch, "ppo", clip_ratio=-1.0),
        r"advantage has the shape \[3\]": lambda: batch.replace(advantage=np.zeros(3)),
        "advantage is no array of numbers": lambda: batch.replace(advantage=[[1.0], [1.0, 2.0], "x"]),
        r"advantage\[0\] has 9 numbers": lambda: batch.replace(advantage=[np.zeros(9)] * len(batch)),
        "'score' is no array of a batch": lambda: batch.replace(score=np.zeros(8)),
        "optim_step.. without a gradient": m.optim_step,
        r"has token 99; the model's are 0 to 31": lambda: m.examples([[2, 99]]),
        "has 2 tokens and targets.0. 1": lambda: m.examples([[2, 3]], [[3]]),
        "at most 14 fit": lambda: m.examples([[2] * 15]),
        "prompt 1 has 9 tokens": lambda: m.sample(["123456789"]),
        "sample.temp=": lambda: m.sample(PROMPTS, temp=1.0),
        "sample.kept=": lambda: m.sample(PROMPTS, kept=4),
        "prompt 2 has a token outside of 0 to 31": lambda: m.sample([[3], [99]]),
        "prompt 1 has a token outside": lambda: m.sample([[-1]]),
        "n=0 must be a whole number from 1": lambda: m.sample(PROMPTS, n=0),
        "temperature=nan must be from 0.0": lambda: m.sample(PROMPTS, temperature=float("nan")),
        "top_k=-7 must be a whole number from -1": lambda: m.sample(PROMPTS, top_k=-7),
        "seed=-1 must be": lambda: m.sample(PROMPTS, seed=-1),
        "seed=1.5 must be a whole number": lambda: m.sample(PROMPTS, seed=1.5),
        "max_tokens=True must be": lambda: m.sample(PROMPTS, max_tokens=True),
        r"stop='ab' must be a list; write \['ab'\]": lambda: m.sample(PROMPTS, stop="ab"),
        "stop='' is neither a text": lambda: m.sample(PROMPTS, stop=[""]),
        "nor a token from 0 to 31": lambda: m.sample(PROMPTS, stop_ids=[99]),
        "no reference; open it with ref=": lambda: m.reference_logprobs(batch),
        "there is no setting 'actor.rate'": lambda: jppo.open(str(folder), actor=dict(rate=1)),
        "reward.function is of the loop of jppo.train": lambda: jppo.open(str(folder), reward=dict(function="x.py:f")),
        "algorithm.extension is of the loop of": lambda: jppo.open(str(folder), algorithm=dict(extension="x.py:f")),
        "algorithm.options.x is of the loop of": lambda: jppo.open(str(folder), algorithm=dict(options=dict(x=1))),
        "critic.lr=0.1 is of a critic, and": lambda: jppo.open(str(folder), **{"critic.lr": 0.1}),
        "rollout.quantization='fp8_per_tensor' is vLLM's": lambda: jppo.open(
            str(folder), rollout=dict(quantization="fp8_per_tensor")
        ),
        "data.mix is of the loop of": lambda: jppo.open(str(folder), data=dict(mix="a=1")),
        "actor.lr='fast' is of type str": lambda: jppo.open(str(folder), actor=dict(lr="fast")),
        "'cosine' needs the number of steps": lambda: jppo.open(str(folder), actor=dict(lr_scheduler_type="cosine")),
        "'linear' needs the number of steps": lambda: jppo.open(str(folder), actor=dict(lr_scheduler_type="linear")),
        "model.remat='auto' is decided by jppo.train alone": lambda: jppo.open(str(folder), **{"model.remat": "auto"}),
        "max_tokens_per_device=-1 is decided by jppo.train": lambda: jppo.open(
            str(folder), actor=dict(max_tokens_per_device=-1)
        ),
        "no such folder": lambda: m.load(tmp_path / "none"),
    }
    for message, call in cases.items():
        with pytest.raises(UserError, match=message) as e:
            call()
        assert "\n" not in str(e.value)
    m.forward_backward(batch, "ppo")
    with pytest.raises(UserError, match=r"gradients of 1 call.* are accumulated"):
        m.save(tmp_path)
    m.optim_step()
    with pytest.raises(RolloutError, match="it was trained on, and none was published"):
        m.sample(PROMPTS)
    closed = m.another()
    closed.close()
    with pytest.raises(UserError, match="this model is closed"):
        closed.publish()
    assert not list(tmp_path.iterdir())


def broken_engine(c, run, hosts):
    raise UserError(f"no server starts in {run}: {run.is_dir()}")


def test_without_a_run_dir_no_folder_is_left(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.raises(UserError, match=f"no server starts in {tmp_path}/temporary/jppo-.*: True"):
        jppo.open(str(folder), engine=f"{__file__}:broken_engine", data=DATA)
    with pytest.raises(UserError, match="no server starts in mine: False"):
        jppo.open(str(folder), engine=f"{__file__}:broken_engine", data=DATA, trainer=dict(run_dir="mine"))
    jppo.open(str(folder), data=DATA).close()
    assert not list((tmp_path / "temporary").glob("jppo-*"))


def test_the_first_example_of_the_page_runs(tmp_path, monkeypatch):
    """As it stands, but for the number of its steps, on a model of 512 positions."""
    page = (make.ROOT / "docs/your-own-loop.md").read_text(encoding="utf-8")
    example = re.search(r"^```python\n(.*?)^```", page, re.S | re.M)[1]
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "path/to/model"
    arithmetic.write_model(path)
    (path / "config.json").write_text(json.dumps(arithmetic.MODEL | SHAPE | {"max_position_embeddings": 512}))
    make.write_weights(path)
    steps = [0, 1]
    exec(example, {"prompts": PROMPTS[:2], "reward": lambda text: len(text), "range": lambda number: steps[:number]})
    assert (tmp_path / "runs/mine/checkpoints/2").is_dir()


def test_importance_sampling_weighs_by_the_ratio_of_sampled_tokens():
    rows = dict(logprob=[-1.0, -2.0, -3.0], old_logprob=[-1.0, -1.0, 9.0], advantage=[2.0, 3.0, 4.0])
    arrays = {name: np.array(x, np.float32) for name, x in rows.items()} | {"mask": np.array([True, True, False])}
    view = ResponsesView(arrays.__getitem__)
    np.testing.assert_allclose(importance_sampling(view), [-2.0, -3.0 * math.exp(-1.0), -4.0], rtol=1e-6)
    np.testing.assert_array_equal(cross_entropy(view), [1.0, 2.0, 3.0])
