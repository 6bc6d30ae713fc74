"""One PPO step against the same step written plainly in torch, trajectory by trajectory."""

import jax
import numpy as np
import pytest

from jppo.learner import state

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LR = {"actor": 1e-3, "critic": 2e-3}
MINI, EPOCHS = 4, 2


def make_torch(kind, seed, hf_config):
    extra = {"num_labels": 1, "pad_token_id": None} if "Sequence" in kind else {}
    config = transformers.Qwen2Config(**{k: v for k, v in (hf_config | extra).items() if k != "architectures"})
    model = getattr(transformers, kind).from_config(config, dtype=torch.float64, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_((1 + 0.2 * noise if "norm" in name else 0.3 * noise).float())
    return model


class Plain:
    """PPO as the papers and verl's documentation say it, one trajectory at a time, in float64."""

    def __init__(self, settings, kl_coef):
        self.s, self.kl_coef = settings, kl_coef

    def logits(self, policy, t):
        tokens = torch.tensor(t.tokens.astype(np.int64))[None]
        return policy(tokens).logits[0, :-1] / self.s.temperature  # entry i emits token i + 1

    def logp(self, policy, t):
        logs = torch.log_softmax(self.logits(policy, t), -1)
        chosen = logs.gather(1, torch.tensor(t.tokens[1:].astype(np.int64))[:, None])[:, 0]
        entropy = -(logs.exp() * logs).sum(-1)
        kept = torch.tensor(t.sampled[1:])
        return chosen[kept], entropy[kept]

    def value(self, critic, t):
        hidden = critic.model(torch.tensor(t.tokens.astype(np.int64))[None]).last_hidden_state[0, :-1]
        return (hidden @ critic.score.weight[0])[torch.tensor(t.sampled[1:])]

    def advantages(self, old, ref, values, scores):
        raw = []
        for logp, ref_logp, v, score in zip(old, ref, values, scores, strict=True):
            reward = -self.kl_coef * (logp - ref_logp)
            reward[-1] += float(score)
            out, carried = torch.zeros_like(v), 0.0
            for i in reversed(range(len(v))):
                following = v[i + 1] if i + 1 < len(v) else 0.0
                carried = reward[i] + self.s.gamma * following - v[i] + self.s.gamma * self.s.lam * carried
                out[i] = carried
            raw.append(out)
        all_of = torch.cat(raw)
        white = [(a - all_of.mean()) / torch.sqrt(all_of.var() + 1e-8) for a in raw]
        return white, [a + v for a, v in zip(raw, values, strict=True)]

    def actor_loss(self, policy, t, old, ref, advantage):
        logp, entropy = self.logp(policy, t)
        ratio = torch.exp(logp - old)
        low, high = 1 - self.s.clip_ratio, 1 + self.s.clip_ratio
        surrogate = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        surrogate = torch.where(advantage < 0, torch.minimum(surrogate, -advantage * self.s.clip_c), surrogate)
        k3 = (torch.exp(ref - logp) - (ref - logp) - 1).clamp(-10, 10)  # as verl bounds it
        return (surrogate - self.s.entropy_coeff * entropy + self.s.kl_loss_coef * k3).sum()

    def critic_loss(self, critic, t, old, returns):
        v, c = self.value(critic, t), self.s.cliprange_value
        clipped = torch.maximum(torch.minimum(v, old + c), old - c)
        return 0.5 * torch.maximum((v - returns) ** 2, (clipped - returns) ** 2).sum()

    def train(self, model, lr, losses, tokens):
        """losses: a closure for each trajectory; AdamW and the clip are torch's own."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
        norms = []
        for _ in range(EPOCHS):
            for start in range(0, len(losses), MINI):
                optimizer.zero_grad()
                part = slice(start, start + MINI)
                (sum(loss() for loss in losses[part]) / sum(tokens[part])).backward()
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
        return np.mean(norms)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_one_step_equals_plain_torch(new_learner, settings, drawn, tmp_path, threads):
    ours = new_learner(sequences=2 * MINI)
    # By seed 4 one gradient is 4e-8, as small as its rounding in f32 and as Adam's epsilon: its step may be anything.
    trajectories, scores = drawn(2 * MINI, seed=5)
    theirs = {
        "actor": make_torch("AutoModelForCausalLM", 0, ours.hf),
        "reference": make_torch("AutoModelForCausalLM", 1, ours.hf),
        "critic": make_torch("AutoModelForSequenceClassification", 2, ours.hf),
    }

    def to_jax(name, folder):
        """The torch model as it stands, through its files."""
        path = tmp_path / folder / name
        theirs[name].save_pretrained(path)
        what = ours.what["critic" if name == "critic" else "actor"]
        return state.load_sharded(what, str(path), init="pretrained", key=jax.random.key(0))

    begin = {name: to_jax(name, "begin") for name in theirs}
    plan = ours.plan("segments", 48, MINI)
    flat, metrics = ours.score(
        trajectories, scores, plan=plan,
        policy=begin["actor"], reference=begin["reference"], value=begin["critic"],
    )  # fmt: skip
    after = {}
    for name, further in (("actor", (begin["reference"],)), ("critic", ())):
        how, opt = ours.make_trainable(name, begin[name], lr=LR[name], tx=ours.adamw)
        minis = ours.minis(flat, trajectories, plan=plan, mini=MINI, name=name, epochs=EPOCHS)
        after[name], _, found = how.learn(begin[name], opt, np.int32(0), minis, *further)
        metrics |= found

    plain = Plain(settings, ours.kl_coef)
    with torch.no_grad():
        old = [plain.logp(theirs["actor"], t)[0] for t in trajectories]
        ref = [plain.logp(theirs["reference"], t)[0] for t in trajectories]
        values = [plain.value(theirs["critic"], t) for t in trajectories]
        advantage, returns = plain.advantages(old, ref, values, scores)
    count = [len(v) for v in values]
    actor = [
        lambda i=i, t=t: plain.actor_loss(theirs["actor"], t, old[i], ref[i], advantage[i])
        for i, t in enumerate(trajectories)
    ]
    critic = [
        lambda i=i, t=t: plain.critic_loss(theirs["critic"], t, values[i], returns[i])
        for i, t in enumerate(trajectories)
    ]
    norms = {
        "actor": plain.train(theirs["actor"], LR["actor"], actor, count),
        "critic": plain.train(theirs["critic"], LR["critic"], critic, count),
    }

    assert metrics["actor/pg_clipfrac"] > 0.05 and metrics["critic/vf_clipfrac"] > 0.05
    flat_returns = torch.cat(returns).mean()
    np.testing.assert_allclose(metrics["critic/returns/mean"], flat_returns, rtol=1e-4)
    for key, theirs_of in (("returns", returns), ("values", values)):
        whole = torch.cat(theirs_of)
        for name, x in (("max", whole.max()), ("min", whole.min()), ("std", whole.std())):
            np.testing.assert_allclose(metrics[f"critic/{key}/{name}"], x.item(), rtol=1e-3, atol=1e-5)
    for name in ("actor", "critic"):
        np.testing.assert_allclose(metrics[f"{name}/grad_norm"], norms[name], rtol=1e-3)
        expected = to_jax(name, "after")
        apart = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), after[name], expected)
        assert max(jax.tree.leaves(apart)) < 1e-5, apart
