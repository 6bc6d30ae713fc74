"""Replayed experts: log-probs and gradients against transformers with forced routers, and the share that differs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jppo import settings
from jppo.errors import UserError
from jppo.learner import packing, ppo, score
from jppo.models import config_reader, decoder, hf_write, params
from jppo.run.make import replayed_experts
from jppo.runlog import trajectories as saved
from tests.make import abstract_params, trajectory

E, K, LAYERS = 5, 2, 3
LENGTHS = (7, 10, 4)
REAL_TOPK = torch.topk


def config(normalized, layers):
    """A random mixture whose odd layers are dense: runs of layers if there are three, a repeated pattern if four."""
    return transformers.Qwen3MoeConfig(
        vocab_size=40, hidden_size=24, intermediate_size=20, moe_intermediate_size=12, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=12, num_experts=E, num_experts_per_tok=K,
        mlp_only_layers=[*range(1, layers, 2)], norm_topk_prob=normalized, initializer_range=0.4,
        tie_word_embeddings=True, architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip


def made(normalized=True, layers=LAYERS):
    """Ours and transformers' model with the same weights."""
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(
        config(normalized, layers), attn_implementation="eager"
    ).eval()
    cfg = config_reader.parse_config(theirs.config.to_dict(), path="config.json")
    rng = np.random.default_rng(2)

    def draw(entry):
        mean = 1.0 if entry.path[-1] == "scale" else 0.0
        return jnp.asarray(mean + 0.4 * rng.normal(size=entry.shape), jnp.float32)

    values = params.tree(params.table(cfg, head="lm"), draw)
    own = {name: torch.from_numpy(np.array(x)) for name, x in hf_write.hf_tensors(values, cfg)}
    stacked = theirs.state_dict()
    for i in (0, 2):
        at = f"model.layers.{i}.mlp.experts"
        each = {kind: [own.pop(f"{at}.{e}.{kind}_proj.weight") for e in range(E)] for kind in ("gate", "up", "down")}
        pairs = zip(each["gate"], each["up"], strict=True)
        own[f"{at}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        own[f"{at}.down_proj"] = torch.stack(each["down"])
    own["lm_head.weight"] = own["model.embed_tokens.weight"]
    assert own.keys() == stacked.keys()
    theirs.load_state_dict(own)
    return cfg, values, theirs


def drawn(seed=0, known=True, layers=LAYERS):
    """Ragged responses with experts at random, but not of their last tokens."""
    rng = np.random.default_rng(seed)
    out = []
    for i, n in enumerate(LENGTHS):
        experts = np.argsort(rng.random((n, layers, E)))[:, :, :K].astype(np.int16)
        experts[-1] = -1
        ids = rng.integers(0, 40, n)
        out.append(trajectory(ids, np.arange(n) > 1, str(i), experts=experts if known else None))
    return out


def plan(kind="segments", experts=(LAYERS, K)):
    made = packing.make_plan(
        kind, max_length=12, row_lengths=2, max_tokens_per_row=24, tokens_per_micro=10**6, sequences=3, row_multiple=1,
        shared=(8, 12),
    )  # fmt: skip
    return dataclasses.replace(made, experts=experts)


def logprob_of(cfg, **how):
    return score.make_logprob(
        decoder.Decoder(cfg, **how), cfg, temperature=0.9, chunk_tokens=64, with_entropy=True, compare=True
    )


def forced(monkeypatch, experts):
    """Makes transformers' routers take these experts [n, L, K], layer by layer, with their own probabilities."""
    layers = iter([0, 2])

    def topk(scores, k, dim=-1):
        _, own = REAL_TOPK(scores, k, dim)
        given = torch.from_numpy(experts[: len(scores), next(layers)].astype(np.int64))
        chosen = torch.where(given < 0, own, given)
        return scores.gather(-1, chosen), chosen

    monkeypatch.setattr(torch, "topk", topk)


@pytest.mark.parametrize(
    "normalized, layers, how", [(True, 3, {}), (False, 3, dict(scan_layers=False, remat="full")), (True, 4, {})]
)
def test_log_probs_and_gradients_are_those_of_transformers_with_the_same_experts(monkeypatch, normalized, layers, how):
    cfg, values, theirs = made(normalized, layers)
    found = drawn(layers=layers)
    [rows] = packing.pack(found, range(3), plan(experts=(layers, K)))
    share = np.random.default_rng(5).normal(size=rows.inputs.shape).astype(np.float32)
    logprob = logprob_of(cfg, **how)

    def loss(values):
        scores = logprob(values, rows)
        return jnp.sum(jnp.where(rows.mask, share * scores.logprob, 0.0)), scores

    gradient, scores = jax.jit(jax.grad(loss, has_aux=True))(values)
    total = torch.zeros(())
    for b, t in enumerate(found):
        forced(monkeypatch, t.experts)
        ids = torch.from_numpy(t.tokens[None].astype(np.int64))
        logp = torch.log_softmax(theirs(ids).logits[0, :-1] / 0.9, -1).gather(-1, ids[0, 1:, None])[:, 0]
        here = (np.asarray(rows.sequence) == b) & rows.mask
        ours = np.asarray(scores.logprob)[here]
        np.testing.assert_allclose(ours, logp.detach().numpy()[t.sampled[1:]], atol=1e-4)
        total = total + (torch.from_numpy(share[here]) * logp[torch.from_numpy(t.sampled[1:])]).sum()
    total.backward()
    ours = dict(hf_write.hf_tensors(gradient, cfg))
    for i in (0, 2):
        router = theirs.model.layers[i].mlp.gate.weight.grad.numpy()
        assert np.abs(router).max() > 1e-2
        np.testing.assert_allclose(ours[f"model.layers.{i}.mlp.gate.weight"], router, atol=1e-3)


def test_the_share_that_differs_is_counted_by_token_layer_and_expert():
    """Layer 1 is dense."""
    cfg, values, theirs = made()
    found = drawn(known=False)
    own = []
    for t in found:
        with torch.no_grad():
            logits = theirs(torch.from_numpy(t.tokens[None].astype(np.int64)), output_router_logits=True).router_logits
        chosen = [x.topk(K, -1).indices.numpy() for x in logits]
        own.append(np.stack([chosen[0], np.zeros_like(chosen[0]), chosen[1]], axis=1).astype(np.int16))
    exact = [dataclasses.replace(t, experts=x) for t, x in zip(found, own, strict=True)]
    [rows], logprob = packing.pack(exact, range(3), plan()), jax.jit(logprob_of(cfg))
    scores = logprob(values, rows)
    plain = logprob(values, dataclasses.replace(rows, experts=None))
    np.testing.assert_allclose(scores.logprob, plain.logprob, atol=1e-6)
    assert plain.routing_differs is None and not np.asarray(scores.routing_differs).any()
    rows.experts[..., 2, :] = rows.experts[..., 2, ::-1]  # the order of a token's experts does not matter
    assert not np.asarray(logprob(values, rows).routing_differs).any()
    row, entry = np.argwhere(rows.sequence == 1)[-1]  # its last token: no later one sees it
    there = rows.experts[row, entry, 2]
    rows.experts[row, entry, 2, 0] = next(e for e in range(E) if e not in there)
    differs = np.asarray(logprob(values, rows).routing_differs)
    assert differs[row, entry] == 1 / (2 * K) and np.count_nonzero(differs) == 1
    rows.experts[row, entry] = -1
    assert not np.asarray(logprob(values, rows).routing_differs).any()


def test_old_log_probs_come_with_the_share_of_experts_that_differs(make_recipe):
    cfg = config_reader.parse_config(config(True, LAYERS).to_dict(), path="config.json")
    model = decoder.Decoder(cfg), cfg
    passes = ppo.make_passes(ppo.Models(model, None, None), make_recipe("grpo"), temperature=0.9, chunk_tokens=64)
    values = abstract_params(cfg, head="lm", param_dtype=jnp.float32)
    [rows] = packing.pack(drawn(), range(3), plan())
    assert jax.eval_shape(passes.logprob, values, rows).routing_differs.shape == rows.mask.shape


def test_a_row_has_the_experts_of_its_tokens_and_no_others():
    found = drawn()
    for kind in ("segments", "buckets", "none"):
        for rows in packing.pack(found, range(3), plan(kind)):
            for b, t in enumerate(found):
                here = rows.sequence == b
                np.testing.assert_array_equal(rows.experts[here], t.experts[:-1][rows.position[here]])
            assert (rows.experts[rows.sequence < 0] == -1).all()
    [rows] = packing.pack(drawn(known=False), range(3), plan())
    assert (rows.experts == -1).all(), "responses that no engine sampled"
    assert packing.pack(found, range(3), plan(experts=None))[0].experts is None


def test_a_prompt_is_shared_as_far_as_its_experts_are_the_same():
    one = drawn()[1]
    other = dataclasses.replace(one, tokens=np.where(np.arange(10) > 5, 1, one.tokens).astype(np.int32))
    one, other = (dataclasses.replace(t, sampled=np.arange(10) > 5, uid="p") for t in (one, other))
    changed = dataclasses.replace(other, experts=other.experts.copy())
    changed.experts[3, 2] = (changed.experts[3, 2] + 1) % E
    for second, shared in ((other, 5), (changed, 2)):
        [rows] = packing.pack([one, second], range(2), plan("prefix"))
        assert np.sum(rows.segment == -1) == shared
        for b, t in enumerate((one, second)):
            here = rows.sequence == b
            np.testing.assert_array_equal(rows.experts[here], t.experts[:-1][rows.position[here]])


def test_experts_are_saved_and_restored_to_the_bit():
    found = [*drawn(), *drawn(1, known=False)]
    back = saved.deserialise(saved.serialise(found))
    for a, b in zip(found, back, strict=True):
        assert (a.experts is None) == (b.experts is None)
        assert a.experts is None or (np.array_equal(a.experts, b.experts) and b.experts.dtype == np.int16)
        assert np.array_equal(a.tokens, b.tokens)
    assert saved.deserialise(saved.serialise(drawn(known=False)))[0].experts is None


def test_replay_is_refused_without_experts_or_an_engine_that_returns_them():
    c = settings.default()
    c.rollout.routing_replay = True
    cfg, _, _ = made()
    assert replayed_experts(c, cfg) == (LAYERS, K)
    with pytest.raises(UserError, match=r"routing_replay=True: the qwen3_moe model of model.path has no experts"):
        replayed_experts(c, dataclasses.replace(cfg, experts=None))
    c.model.path, c.data.train_files, c.data.val_files, c.rollout.name = "m", "t", "v", "sglang"
    with pytest.raises(UserError, match=r"routing_replay=True needs the experts.*'sglang' does not.*vllm or inprocess"):
        settings.check(c)
    c.rollout.routing_replay = False
    settings.check(c)
    assert replayed_experts(c, cfg) is None
