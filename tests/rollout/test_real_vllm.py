"""A real vLLM on tiny random models: it samples from what was published, and nothing of it is left behind."""

import asyncio
import dataclasses
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jppo.errors import UserError
from jppo.models import hf
from jppo.plugins.carriers import buckets
from jppo.rollout.protocol import RolloutError, greedy, run
from jppo.rollout.publish import Repeatable
from jppo.rollout.vllm import arguments, publish
from jppo.rollout.vllm.client import start_vllm
from jppo.rollout.vllm.publish import Buffers
from jppo.types import OVERFLOW, Prompt
from tests.rollout import nobody
from tests.rollout.test_publish_changes import published_share

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup"),
]

VOCAB = 96


@pytest.fixture(scope="session")
def settings(settings):
    return lambda **changes: settings(request_timeout_s=60.0, health_timeout_s=5.0, max_restarts=1, **changes)


GREEDY = greedy(12)
SAMPLING = dataclasses.replace(GREEDY, temperature=0.7, n=2, seed=11)
RNG = np.random.default_rng(0)
# vLLM on a CPU caches whole blocks of 128 tokens: longer prompts show a stale prefix cache
PROMPTS = [Prompt(str(i), "", "", RNG.integers(3, VOCAB, 300).astype(np.int32), "", {}) for i in range(4)]


OWN = {  # of kinds of model
    "experts": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, head_dim=32),
    "latent": dict(
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=1, n_group=4,
        topk_group=2, first_k_dense_replace=1, q_lora_rank=40, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=32, v_head_dim=32, num_nextn_predict_layers=0, scoring_func="sigmoid", topk_method="noaux_tc",
    ),
    "gpt-oss": dict(
        num_local_experts=4, num_experts_per_tok=2, head_dim=32,
        rope_parameters=dict(
            rope_type="yarn", factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False, rope_theta=150000.0,
            original_max_position_embeddings=64,
        ),
    ),
}  # fmt: skip


def make_model(folder: pathlib.Path, kind: str):
    """A random model of that kind with heads of 32 as an HF folder without weights, tokenizer included."""
    import tokenizers
    import transformers

    name = {"experts": "Qwen3Moe", "latent": "DeepseekV3", "gpt-oss": "GptOss"}.get(kind, "Qwen2")
    make, more = getattr(transformers, f"{name}Config"), OWN.get(kind, {})
    config = make(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2 if kind == "latent" else 1,
        max_position_embeddings=512,
        tie_word_embeddings=kind == "tied",
        eos_token_id=2,
        initializer_range=0.15,
        architectures=[f"{name}ForCausalLM"],
        **more,
    )
    config.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCAB)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    plain.decoder = tokenizers.decoders.Fuse()  # no spaces between words
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="w2").save_pretrained(folder)
    return config


def random_weights(config, seed: int):
    """Another random model of that shape, and its tensors as in the files."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(0.1 * torch.randn_like(tensor))  # biases and norms are not 0 and 1
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    tensors = revert_weight_conversion(model, {k: x for k, x in model.state_dict().items() if k not in tied})
    return model, {name: p.detach().contiguous().numpy() for name, p in tensors.items()}


def logps(model, trajectory, temperature: float) -> np.ndarray:
    """transformers' log-probs of the sampled tokens."""
    import torch

    tokens = torch.tensor(trajectory.tokens[None].astype(np.int64))
    with torch.no_grad():
        logp = torch.log_softmax(model(tokens).logits[0, :-1] / temperature, -1)
    return logp.gather(-1, tokens[0, 1:, None])[:, 0].numpy()[trajectory.sampled[1:]]


def gap(model, trajectories, temperature: float = SAMPLING.temperature) -> float:
    """The largest difference to transformers."""
    return max(float(np.abs(logps(model, t, temperature) - t.logprob[t.sampled]).max()) for t in trajectories)


def same(a, b) -> bool:
    """Equal to the bit."""
    return all(
        np.array_equal(x.tokens, y.tokens) and np.array_equal(x.logprob, y.logprob) for x, y in zip(a, b, strict=True)
    )


def session_of(leader: int) -> list[int]:
    """The processes of a session that are alive."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_for_none(leader: int, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while left := session_of(leader):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)


def chosen(model, t) -> np.ndarray:
    """The experts that transformers' routers choose for all tokens but the last, [n - 1, L, active] in order."""
    import torch

    with torch.no_grad():
        logits = model(torch.from_numpy(t.tokens[None].astype(np.int64)), output_router_logits=True).router_logits
    return np.stack([np.sort(x.topk(2, -1).indices.numpy())[:-1] for x in logits], axis=1)


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("untied", "experts", "latent", "gpt-oss")]


@pytest.fixture(scope="module", params=["tied", *SLOW])
def served(request, settings, tmp_path_factory):
    """A server, its sampler, and its model's config; version 1 is published, by a file where nothing is tied."""
    folder = tmp_path_factory.mktemp(request.param)
    config = make_model(folder / "model", request.param)
    latent = hf.read_config(folder / "model")[1].latent_sizes
    counts, options = pytest.MonkeyPatch(), arguments.vllm_options  # a test reads the server's count of tokens
    counts.setattr(arguments, "vllm_options", lambda *a: [one for one in options(*a) if one != "--disable-log-stats"])
    engine = start_vllm(
        str(folder / "model"),
        str(folder / "run"),
        settings=settings(
            max_model_len=384,
            max_num_seqs=64,
            start_timeout_s=180.0,
            publish_via="file" if request.param == "untied" else "tcp",
            latent=latent,
            experts=(2, 2, 4) if request.param == "experts" else None,
            mask_replay=True,
            publish_dir="" if request.param == "tied" else str(folder),
        ),
        urls=[],
    )
    try:
        sampler = engine.ready(eos_token_ids=[2], decode=lambda ids: " ".join(map(str, ids)))
        model, tensors = random_weights(config, 1)
        with pytest.raises(RolloutError, match="missing"):  # the first publish must be whole too
            sampler.load(list(tensors.items())[:-1], version=1)
        sampler.load(tensors.items(), version=1)
        yield sampler, config, model, engine
    finally:
        counts.undo()
        engine.close()


def test_generated_logprobs_are_those_of_the_published_weights(served):
    sampler, _, model, _ = served
    trajectories = sampler.generate(PROMPTS, SAMPLING, version=1)
    assert gap(model, trajectories) < 1e-3
    assert [t.uid for t in trajectories] == ["0", "0", "1", "1", "2", "2", "3", "3"]
    for prompt, t in zip(np.repeat(PROMPTS, 2), trajectories, strict=True):
        assert np.array_equal(t.tokens[:300], prompt.ids) and not t.sampled[:300].any()
        assert t.sampled[300:].all() and (t.version[300:] == 1).all()
        ended = t.tokens[-1] == 2
        assert (t.finish == "stop") == ended and (ended or len(t.tokens) == 312)
        assert 2 not in t.tokens[300:-1]


def test_the_experts_of_every_token_are_returned_from_the_cache_too(served):
    sampler, config, model, _ = served
    if config.model_type != "qwen3_moe":
        pytest.skip("a dense model")
    for _ in range(2):  # the second time, prompts are in the prefix cache
        for t in sampler.generate(PROMPTS, dataclasses.replace(SAMPLING, experts=True), version=1):
            np.testing.assert_array_equal(np.sort(t.experts[:-1]), chosen(model, t))


@pytest.mark.parametrize("cut", [dict(top_p=0.7), dict(top_k=20), dict(min_p=0.1), dict(top_p=0.9, top_k=20)], ids=str)
def test_log_probs_are_over_the_kept_tokens(served, cut):
    """transformers' softmax over the returned ids alone; and where nothing is cut, or too much is left, none are."""
    import torch

    sampler, _, model, _ = served
    how = dataclasses.replace(SAMPLING, kept=VOCAB, **cut)
    found, few = (sampler.generate(PROMPTS, one, version=1) for one in (how, dataclasses.replace(how, kept=3)))
    for t, cut_short in zip(found, few, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(t.tokens[None].astype(np.int64))).logits[0, :-1].numpy() / how.temperature
        for at in np.flatnonzero(t.sampled):
            ids = t.kept[at][t.kept[at] >= 0]
            left = logits[at - 1][ids]
            expected = logits[at - 1][t.tokens[at]] - np.log(np.exp(left - left.max()).sum()) - left.max()
            assert t.logprob[at] == pytest.approx(expected, abs=1e-3)
            assert left.min() >= np.sort(logits[at - 1])[-len(ids)] - 1e-4, "the likeliest are kept"
            assert (cut_short.kept[at, 0] == OVERFLOW) == (len(ids) > 3)
    assert len({(row != -1).sum() for t in found for row in t.kept[t.sampled]}) > 1 or cut == dict(top_k=20)
    [plain] = sampler.generate(PROMPTS[:1], dataclasses.replace(SAMPLING, n=1, kept=20), version=1)
    assert (plain.kept == -1).all()
    assert sampler.generate(PROMPTS[:1], GREEDY, version=1)[0].kept is None


def test_an_end_token_is_kept_and_ends_the_response(served):
    sampler, _, _, _ = served
    many = dataclasses.replace(GREEDY, temperature=2.0, n=64, max_tokens=40, seed=1)
    ended = [t for t in sampler.generate(PROMPTS[:1], many, version=1) if t.finish == "stop"]
    assert ended
    assert all(t.tokens[-1] == 2 and t.sampled[-1] for t in ended)


def test_greedy_takes_the_likeliest_token(served):
    import torch

    sampler, _, model, _ = served
    for t in sampler.generate(PROMPTS, GREEDY, version=1):
        with torch.no_grad():
            logits = model(torch.tensor(t.tokens[None].astype(np.int64))).logits[0, 299:-1]
        assert logits.argmax(-1).tolist() == t.tokens[300:].tolist()


def test_a_seed_gives_the_same_samples_whatever_is_beside_it(served):
    sampler, _, _, _ = served
    first = sampler.generate(PROMPTS, SAMPLING, version=1)
    assert same(sampler.generate(PROMPTS, SAMPLING, version=1), first)
    assert same(sampler.generate(PROMPTS[:2], SAMPLING, version=1), first[:4])
    other = sampler.generate(PROMPTS, dataclasses.replace(SAMPLING, seed=12), version=1)
    assert not same(other, first)
    assert not same(first[::2], first[1::2])  # two samples of one prompt


def left(logits, how) -> np.ndarray:
    """The distribution that is drawn from, in the order temperature, min_p, top_k, top_p; in float64."""
    p = np.exp((z := logits.astype(np.float64) / how.temperature) - z.max())
    p[p < how.min_p] = 0.0
    order = np.argsort(-p, kind="stable")
    p[order[how.top_k :]] *= how.top_k < 1
    before = np.cumsum(p[order] / p.sum()) - p[order] / p.sum()
    p[order[before >= how.top_p]] = 0.0
    return p / p.sum()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.01},
        {"temperature": 2.0},
        {"top_p": 0.6},
        {"top_k": 3},
        {"min_p": 0.2},
        {"temperature": 1.6, "top_p": 0.8, "top_k": 12, "min_p": 0.05},
    ],
)
def test_log_probs_are_those_of_the_distribution_that_sampled(served, changes):
    import torch

    sampler, _, model, _ = served
    how = dataclasses.replace(SAMPLING, n=8, ignore_eos=True, **changes)
    found = sampler.generate(PROMPTS, how, version=1)
    assert {(int(t.sampled.sum()), t.finish) for t in found} == {(12, "length")}  # end tokens were ignored
    cut = rarest = 0.0
    for t in found:
        with torch.no_grad():
            logits = model(torch.tensor(t.tokens[None].astype(np.int64))).logits[0].numpy()
        for at in np.flatnonzero(t.sampled):
            p = left(logits[at - 1], how)
            np.testing.assert_allclose(t.logprob[at], np.log(p[t.tokens[at]]), atol=1e-3 / how.temperature)
            cut, rarest = max(cut, float(np.mean(p == 0))), min(rarest, float(t.logprob[at]))
    assert how.temperature == 0.01 or (rarest < -0.5 and (cut > 0.3) == any(n != "temperature" for n in changes))


def test_stop_texts_end_a_response_and_stay_in_it(served):
    """With all else that can be asked for: the same again, and the first tokens of what goes on without them."""
    sampler, _, _, _ = served
    free = dataclasses.replace(SAMPLING, n=24, top_p=0.9, top_k=40, min_p=0.01, ignore_eos=True)
    whole = sampler.generate(PROMPTS, free, version=1)
    begun = (t.tokens[t.sampled][:2].tolist() for t in whole)
    one = next(i for i, j in begun if 2 not in (i, j) and i % 10 != 5 and "7" not in (str(i)[0], str(j)[0]))
    stop = ("w7", "5w1", f"w{one}w")  # a word's beginning, two words' middle, and a word with the next one's beginning
    how = dataclasses.replace(free, stop=stop)
    found = sampler.generate(PROMPTS, how, version=1)
    assert same(sampler.generate(PROMPTS, how, version=1), found)
    ended = set()
    for t, w in zip(found, whole, strict=True):
        words = ["" if i == 2 else f"w{i}" for i in w.tokens[w.sampled]]  # 2 is special, which no text shows
        texts = ["".join(words[: n + 1]) for n in range(12)]
        first = next((n + 1 for n, text in enumerate(texts) if any(s in text for s in stop)), None)
        assert np.array_equal(t.tokens, w.tokens[: len(t.tokens)])
        assert int(t.sampled.sum()) == (first or 12) and t.finish == ("stop" if first else "length")
        np.testing.assert_allclose(t.logprob, w.logprob[: len(t.logprob)], atol=1e-5)
        ended.add(next((s for s in stop if first and s in texts[first - 1]), None))
    assert ended == {None, *stop}
    beside = dataclasses.replace(how, ignore_eos=False, n=64, max_tokens=40)
    last = {int(t.tokens[-1]) == 2 for t in sampler.generate(PROMPTS, beside, version=1) if t.finish == "stop"}
    assert last == {True, False}  # end tokens and texts, side by side


def test_a_new_publish_leaves_no_stale_cache_and_no_stale_head(served):
    sampler, config, old, _ = served
    sampler.generate(PROMPTS, SAMPLING, version=1)  # fills the prefix cache
    new, tensors = random_weights(config, 2)
    sampler.load(tensors.items(), version=2)
    trajectories = sampler.generate(PROMPTS, SAMPLING, version=2)
    assert gap(new, trajectories) < 1e-3
    assert gap(old, trajectories) > 0.1  # the test can tell them apart
    with pytest.raises(RolloutError, match="version 1 of the weights was requested, but the engine has version 2"):
        sampler.generate(PROMPTS[:1], SAMPLING, version=1)
    sampler.load(random_weights(config, 1)[1].items(), version=1)


class CutBuffers(Buffers):
    """Loses the second half of what is written."""

    def write(self, tensors):
        parcel = super().write(tensors)
        os.truncate(parcel.path, os.path.getsize(parcel.path) // 2)
        return parcel


def test_a_refused_publish_names_the_tensor_and_leaves_the_old_weights(served):
    sampler, config, _, _ = served
    before = sampler.generate(PROMPTS, SAMPLING, version=1)
    tensors = random_weights(config, 3)[1]
    name = "model.layers.1.self_attn.o_proj.weight"
    with pytest.raises(RolloutError, match=f"{name} missing"):
        sampler.load([item for item in tensors.items() if item[0] != name], version=2)
    with pytest.raises(RolloutError, match=f"{name} has shape"):
        sampler.load((tensors | {name: tensors[name][:-1]}).items(), version=2)
    cut = CutBuffers("")
    with pytest.raises(RolloutError, match=r"truncated: model\.\S+ ends at byte"):
        sampler.weights.deliver(publish.FilePublisher(cut).whole(tensors.items(), 2))
    cut.close()
    assert same(sampler.generate(PROMPTS, SAMPLING, version=1), before)


def test_attaching_by_url(served, settings, monkeypatch):
    sampler, config, model, _ = served
    url = sampler.members[0].endpoint.url
    monkeypatch.setenv("JPPO_SERVER_TOKEN", sampler.members[0].server.key.token)

    def attach(*more):
        return start_vllm("model", "run", settings=settings(), urls=[url, *more]).ready(eos_token_ids=[2], decode=str)

    attached = attach()
    with pytest.raises(UserError, match=f"{url} and .*localhost.* are addresses of one server"):
        attach(url.replace("127.0.0.1", "localhost"))
    attached.load(random_weights(config, 1)[1].items(), version=1)
    assert gap(model, attached.generate(PROMPTS[:1], SAMPLING, version=1)) < 1e-3
    attached.close()  # ends nothing that it did not start
    sampler.members[0].endpoint.post("/pause?mode=wait")
    with pytest.raises(Exception, match=r"is paused.*/resume"):
        attach()
    sampler.members[0].endpoint.post("/resume")
    # an extension that is not there is an error, not the end of the server
    with pytest.raises(RolloutError, match="500"):
        publish.call_workers(sampler.members[0].endpoint, "jppo_no_such_method")
    assert len(sampler.generate(PROMPTS[:1], SAMPLING, version=1)) == 2


def test_a_server_on_another_machine_pulls_its_weights(served, settings, monkeypatch):
    first, config, old, _ = served
    if not config.tie_word_embeddings:
        pytest.skip("this one takes files")
    monkeypatch.setattr(buckets, "BUCKET", 1 << 14)
    monkeypatch.setenv("JPPO_SERVER_TOKEN", first.members[0].server.key.token)
    attached = start_vllm(
        "model", "run", settings=settings(publish_via="tcp"), urls=[first.members[0].endpoint.url],
    ).ready(eos_token_ids=[2], decode=str)  # fmt: skip
    try:
        new, tensors = random_weights(config, 4)
        attached.load(tensors.items(), version=4)
        found = attached.generate(PROMPTS, SAMPLING, version=4)
        assert gap(new, found) < 1e-3 and gap(old, found) > 0.1
        attached.load(random_weights(config, 1)[1].items(), version=1)
        describe = buckets.checksummed

        def describe_and_break(bucket):
            entries, views = describe(bucket)
            return entries, [memoryview(b"broken" + bytes(views[0])[6:]), *views[1:]]

        monkeypatch.setattr(buckets, "checksummed", describe_and_break)
        with pytest.raises(RolloutError, match=r"refused version 5 .* \S+\.weight has a different checksum"):
            attached.load(tensors.items(), version=5)
    finally:
        attached.close()
    assert gap(old, first.generate(PROMPTS, SAMPLING, version=1)) < 1e-3


def test_changes_alone_reach_the_served_model(served, settings, monkeypatch):
    """A fiftieth of every tensor, the tied one too, over and over: the server patches its own copy."""
    first, config, old, _ = served
    if not config.tie_word_embeddings:
        pytest.skip("this one takes files")
    monkeypatch.setenv("JPPO_SERVER_TOKEN", first.members[0].server.key.token)
    attached = start_vllm(
        "model", "run", settings=settings(publish_via="tcp", publish_delta=True),
        urls=[first.members[0].endpoint.url],
    ).ready(eos_token_ids=[2], decode=str)  # fmt: skip
    try:
        model, tensors = random_weights(config, 4)
        attached.load(tensors.items(), version=4)
        assert published_share(attached) == 1
        for version in (5, 6, 7):
            for tensor in tensors.values():  # the model's own memory
                tensor.reshape(-1)[version::50] *= -2
            attached.load(tensors.items(), version=version)
            assert published_share(attached) < 0.04
        found = attached.generate(PROMPTS, SAMPLING, version=7)
        assert gap(model, found) < 1e-3 and gap(random_weights(config, 4)[0], found) > 0.1
        attached.load(random_weights(config, 1)[1].items(), version=1)
    finally:
        attached.close()
    assert gap(old, first.generate(PROMPTS, SAMPLING, version=1)) < 1e-3


def test_another_user_gets_no_route_of_it(served):
    sampler, _, _, _ = served
    member = sampler.members[0]
    routes = [route for route in member.endpoint.get("/openapi.json")["paths"] if "{" not in route]
    assert {"/collective_rpc", "/pause", "/health", "/v1/models"} <= {*routes}
    asked = [(method, route, {}) for method in ("GET", "POST") for route in (*routes, "/metrics", "/docs")]
    assert set(nobody.statuses(member.endpoint.url, asked)) == {401}
    load = [("POST", "/collective_rpc", {"Content-Type": "text/plain", "Origin": "http://evil.example"})]
    assert nobody.statuses(member.endpoint.url, load) == [401]


def test_a_request_whose_caller_has_gone_ends_in_the_server(served):
    """Eight requests are given up after a few of their 360 tokens; the server makes few more."""
    sampler, *_ = served
    fleet = sampler
    (member,) = fleet.members
    how = dataclasses.replace(greedy(360), ignore_eos=True)

    def made() -> float:
        metrics = run(member.endpoint._call("GET", "/metrics")).decode().splitlines()
        return sum(float(line.split()[-1]) for line in metrics if line.startswith("vllm:generation_tokens_total"))

    async def ask_and_go() -> None:
        asked = [asyncio.ensure_future(fleet.ask([5, i], sampling=how, seed=0, near=0)) for i in range(8)]
        while made() == before:
            await asyncio.sleep(0.05)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    before = made()
    fleet._thread.submit(ask_and_go()).result(60)
    time.sleep(1.0)
    some = made()
    time.sleep(2.0)
    assert made() == some < before + 8 * 360 / 2


def test_a_broken_server_is_started_again_and_nothing_is_lost(served):
    """Killed where its embedding is tied, hung where it is not, in the middle of a rollout.

    It ends the server, so it is the last test of `served`.
    """
    sampler, config, _, engine = served
    long = dataclasses.replace(SAMPLING, n=16, max_tokens=80)
    before = sampler.generate(PROMPTS, long, version=1)
    leader = engine.servers[0].pid
    others = [pid for pid in session_of(leader) if pid != leader]
    assert others
    first = threading.Event()
    future = sampler.start(PROMPTS, long, done=lambda *_: first.set())
    assert first.wait(60)
    for pid in others:
        os.kill(pid, signal.SIGKILL if config.tie_word_embeddings else signal.SIGSTOP)
    assert same(future.result(120), before)
    assert sampler.metrics()["rollout/restarts"] == 1
    wait_for_none(leader)
    # a second time is once too often
    leader = engine.servers[0].pid
    for pid in session_of(leader):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(RolloutError, match=r"not restarted: rollout\.max_restarts=1"):
        sampler.generate(PROMPTS, SAMPLING, version=1)
    sampler.close()
    wait_for_none(leader)


@pytest.mark.slow
def test_speculated_samples_have_the_policys_distribution_and_its_log_probs(tmp_path, settings, monkeypatch):
    """Prompts that repeat themselves, so that drafts are accepted; entropies by transformers."""
    import torch

    options = arguments.vllm_options  # the server counts
    quiet = "--disable-log-stats"
    monkeypatch.setattr(arguments, "vllm_options", lambda *a: [one for one in options(*a) if one != quiet])

    config = make_model(tmp_path / "model", "tied")
    ngram = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)
    option = f"--speculative-config '{json.dumps(ngram)}'"
    how = settings(max_model_len=384, max_num_seqs=64, start_timeout_s=180.0, engine_args=option)
    prompts = [Prompt(str(i), "", "", np.tile(RNG.integers(3, 12, 8), 18).astype(np.int32), "", {}) for i in range(3)]
    engine = start_vllm(str(tmp_path / "model"), str(tmp_path / "run"), settings=how, urls=[])
    try:
        sampler = engine.ready(eos_token_ids=[2], decode=str)
        for version in (1, 2):
            model, tensors = random_weights(config, version)
            sampler.load(tensors.items(), version=version)
            for cut in ({}, dict(top_p=0.7), dict(top_k=20)):
                sampling = dataclasses.replace(SAMPLING, n=32, max_tokens=40, ignore_eos=True, seed=version, **cut)
                found, excess, variance = sampler.generate(prompts, sampling, version=version), 0.0, 0.0
                for t in found:
                    with torch.no_grad():
                        logits = model(torch.tensor(t.tokens[None].astype(np.int64))).logits[0].numpy()
                    for at in np.flatnonzero(t.sampled):
                        p = left(logits[at - 1], sampling)
                        assert t.logprob[at] == pytest.approx(np.log(p[t.tokens[at]]), abs=1e-3)
                        assert t.version[at] == version
                        logp = np.log(p[p > 0])
                        mean = (p[p > 0] * logp).sum()
                        excess += np.log(p[t.tokens[at]]) - mean
                        variance += (p[p > 0] * logp**2).sum() - mean**2
                assert abs(excess) < 4 * variance**0.5, cut
        said = run(sampler.members[0].endpoint._call("GET", "/metrics")).decode().splitlines()
        counted = [float(line.split()[-1]) for line in said if "num_accepted_tokens_total" in line and line[0] != "#"]
        assert counted[0] > 200
    finally:
        engine.close()


@pytest.mark.slow
def test_weights_are_quantised_at_every_publish(tmp_path, settings, shared):
    """Log-probs are close to the published model's but not equal; with bfloat16 they are closer."""
    import ml_dtypes
    import torch
    import transformers

    source = str(shared / "models/stories260k-hd32")
    how = settings(
        max_model_len=128, max_num_seqs=64, start_timeout_s=180.0, dtype="bfloat16", quantization="fp8_per_channel"
    )
    torch.manual_seed(0)
    model, other = (transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16) for _ in range(2))
    model, other = model.float().eval(), other.float().eval()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.1 * p.std() * torch.randn_like(p)).copy_(p.bfloat16().float())
    prompts = [Prompt(str(i), "", "", np.array([1, 5 + i], np.int32), "", {}) for i in range(4)]
    engine = start_vllm(source, str(tmp_path / "run"), settings=how, urls=[])
    try:
        sampler = engine.ready(eos_token_ids=[2], decode=str)
        for version in (1, 2):
            tensors = {k: x.numpy() for k, x in model.state_dict().items() if k != "lm_head.weight"}
            sampler.load([(k, x.astype(ml_dtypes.bfloat16)) for k, x in tensors.items()], version=version)
            sampling = dataclasses.replace(SAMPLING, temperature=1.0, n=4, max_tokens=40, ignore_eos=True)
            found = sampler.generate(prompts, sampling, version=version)
            each, far = ([np.abs(logps(m, t, 1.0) - t.logprob[t.sampled]) for t in found] for m in (model, other))
            assert 0.05 < np.concatenate(each).mean() < min(0.375, np.concatenate(far).mean() / 2)
            assert np.quantile(np.concatenate(each), 0.95) < 1.5
            model, other = other, model
    finally:
        engine.close()


@pytest.mark.slow
def test_two_servers_get_a_publish_wholly_or_not_at_all(tmp_path, settings, monkeypatch):
    """One refuses a bucket; one is killed between two; the trainer is killed between two."""
    monkeypatch.setattr(buckets, "BUCKET", 1 << 14)
    config = make_model(tmp_path / "model", "tied")
    models = [random_weights(config, seed) for seed in (1, 2, 3)]
    how = settings(servers=2, max_model_len=384, start_timeout_s=240.0, publish_via="tcp")
    engine = start_vllm(str(tmp_path / "model"), str(tmp_path / "run"), settings=how, urls=[])
    try:
        sampler = engine.ready(eos_token_ids=[2], decode=str)
        sampler.load(models[0][1].items(), version=1)

        def after(count, do, tensors):
            for i, item in enumerate(tensors.items()):
                if i == count:
                    do()
                yield item

        def served_by(model):
            found = sampler.probe(PROMPTS, SAMPLING)
            assert len({t.server for t in found}) == 2
            return gap(model, found) < 1e-3

        second = sampler.members[1]
        bogus = {"update_info": {"version": 2, "entries": [["w", "float32", [1], 0, 4, 0]]}}
        with pytest.raises(RolloutError, match=rf"{second.endpoint.url} refused version 2 .*w not in the served model"):
            sampler.load(after(5, lambda: second.endpoint.post("/update_weights", bogus), models[1][1]), version=2)
        assert served_by(models[0][0])

        def kill():
            for pid in session_of(second.server.pid):
                os.kill(pid, signal.SIGKILL)

        sampler.load(Repeatable(lambda: after(5, kill if sampler.version == 1 else int, models[1][1])), version=2)
        deadline = time.monotonic() + 120
        while not second.up:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert sampler.metrics()["rollout/restarts"] == 1 and served_by(models[1][0])

        told = json.dumps([second.endpoint.url, dataclasses.asdict(how), list(models[2][1])[:3]])
        env = os.environ | {"JPPO_SERVER_TOKEN": second.server.key.token}
        killed = subprocess.run([sys.executable, "-c", KILLED, told], env=env, timeout=120, check=False)
        assert killed.returncode == -signal.SIGKILL and served_by(models[1][0])
        sampler.load(models[2][1].items(), version=3)
        assert served_by(models[2][0])
    finally:
        engine.close()


KILLED = """
import json, os, signal, sys
import numpy as np
from jppo.plugins.carriers import buckets
from jppo.rollout.servers.member import ServerSettings
from jppo.rollout.vllm.client import start_vllm
from jppo.rollout.vllm.publish import call_workers
url, settings, names = json.loads(sys.argv[1])
buckets.BUCKET = 1
settings = ServerSettings(**settings)
engine = start_vllm("model", "run", settings=settings, urls=[url])
sampler = engine.ready(eos_token_ids=[2], decode=str)
def tensors():
    yield names[0], np.zeros((96, 64), np.float32)
    yield names[1], np.zeros((64, 64), np.float32)
    assert "refused" not in str(call_workers(sampler.members[0].endpoint, "jppo_transfer"))
    os.kill(os.getpid(), signal.SIGKILL)
sampler.load(tensors(), version=3)
"""


TRAINER = """
import json, sys, time
from jppo.rollout.vllm.client import start_vllm
from jppo.rollout.servers.member import ServerSettings
model, run, settings, wait = json.loads(sys.argv[1])
settings = ServerSettings(**settings | {"publish_dir": run})
engine = start_vllm(model, run, settings=settings, urls=[])
print(engine.servers[0].pid, flush=True)
if wait:
    engine.ready(eos_token_ids=[2], decode=str)
    print("ready", flush=True)
time.sleep(1000)
"""


# test_train.py kills a trainer whose server is ready.
@pytest.mark.parametrize("ready", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_trainer_that_is_killed_takes_its_server_with_it(tmp_path, settings, ready):
    make_model(tmp_path / "model", "tied")
    (tmp_path / "run").mkdir()
    given = dataclasses.asdict(settings(max_model_len=384, start_timeout_s=180.0))
    argument = json.dumps([str(tmp_path / "model"), str(tmp_path / "run"), given, ready])
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, argument], stdout=subprocess.PIPE, text=True)
    leader = int(trainer.stdout.readline())
    if ready:
        assert trainer.stdout.readline() == "ready\n"
        assert len(session_of(leader)) > 1
    else:
        time.sleep(2.0)  # vLLM is among its imports
    trainer.kill()
    trainer.communicate()
    wait_for_none(leader)
    assert list((tmp_path / "run").glob("jppo-weights-*")) == []
