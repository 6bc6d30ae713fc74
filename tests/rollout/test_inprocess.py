"""The trainer's own engine against a loop without a cache, against the scorer, and inside a training."""

import asyncio
import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo import train
from jppo.errors import UserError
from jppo.learner import packing, score, sharding, state
from jppo.models import cache, config_reader, decoder, heads, lora, params
from jppo.models.config import pad_vocab
from jppo.models.decoder import Decoder
from jppo.rollout import inprocess, protocol
from jppo.rollout.inprocess import InprocessEngine, InprocessSampler, InprocessSettings
from jppo.rollout.make import inprocess_settings
from jppo.rollout.protocol import RolloutError, greedy, require_kept, sample_seed
from jppo.types import OVERFLOW, Prompt
from tests.learner.test_compilations import compilations
from tests.make import read_lines, typed
from tests.models.conftest import SHAPES, config_of

PROMPT, RESPONSE, LONGEST = 9, 12, 21
ENDS = (3, 11, 20, 41, 60)
NAME = "qwen3-tied"
# Around 1, as transformers initialises them. Around 0, layers forget their inputs, and each multiplies rounding errors.
GEMMA4_FACTORS = ("scalar", "expert_scale")
SAMPLING = dataclasses.replace(greedy(RESPONSE), temperature=0.8, n=2, seed=5)


@pytest.fixture(autouse=True)
def quick(quick_compilation):
    """XLA need not try hard for models of this size."""


def model_of(name, mesh_shape=(1, 1, 1)):
    """A random model on a mesh, the same on every mesh, with weights that matter; rows that are no token shout."""
    mesh = sharding.mesh_of_shape(mesh_shape)
    cfg = pad_vocab(config_reader.parse_config(config_of(name), path="config.json"), mesh.shape["tensor"])
    rng = np.random.default_rng(1)

    def draw(entry):
        spare = [(0, entry.padding)] + [(0, 0)] * (len(entry.shape) - 1)
        shape = (entry.shape[0] - entry.padding, *entry.shape[1:])
        around = 1.0 - cfg.norm_offset if entry.path[-1] == "scale" else float(entry.path[-1] in GEMMA4_FACTORS)
        drawn = around + 0.2 * rng.normal(size=shape)
        if cfg.gemma4 is not None and entry.path[-1] == "scale":
            norm = entry.path[-2]
            if norm == "q_norm":
                drawn /= shape[-1] ** 0.5  # Gemma 4 does not divide its scores by it
            elif norm.endswith(("post_norm", "per_layer_norm")):
                drawn /= 2  # of outputs, which may be near 0
        return np.pad(drawn, spare, constant_values=9.0).astype(np.float32)

    values = params.tree(params.table(cfg, head="lm"), draw)
    what = state.model_weights(cfg, mesh, head="lm", param_dtype=np.float32)
    return cfg, mesh, jax.device_put(values, what.shardings)


def engine_of(cfg, mesh, rows, ends=ENDS, cut=False, dtype="float32", experts=False, kept=0):
    """A sampler without weights."""
    settings = InprocessSettings(
        cfg=cfg,
        rows=rows,
        row_multiple=sharding.whole_row_multiple(mesh),
        max_prompt_length=PROMPT,
        max_model_len=LONGEST,
        dtype=dtype,
        by_row=sharding.whole_rows_sharding(mesh),
        of_cache=sharding.cache_sharding(mesh, cache.cache_heads(cfg)),
        cut=cut,
        experts=experts,
        kept=kept,
    )
    return InprocessEngine(settings).ready(eos_token_ids=ends, decode=spell)


def spell(ids):
    """The text of tokens in these tests."""
    return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def made():
    """rows, mesh shape -> a sampler that holds version 7 of one model; made once."""
    found = {}

    def make(rows=4, mesh_shape=(1, 1, 1)):
        if (rows, mesh_shape) not in found:
            cfg, mesh, values = model_of(NAME, mesh_shape)
            sampler = engine_of(cfg, mesh, rows)
            sampler.hold(values, version=7)
            found[rows, mesh_shape] = sampler, cfg, values
        return found[rows, mesh_shape]

    return make


def ask(count, seed=0, vocab=40):
    """Prompts of 1 to PROMPT tokens."""
    rng = np.random.default_rng(seed)
    lengths = [1, PROMPT, *rng.integers(1, PROMPT + 1, count)][:count]
    return [Prompt(f"p{i}", "", "", rng.integers(0, vocab, n).astype(np.int32), "", {}) for i, n in enumerate(lengths)]


@functools.partial(jax.jit, static_argnums=0)
def whole(cfg, values, tokens):
    """Logits [20, LONGEST, V] by one pass without a cache."""
    position = jnp.broadcast_to(jnp.arange(LONGEST, dtype=jnp.int32)[None], tokens.shape)
    hidden = Decoder(cfg).apply({"params": values}, tokens, jnp.ones_like(tokens), position)
    return heads.logits_of((hidden, decoder.head_kernel(values, cfg), cfg))[:, :, : cfg.vocab_size]


def by_a_loop(cfg, values, prompts, sampling, ends=ENDS):
    """Every response, by whole forward passes over all rows and the key of each sample and position."""
    ends = (*(() if sampling.ignore_eos else ends), *sampling.stop_ids)
    B = len(prompts) * sampling.n
    tokens = np.zeros((20, LONGEST), np.int32)
    asked = [p for p in prompts for _ in range(sampling.n)]
    keys = [jax.random.key(sample_seed(sampling.seed, b // sampling.n, b % sampling.n)) for b in range(B)]
    for b, prompt in enumerate(asked):
        tokens[b, : len(prompt.ids)] = prompt.ids
    out = [[] for _ in asked]
    for _ in range(sampling.max_tokens):
        logits = np.asarray(whole(cfg, values, tokens))
        for b, prompt in enumerate(asked):
            if out[b] and (out[b][-1] in ends or any(text in spell(out[b]) for text in sampling.stop)):
                continue
            at = len(prompt.ids) + len(out[b])
            if sampling.temperature == 0:
                token = int(np.argmax(logits[b, at - 1]))
            else:
                scaled = np.float64(logits[b, at - 1]) / sampling.temperature
                sums = np.cumsum(np.exp(scaled - scaled.max()))  # a vocabulary of one chunk: the third number decides
                uniform = float(jax.random.uniform(jax.random.fold_in(keys[b], at), (3,))[2])
                token = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
            out[b].append(token)
            if at < LONGEST:
                tokens[b, at] = token
    return out


def responses(trajectories):
    return [t.tokens[t.sampled].tolist() for t in trajectories]


@pytest.mark.parametrize("sampling", [SAMPLING, greedy(RESPONSE)], ids=["seeded", "greedy"])
def test_the_tokens_are_those_of_a_loop_without_a_cache(made, sampling):
    """More samples than rows, prompts of one token and of the longest, responses of all lengths, several end tokens."""
    sampler, cfg, values = made()
    prompts, heard = ask(9), []
    found = sampler.generate(prompts, sampling, version=7, done=lambda number, t: heard.append((number, t)))
    assert responses(found) == by_a_loop(cfg, values, prompts, sampling)
    assert sorted(number for number, _ in heard) == list(range(9 * sampling.n))
    assert all(found[number] is t for number, t in heard)
    if sampling is SAMPLING:
        last = {t.tokens[-1] for t in found if t.finish == "stop"}
        assert len(last) > 1 and {t.finish for t in found} == {"stop", "length"}
    for b, t in enumerate(found):
        prompt, n = prompts[b // sampling.n], len(prompts[b // sampling.n].ids)
        assert t.uid == prompt.uid and np.array_equal(t.tokens[:n], prompt.ids) and t.turns == 1
        assert np.array_equal(t.sampled, np.arange(len(t.tokens)) >= n)
        assert np.array_equal(t.version, np.where(t.sampled, 7, -1)) and (t.logprob[:n] == 0).all()
        assert t.text == " ".join(map(str, t.tokens[n:].tolist()))
        assert (t.finish == "stop") == (t.tokens[-1] in ENDS)
        assert len(t.tokens) - n == RESPONSE or t.finish == "stop"
        assert not set(t.tokens[n:-1].tolist()) & set(ENDS)
        assert [t.tokens.dtype, t.logprob.dtype, t.version.dtype, t.sampled.dtype] == [
            np.int32, np.float32, np.int32, np.bool_,
        ]  # fmt: skip


def test_a_sample_is_the_same_in_any_row_and_beside_any_other(made):
    prompts = ask(7)
    expected = responses(made(rows=4)[0].generate(prompts, SAMPLING, version=7))
    assert responses(made(rows=1)[0].generate(prompts, SAMPLING, version=7)) == expected
    # others beside two of them, which are read and end at other times
    others = [prompts[0], *ask(5, seed=9)[1:], prompts[5]]
    found = responses(made()[0].generate(others, SAMPLING, version=7))
    assert found[:2] == expected[:2] and found[10:] == expected[10:12] and found != expected[:12]
    one, other = (responses(made()[0].generate(p, greedy(RESPONSE), version=7)) for p in (prompts, prompts[::-1]))
    assert one == other[::-1]
    assert expected != responses(made()[0].generate(prompts, dataclasses.replace(SAMPLING, seed=6), version=7))


def test_samples_that_are_asked_for_in_another_order_are_the_same(made):
    sampler, _, _ = made()
    prompts = ask(6)
    expected = responses(sampler.generate(prompts, SAMPLING, version=7))

    async def late(ask, prompt, **how):
        for _ in range(10 - len(prompt.ids)):
            await asyncio.sleep(0.001)
        return await protocol.one_turn(str)(ask, prompt, **how)

    later = InprocessSampler(sampler.settings, eos_token_ids=ENDS, decode=str, talk=late)
    later.hold(made()[2], version=7)
    assert responses(later.generate(prompts, SAMPLING, version=7)) == expected


def test_a_talk_may_ask_again(made):
    sampler, cfg, values = made()
    [prompt] = ask(1)

    async def twice(ask, prompt, *, sampling, seed, near):
        first = await ask(
            prompt.ids.tolist(), sampling=dataclasses.replace(sampling, max_tokens=3), seed=seed, near=near
        )
        more = [*prompt.ids.tolist(), *first.tokens, 5]
        second = await ask(more, sampling=dataclasses.replace(sampling, max_tokens=4), seed=seed, near=near)
        return protocol.respond(dataclasses.replace(prompt, ids=np.array(more)), second, text="")

    talking = InprocessSampler(sampler.settings, eos_token_ids=(), decode=str, talk=twice)
    talking.hold(values, version=7)
    [found] = talking.generate([prompt], greedy(RESPONSE), version=7)
    [first] = by_a_loop(cfg, values, [prompt], greedy(3), ends=())
    [second] = by_a_loop(
        cfg, values, [dataclasses.replace(prompt, ids=np.array([*prompt.ids, *first, 5]))], greedy(4), ends=()
    )
    assert found.tokens.tolist() == [*prompt.ids, *first, 5, *second]


def test_a_talk_that_fails_ends_the_call(made):
    async def failing(ask, prompt, **how):
        await ask(prompt.ids.tolist(), **how)
        raise KeyError(prompt.uid)

    sampler = InprocessSampler(made()[0].settings, eos_token_ids=ENDS, decode=str, talk=failing)
    sampler.hold(made()[2], version=7)
    with pytest.raises(KeyError):
        sampler.generate(ask(4), SAMPLING, version=7)


@pytest.mark.parametrize("top_p,top_k,min_p", [(0.7, -1, 0.0), (1.0, 3, 0.0), (1.0, -1, 0.2)])
def test_what_is_cut_is_not_sampled(made, top_p, top_k, min_p):
    sampler, cfg, values = made()
    sampling = dataclasses.replace(SAMPLING, top_p=top_p, top_k=top_k, min_p=min_p, seed=1)
    found, tokens = sampler.generate(ask(4), sampling, version=7), np.zeros((20, LONGEST), np.int32)
    for b, t in enumerate(found):
        tokens[b, : len(t.tokens)] = t.tokens
    for t, logits in zip(found, np.asarray(whole(cfg, values, tokens)) / 0.8, strict=False):
        for at in np.flatnonzero(t.sampled):
            falling = np.sort(np.exp(logits[at - 1]))[::-1].astype(np.float64)
            most = top_k if top_k > 0 else 1 + int(np.sum(np.cumsum(falling)[:-1] / falling.sum() < top_p))
            most = int(np.sum(falling >= min_p * falling[0])) if min_p else most
            mine = np.exp(np.float64(logits[at - 1, t.tokens[at]]))
            assert mine >= falling[most - 1] * (1 - 1e-5)
            assert t.logprob[at] == pytest.approx(np.log(mine / falling[:most].sum()), abs=1e-4)


@pytest.mark.parametrize("turns", [2, 32])
def test_stop_texts_and_ids_end_a_response_where_it_first_holds_one(monkeypatch, turns):
    """However seldom the host looks; across tokens too, beside end tokens and where these are ignored."""
    monkeypatch.setattr(inprocess, "TURNS", turns)
    cfg, mesh, values = model_of(NAME)
    sampler = engine_of(cfg, mesh, rows=4)
    sampler.hold(values, version=7)
    by_id = 0
    for changes in ({}, {"ignore_eos": True}, {"temperature": 0.0}, {"stop_ids": tuple(range(20, 40))}):
        sampling = dataclasses.replace(SAMPLING, stop=("7 1", "77", " 5 "), n=3, **changes)
        found, why = sampler.generate(ask(6), sampling, version=7), set()
        assert responses(found) == by_a_loop(cfg, values, ask(6), sampling)
        for t in found:
            tokens = t.tokens[t.sampled].tolist()
            assert t.text == spell(tokens)
            stopped = any(text in t.text for text in sampling.stop) or tokens[-1] in sampling.stop_ids
            by_id += tokens[-1] in sampling.stop_ids
            ended = tokens[-1] in ENDS and not sampling.ignore_eos
            assert t.finish == ("stop" if stopped or ended else "length")
            assert t.finish == "stop" or len(tokens) == RESPONSE
            why.add((stopped, ended))
        if not changes:
            assert why == {(True, False), (False, True), (False, False)}
        if sampling.ignore_eos:
            assert why == {(True, False), (False, False)}
            assert any(set(t.tokens[t.sampled].tolist()) & set(ENDS) for t in found)
    assert by_id > 1


def scored(cfg, mesh, weights, trajectories, temperature, field="logprob"):
    """The trainer's log-probs of the sampled tokens, end to end in the trajectories' order."""
    plan = packing.make_plan(
        "none", max_length=LONGEST, row_lengths=1, max_tokens_per_row=-1, tokens_per_micro=10**6,
        sequences=len(trajectories), row_multiple=sharding.row_multiple(mesh),
    )  # fmt: skip
    if any(t.experts is not None for t in trajectories):
        plan = dataclasses.replace(plan, experts=(cfg.num_layers, cfg.experts.active))
    if any(t.kept is not None for t in trajectories):
        plan = dataclasses.replace(plan, kept=max(t.kept.shape[1] for t in trajectories))
    how = dict(temperature=temperature, chunk_tokens=64, with_entropy=False, compare=True)
    logprob = score.make_logprob(Decoder(cfg), cfg, mesh=mesh, **how)
    found = {}
    for packed in packing.pack(trajectories, range(len(trajectories)), plan):
        rows = sharding.put_rows(packed, mesh)
        logp = np.asarray(getattr(jax.jit(logprob)(weights, rows), field))
        mask, sequence = np.asarray(rows.mask), np.asarray(rows.sequence)
        found |= {b: logp[(sequence == b) & mask] for b in range(len(trajectories)) if (sequence == b).any()}
    return np.concatenate([found[b] for b in range(len(trajectories))])


# A family with every kind of head, window and cap; tests/models/ compares all of them with and without a cache.
SCORED = (
    "qwen2-untied",
    "qwen3-biased",
    "gemma2-capped",
    "gemma3-long",
    "qwen2-moe-mixed",
    "gpt-oss-clamped",
    "qwen3.5-periods",
)
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in SHAPES if name not in SCORED]


@pytest.mark.parametrize("name", [*SCORED, *OTHERS])
def test_log_probs_are_the_scorers(name):
    cfg, mesh, values = model_of(name)
    sampler = engine_of(cfg, mesh, rows=4)
    sampler.hold(values, version=0)
    found = sampler.generate(ask(5), dataclasses.replace(SAMPLING, temperature=0.7, n=1), version=0)
    mine = np.concatenate([t.logprob[t.sampled] for t in found])
    assert np.std(mine) > 0.1  # a model for which tokens differ
    np.testing.assert_allclose(mine, scored(cfg, mesh, values, found, 0.7), atol=1e-5)


LATENT = "deepseek3-grouped"


@pytest.mark.parametrize(
    "name, targets",
    [(NAME, ("q_proj", "down_proj")), pytest.param(LATENT, ("q_b_proj", "kv_b_proj"), marks=pytest.mark.slow)],
)
def test_a_policy_with_adapters_samples_as_it_is_scored(name, targets):
    cfg, mesh, values = model_of(name)
    how = lora.Lora(rank=2, alpha=8.0, targets=targets)
    entries, rng = lora.adapter_table(cfg, how, head="lm"), np.random.default_rng(2)
    learned = params.tree(entries, lambda entry: jnp.asarray(rng.normal(0, 0.2, entry.shape), jnp.float32))
    adapted = lora.join(learned, lora.Base(values, how.scale))
    sampler = engine_of(cfg, mesh, rows=4)
    sampler.hold(adapted, version=0)
    found = sampler.generate(ask(5), SAMPLING, version=0)
    mine = np.concatenate([t.logprob[t.sampled] for t in found])
    rtol = 1e-7 if name == NAME else 2e-5  # with a cache, queries are multiplied with the merged kernel
    np.testing.assert_allclose(mine, scored(cfg, mesh, adapted, found, 0.8), rtol=rtol, atol=1e-5)
    assert np.abs(mine - scored(cfg, mesh, values, found, 0.8)).max() > 0.1


@pytest.mark.parametrize("sampling", [SAMPLING, greedy(RESPONSE)], ids=["seeded", "greedy"])
def test_eight_devices_sample_what_one_does(made, sampling):
    """The vocabulary of 83 has a row more there, which is no token."""
    sampler, cfg, _ = made(rows=8, mesh_shape=(1, 4, 2))
    assert cfg.padded_vocab_size == 84
    found = responses(sampler.generate(ask(9), sampling, version=7))
    assert found == responses(made()[0].generate(ask(9), sampling, version=7))
    assert max(map(max, found)) < 83


@pytest.mark.parametrize("name", ["qwen2-moe-mixed", pytest.param(LATENT, marks=pytest.mark.slow)])
def test_experts_on_eight_devices_sample_what_they_do_on_one(name):
    found = []
    for mesh_shape in ((1, 1, 1), (1, 4, 2)):
        cfg, mesh, values = model_of(name, mesh_shape)
        sampler = engine_of(cfg, mesh, rows=8)
        sampler.hold(values, version=0)
        found.append(responses(sampler.generate(ask(9), SAMPLING, version=0)))
    assert found[0] == found[1]


def replayed(name, dtype="float32", mesh_shape=(1, 1, 1), tied=0.0):
    """Samples of a mixture with their experts, for the functions above; `tied`: its routers nearly are."""
    cfg, mesh, values = model_of(name, mesh_shape)
    for stack in cfg.stacks:
        if stack.modules.sparse and tied:
            of_layers = params.leaf_at(values, (*stack.path, "experts"))
            of_layers["router"] = of_layers["router"][..., :1] + tied * of_layers["router"]
    sampler = engine_of(cfg, mesh, rows=8, dtype=dtype, experts=True)
    sampler.hold(values, version=0)
    how = dataclasses.replace(SAMPLING, n=4, experts=True, ignore_eos=True)
    return cfg, mesh, values, sampler.generate(ask(8), how, version=0)


@pytest.mark.parametrize("name, mesh_shape", [("qwen2-moe-mixed", (1, 1, 1)), ("olmoe-grouped", (1, 4, 2))])
def test_every_token_that_was_read_has_the_experts_that_the_trainer_would_choose(name, mesh_shape):
    cfg, mesh, values, found = replayed(name, mesh_shape=mesh_shape)
    for t in found:
        assert t.experts.shape == (len(t.tokens), cfg.num_layers, cfg.experts.active)
        assert (t.experts[:-1] >= 0).all() and (t.experts[-1] == -1).all()
        assert (t.experts < cfg.experts.count).all()
    assert len({t.experts[-2].tobytes() for t in found}) > 1
    assert not scored(cfg, mesh, values, found, 0.8, "routing_differs").any()


def test_with_replay_ties_of_the_router_leave_only_the_rounding_of_bfloat16():
    cfg, mesh, values, found = replayed("olmoe-grouped", "bfloat16", tied=1e-3)
    differs = scored(cfg, mesh, values, found, 0.8, "routing_differs")
    assert 0.05 < differs.mean() < 0.8
    theirs = np.concatenate([t.logprob[t.sampled] for t in found])
    alone = scored(cfg, mesh, values, [dataclasses.replace(t, experts=None) for t in found], 0.8)
    mismatch, without = (np.abs(theirs - x).mean() for x in (scored(cfg, mesh, values, found, 0.8), alone))
    assert mismatch < without / 5


@pytest.mark.parametrize(
    "cut, mesh_shape",
    [
        (dict(top_p=0.7), (1, 1, 1)),
        pytest.param(dict(top_k=20), (1, 4, 2), marks=pytest.mark.slow),
        pytest.param(dict(min_p=0.1), (1, 1, 1), marks=pytest.mark.slow),
        (dict(top_p=0.7, top_k=20, min_p=0.1), (1, 4, 2)),
    ],
    ids=str,
)
def test_over_the_kept_tokens_the_trainer_scores_as_the_engine_sampled(cut, mesh_shape):
    cfg, mesh, values = model_of(NAME, mesh_shape)
    sampler = engine_of(cfg, mesh, rows=8, cut=True, kept=83)
    sampler.hold(values, version=0)
    how = dataclasses.replace(SAMPLING, n=4, kept=83, **cut)
    found = sampler.generate(ask(8), how, version=0)
    theirs = np.concatenate([t.logprob[t.sampled] for t in found])
    sizes = np.concatenate([(t.kept != -1).sum(1)[t.sampled] for t in found])
    assert sizes.max() > 1 and (sizes == 20).all() if cut == dict(top_k=20) else len(set(sizes)) > 3
    np.testing.assert_allclose(scored(cfg, mesh, values, found, 0.8), theirs, atol=2e-4)
    alone = scored(cfg, mesh, values, [dataclasses.replace(t, kept=None) for t in found], 0.8)
    assert (theirs - alone).mean() > 0.05
    plain = sampler.generate(ask(8), dataclasses.replace(SAMPLING, n=4, kept=83), version=0)
    assert all((t.kept == -1).all() for t in plain), "nothing was removed"
    np.testing.assert_array_equal(found[0].kept[~found[0].sampled], -1)


def test_more_kept_tokens_than_are_returned_are_marked():
    cfg, mesh, values = model_of(NAME)
    found = {}
    for most in (5, 83):
        sampler = engine_of(cfg, mesh, rows=8, cut=True, kept=most)
        sampler.hold(values, version=0)
        found[most] = sampler.generate(ask(8), dataclasses.replace(SAMPLING, top_p=0.8, kept=most), version=0)
    for few, many in zip(found[5], found[83], strict=True):
        np.testing.assert_array_equal(few.tokens, many.tokens)
        size = (many.kept != -1).sum(1)
        np.testing.assert_array_equal(few.kept[:, 0] == OVERFLOW, size > 5)
        assert (few.kept[size > 5, 1:] == -1).all()
        here = size <= 5
        np.testing.assert_array_equal(few.kept[here], many.kept[here, : few.kept.shape[1]])
    assert {bool((t.kept[:, 0] == OVERFLOW).any()) for t in found[5]} == {True}


def test_a_token_outside_of_its_kept_tokens_is_an_error():
    kept = [np.array([3, 8], np.int32), np.array([], np.int32), np.array([OVERFLOW], np.int32)]
    require_kept([8, 5, 6], kept, 2, "engine X")
    with pytest.raises(RolloutError, match=r"engine X sampled token 9, which is not among its 2 kept tokens \[3, 8\]"):
        require_kept([9, 5, 6], kept, 2, "engine X")
    with pytest.raises(RolloutError, match="the kept tokens of 3 samples in place of 2"):
        require_kept([8, 5], kept, 2, "engine X")
    with pytest.raises(RolloutError, match="returned 2 kept tokens of a sample, and 1 were requested"):
        require_kept([8, 5, 6], kept, 1, "engine X")


def test_rows_and_parameters_lie_in_their_shards(made):
    sampler, _, values = made(rows=8, mesh_shape=(1, 4, 2))
    slots = sampler._programs.empty()
    assert {x.sharding.shard_shape(x.shape)[0] for x in jax.tree.leaves(slots) if x.ndim} == {2}
    assert slots.cache[0].k.sharding.shard_shape(slots.cache[0].k.shape)[1] == 1  # of two heads
    split = sampler._programs.prepare(values)
    for layer in split["layers"]:
        up = layer["params"]["mlp"]["up"]["kernel"]
        assert up.addressable_shards[0].data.size * 8 == up.size


def test_no_later_call_compiles(made):
    cfg, mesh, values = model_of(NAME, (1, 4, 2))
    sampler = engine_of(cfg, mesh, rows=8, cut=True)
    sampler.hold(values, version=7)
    other = jax.device_put(jax.device_get(values), jax.tree.map(lambda x: x.sharding, values))
    with compilations() as seen:
        sampler.hold(other, version=7)
        sampler.generate(ask(30, seed=1), dataclasses.replace(SAMPLING, temperature=1.3, n=3, max_tokens=4), version=7)
        sampler.generate(ask(2, seed=2), greedy(1), version=7)
        cut = dataclasses.replace(SAMPLING, top_p=0.9, top_k=7, min_p=0.01, stop=("7 1", "5"), ignore_eos=True)
        sampler.generate(ask(12), cut, version=7)
    assert not seen


def test_the_cache_grows_with_its_rows(monkeypatch):
    """From 10 slots to 20: only where a row needs them, with rows that come later, and nothing is compiled."""
    monkeypatch.setattr(inprocess, "_FEWEST_SLOTS", 10)
    monkeypatch.setattr(inprocess, "TURNS", 3)
    cfg, mesh, values = model_of(NAME)
    sampler = engine_of(cfg, mesh, rows=4)
    assert sampler.settings.slot_counts == [10, 20]
    sampler.hold(values, version=7)
    grown, grow = [], inprocess._grow
    monkeypatch.setattr(inprocess, "_grow", lambda *args: grown.append(args[-1]) or grow(*args))
    short = dataclasses.replace(ask(1)[0], ids=ask(1)[0].ids[:2])
    alone, together = [short], [short, *ask(9)]
    for prompts, max_tokens, sizes in ((alone, 3, []), (alone, 9, []), (alone, 12, [20]), (together, 12, [20])):
        sampling = dataclasses.replace(SAMPLING, max_tokens=max_tokens)
        with compilations() as seen:
            found = sampler.generate(prompts, sampling, version=7)
        assert responses(found) == by_a_loop(cfg, values, prompts, sampling)
        assert grown == sizes and not seen
        grown.clear()


def test_long_prompts_have_a_few_shapes():
    cfg, mesh, _ = model_of(NAME)
    rows = sharding.whole_rows_sharding(mesh)

    def shapes(longest, rows_at_once, multiple=1):
        return InprocessSettings(
            cfg, rows_at_once, multiple, longest, longest + 10, "float32", rows, rows, False
        ).prompt_shapes

    assert shapes(1024, 256) == [(128, 32), (64, 64), (32, 128), (16, 256), (8, 512), (4, 1024)]
    assert shapes(100, 24, 8) == [(24, 50), (24, 100)]
    assert shapes(1, 4) == [(4, 1)] and shapes(9000, 16, 4)[-1] == (4, 9000)


def test_edges(made):
    sampler, cfg, values = made()
    assert sampler.generate([], SAMPLING, version=7) == []
    many = dataclasses.replace(SAMPLING, n=7, max_tokens=1)  # more samples of a prompt than rows, of one token
    found = sampler.generate(ask(2), many, version=7)
    assert responses(found) == by_a_loop(cfg, values, ask(2), many)
    assert {len(r) for r in responses(found)} == {1}
    for prompt, tokens in ((0, 1), (PROMPT + 1, 1), (PROMPT, RESPONSE + 1)):
        ids = np.zeros(prompt, np.int32)
        with pytest.raises(UserError, match=f"prompt long: {prompt} tokens must be 1 to .*max_tokens={tokens}"):
            sampler.generate([Prompt("long", "", "", ids, "", {})], greedy(tokens), version=7)
    with pytest.raises(UserError, match="max_tokens=0"):
        sampler.generate(ask(1), greedy(0), version=7)


def test_only_the_version_that_is_held_is_sampled_from(made):
    sampler, _, values = made()
    sampler.hold(values, version=1)
    with pytest.raises(RolloutError, match="the engine has version 1"):
        sampler.generate(ask(1), greedy(2), version=2)
    first = responses(sampler.generate(ask(3), SAMPLING, version=1))
    other = jax.tree.map(lambda x: x * 0.5, values)
    sampler.hold(other, version=2)
    assert responses(sampler.generate(ask(3), SAMPLING, version=2)) != first
    jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)(other)
    with pytest.raises(RolloutError, match="version 2 of the weights is gone"):
        sampler.generate(ask(1), greedy(2), version=2)
    sampler.hold(jax.tree.map(lambda x: x * np.float32("nan"), values), version=3)
    with pytest.raises(RolloutError, match="version 3 give no finite numbers"):
        sampler.generate(ask(1), greedy(2), version=3)
    with pytest.raises(RolloutError, match="give no finite numbers"):  # of one token
        batcher, logprob = sampler._batcher(sampler._programs.prepare(values)), np.array([-1.0, np.nan])
        batcher._make_answer(np.ones(2, int), logprob, "stop", None, None)
    sampler.close()
    sampler.close()
    with pytest.raises(RolloutError, match="version 3 of the weights was requested, but the engine has none"):
        sampler.generate(ask(1), greedy(2), version=3)
    sampler.hold(values, version=7)


EXPERTS = dict(
    model_type="qwen2_moe", architectures=["Qwen2MoeForCausalLM"], num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=16, shared_expert_intermediate_size=8, norm_topk_prob=True,
)  # fmt: skip


LATENTS = dict(
    model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], n_routed_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=16, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=0, q_lora_rank=12,
    kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=12, head_dim=None, num_key_value_heads=None,
    tie_word_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize(
    "mesh, own",
    [
        ((8, 1, 1, 1), {}),
        pytest.param((2, 2, 2, 1), EXPERTS, marks=pytest.mark.slow),
        pytest.param((1, 2, 2, 2), {}, marks=pytest.mark.slow),
        pytest.param((2, 2, 2, 1), LATENTS, marks=pytest.mark.slow),
    ],
)
def test_a_training_samples_from_what_it_learned(small_run, engine, mesh, own):
    file = pathlib.Path(small_run.model.path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    small_run.rollout.name, small_run.rollout.logp_tolerance = "inprocess", 1e-4  # which train.agree holds it to
    small_run.rollout.temperature, small_run.actor.use_kl_loss, small_run.actor.ppo_mini_batch_size = 0.6, True, 8
    small_run.actor.lr, small_run.rollout.n, small_run.critic.value_head_std = 1e-2, 2, 0.2
    small_run.mesh.data, small_run.mesh.fsdp, small_run.mesh.tensor, small_run.mesh.sequence = mesh
    train.train(small_run)
    assert not engine.asked  # the other engine was not there
    run = pathlib.Path(small_run.trainer.run_dir)
    lines = read_lines(run / "metrics.jsonl")
    assert [m["step"] for m in lines] == [0, 1, 2]
    assert all(m["rollout/logp_gap_max"] < 1e-4 for m in lines[1:])
    # one temperature for all: before the first update old, new and reference are the same, and the ratio is 1
    assert all(abs(lines[1][name]) < 1e-5 for name in ("actor/ppo_kl", "actor/kl_loss"))
    assert abs(lines[1]["actor/ratio_mean"] - 1) < 1e-5 and lines[2]["actor/kl_loss"] > 1e-4
    texts = [[row["response"] for row in read_lines(run / f"samples/step_{i}.jsonl")] for i in (1, 2)]
    assert len(texts[0]) == 8 and texts[0] != texts[1]


def test_the_row_of_a_caller_that_has_gone_is_free(made, monkeypatch):
    """Of ten requests whose callers go, two are in rows and eight wait; a later one is answered without theirs."""
    monkeypatch.setattr(inprocess, "TURNS", 2)
    cfg, mesh, values = model_of(NAME, (1, 1, 1))
    sampler = engine_of(cfg, mesh, 2)
    sampler.hold(values, version=7)
    sampling = dataclasses.replace(greedy(RESPONSE), ignore_eos=True)
    live = []

    async def ask_all():
        batcher = sampler._batcher(sampler._programs.prepare(values))
        advance = batcher.programs.advance

        def counted(model, slots, *how):
            live.append(int((np.asarray(slots.last) < np.asarray(slots.until)).sum()))
            return advance(model, slots, *how)

        batcher.programs = dataclasses.replace(batcher.programs, advance=counted)
        answering = asyncio.ensure_future(batcher.answer_all())
        gone = [asyncio.ensure_future(batcher.ask([1, 2], sampling=sampling, seed=i, near=0)) for i in range(10)]
        while len(live) < 2:
            await asyncio.sleep(0.001)
        for task in gone:
            task.cancel()
        answer = await batcher.ask([4, 5, 6], sampling=sampling, seed=0, near=0)
        answering.cancel()
        return answer

    answer = asyncio.run(ask_all())
    assert len(answer.tokens) == RESPONSE
    assert live[:2] == [2, 2] and live[-RESPONSE // 2 :] == [1] * (RESPONSE // 2) and len(live) <= 4 + RESPONSE // 2


@pytest.mark.parametrize("room, rows", [(100, 16), (5, 5), (5.999, 5)])
def test_rows_in_progress_are_as_many_as_the_cache_has_room_for(small_run, room, rows):
    """In float32, as a CPU has it."""
    r = small_run.rollout
    r.dtype = "bfloat16"
    r.max_num_seqs, small_run.data.train_batch_size, mesh = 16, 32, sharding.mesh_of_shape((1, 1, 1))
    cfg = inprocess_settings(typed(small_run), mesh).cfg
    row = cache.cache_row_bytes(cfg, length=typed(small_run).data.longest_row, dtype="float32")
    r.kv_cache_memory_bytes = int(room * row)
    assert inprocess_settings(typed(small_run), mesh).rows == rows


@pytest.mark.parametrize("batch, rows", [(1, 4), (4, 4), (5, 8), (12, 12), (30, 16)])
def test_rows_are_a_steps_samples_rounded_up_to_the_devices_that_share_them(small_run, batch, rows):
    r, small_run.data.train_batch_size = small_run.rollout, batch
    r.n, r.max_num_seqs, r.kv_cache_memory_bytes = 1, 16, 2**30
    found = inprocess_settings(typed(small_run), sharding.mesh_of_shape((2, 2, 1)))
    assert (found.rows, found.row_multiple) == (rows, 4)


@pytest.mark.parametrize("turns, longest", [(False, PROMPT), (True, PROMPT + RESPONSE - 1)])
def test_a_prefill_is_of_a_prompt_or_in_conversations_of_all_but_the_last_token(small_run, turns, longest):
    small_run.data.max_prompt_length, small_run.data.max_response_length = PROMPT, RESPONSE
    if turns:
        small_run.rollout.multi_turn.enable = True
        small_run.rollout.multi_turn.environment = f"{__file__}:Environment"
    made = inprocess_settings(typed(small_run), sharding.mesh_of_shape((1, 1, 1)))
    assert made.max_prompt_length == longest


def test_while_samples_wait_the_device_returns_when_an_eighth_of_its_rows_is_free(made):
    cfg, mesh, values = model_of(NAME, (1, 1, 1))
    sampler = engine_of(cfg, mesh, 16)
    sampler.hold(values, version=7)
    enough = []

    async def ask_all():
        batcher = sampler._batcher(sampler._programs.prepare(values))
        advance = batcher.programs.advance

        def counted(model, slots, choice, free, **more):
            enough.append(int(free))
            return advance(model, slots, choice, free, **more)

        batcher.programs = dataclasses.replace(batcher.programs, advance=counted)
        answering = asyncio.ensure_future(batcher.answer_all())
        asked = [batcher.ask([1, 2], sampling=greedy(4), seed=i, near=0) for i in range(24)]
        await asyncio.gather(*asked)
        answering.cancel()

    asyncio.run(ask_all())
    assert enough[0] == 2 and enough[-1] == 16  # rows: some wait; none
