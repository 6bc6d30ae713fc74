"""The client against fake servers: what it sends, how it reads answers, and how every fault is said."""

import base64
import dataclasses
import io
import json
import pathlib

import numpy as np
import pytest

from jppo.errors import UserError
from jppo.rollout.protocol import RolloutError, greedy, sample_seed
from jppo.rollout.servers.endpoint import Endpoint
from jppo.rollout.vllm import arguments
from jppo.rollout.vllm.arguments import vllm_options
from jppo.rollout.vllm.client import GENERATE, start_vllm
from jppo.rollout.vllm.publish import call_workers
from jppo.types import OVERFLOW, Prompt

SAMPLING = dataclasses.replace(greedy(8), temperature=0.7, n=2, seed=5)
PROMPTS = [Prompt(f"p{i}", "", "", np.array([10 + i, 3, 4], np.int32), "", {}) for i in range(3)]


def limits(timeout_s, restarts):
    return dict(request_timeout_s=timeout_s, health_timeout_s=timeout_s, max_restarts=restarts)


def choice(tokens, logprobs, finish="stop", version="7"):
    content = [{"token_id": t, "logprob": x} for t, x in zip(tokens, logprobs, strict=True)]
    spans = [{"start": 0, "end": len(tokens), "version": version}]
    return {
        "token_ids": tokens,
        "logprobs": {"content": content},
        "finish_reason": finish,
        "weight_versions": spans,
    }


def echo(body):
    """Three tokens: the prompt's first, one that tells the seed, and an end token."""
    tokens = [body["token_ids"][0], body["sampling_params"]["seed"] % 1000, 2]
    return {"choices": [choice(tokens, [-0.5, -1.25, -0.25])]}


@pytest.fixture
def attach(fakes, settings):
    """A maker of samplers over the fake servers."""
    engines = []

    def make(count=2, timeout_s=60.0, talk=None):
        for fake in fakes:
            fake.answers.setdefault(GENERATE, (200, echo))
        engines.append(
            start_vllm(
                "model", "run", settings=settings(**limits(timeout_s, 2)), urls=[fake.url for fake in fakes[:count]],
            )
        )  # fmt: skip
        sampler = engines[-1].ready(eos_token_ids=[2, 9], decode=lambda ids: f"<{ids}>", talk=talk)
        sampler.load([("w", np.zeros(1, np.float32))], version=7)
        return sampler

    yield make
    for engine in engines:
        engine.close()
        engine.close()


def test_trajectories_come_prompt_by_prompt_and_sample_by_sample(attach):
    trajectories = attach().generate(PROMPTS, SAMPLING, version=7)
    assert [t.uid for t in trajectories] == ["p0", "p0", "p1", "p1", "p2", "p2"]
    for k, t in enumerate(trajectories):
        i, j = divmod(k, 2)
        assert t.tokens.tolist() == [10 + i, 3, 4, 10 + i, sample_seed(5, i, j) % 1000, 2]
        assert t.sampled.tolist() == [False, False, False, True, True, True]
        assert t.logprob.tolist() == [0.0, 0.0, 0.0, -0.5, -1.25, -0.25]
        assert t.version.tolist() == [-1, -1, -1, 7, 7, 7]
        assert t.text == f"<{t.tokens[3:].tolist()}>"
        assert (t.finish, t.turns) == ("stop", 1)
        assert (t.tokens.dtype, t.logprob.dtype, t.version.dtype) == (np.int32, np.float32, np.int32)


def test_prompts_are_shared_out_and_every_field_is_sent(attach, fakes):
    attach().generate(PROMPTS, SAMPLING, version=7)
    asked = [[b for b, r in zip(f.bodies, f.asked, strict=True) if r == GENERATE] for f in fakes]
    assert [sorted(b["token_ids"][0] for b in bodies) for bodies in asked] == [[10, 10, 12, 12], [11, 11]]
    sent = asked[1][0]["sampling_params"]
    assert sent.pop("seed") in (sample_seed(5, 1, 0), sample_seed(5, 1, 1))
    assert sent == {
        "n": 1, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": 8, "min_tokens": 0,
        "ignore_eos": True, "stop_token_ids": [2, 9], "stop": [], "include_stop_str_in_output": True,
        "detokenize": False, "skip_special_tokens": True, "spaces_between_special_tokens": True, "logprobs": 0,
    }  # fmt: skip
    assert asked[1][0]["model"] == "policy"


def test_what_ends_a_response_and_what_is_cut_are_sent_as_asked(attach, fakes):
    how = dataclasses.replace(SAMPLING, n=1, top_p=0.9, top_k=5, min_p=0.1, stop=("</a>", "\n,"), ignore_eos=True)
    attach(1).generate(PROMPTS[:1], how, version=7)
    sent = fakes[0].bodies[-1]["sampling_params"]
    assert (sent["top_p"], sent["top_k"], sent["min_p"], sent["stop"]) == (0.9, 5, 0.1, ["</a>", "\n,"])
    # with texts to be found tokens must be decoded; where end tokens are ignored none is among those that stop
    assert (sent["detokenize"], sent["ignore_eos"], sent["stop_token_ids"]) == (True, True, [])


def test_a_probe_asks_every_server_and_no_tool_or_environment(attach, fakes):
    async def talk(*_, **__):
        raise AssertionError("a conversation was begun")

    found = attach(talk=talk).probe(PROMPTS[:1], dataclasses.replace(SAMPLING, n=1))
    assert [t.server for t in found] == [fake.url for fake in fakes]
    assert [t.tokens[:3].tolist() for t in found] == [[10, 3, 4]] * 2


def test_no_prompts_no_trajectories(attach):
    assert attach().generate([], SAMPLING, version=7) == []


def test_a_notebook_with_a_running_loop_may_generate(attach):
    import asyncio

    async def cell():
        return attach().generate(PROMPTS[:1], SAMPLING, version=7)

    assert len(asyncio.run(cell())) == 2


@pytest.mark.parametrize(
    "answer, said",
    [
        (choice([5, 2], [-1.0, -2.0], version="6"), "sampled by the weights 6, not by version 7"),
        (choice([5, 2], [-1.0, -2.0], version="default"), "restarted"),
        (choice([], [], finish="abort"), "did another client pause it"),
        (choice([], []), "0 tokens"),
        (choice([5, 2], [-1.0, -2.0]) | {"token_ids": [5, 3, 2]}, "3 tokens"),
        (choice([5], [float("nan")]), "nan"),
        (choice([999999, 2], [-1.0, -2.0]), "999999 is no token id from 0 to 999"),
        (choice([-5, 2], [-1.0, -2.0]), "-5 is no token id"),
        (choice(["7", 2], [-1.0, -2.0]), "'7' is no token id"),
        (choice([5, 2], [3.5, -2.0]), "3.5 is no log-prob"),
        (choice([5] * 9, [-1.0] * 9, finish="length"), "9 tokens, 9 log-probs and 9 versions, of at most 8 tokens"),
    ],
)
def test_an_answer_that_cannot_be_trained_on(attach, fakes, answer, said):
    sampler = attach(1)
    fakes[0].answers[GENERATE] = (200, {"choices": [answer]})
    with pytest.raises(RolloutError, match=said):
        sampler.generate(PROMPTS[:1], SAMPLING, version=7)


def with_experts(tokens, read, layers=2, first=0):
    """An answer with the experts of `read` tokens, as vLLM sends them: the number of the token, and the layer."""
    file = io.BytesIO()
    at = np.stack(np.broadcast_arrays(first + np.arange(read)[:, None], np.arange(layers)[None]), axis=-1)
    np.save(file, at.astype(np.uint8))
    answer = choice(tokens, [-1.0] * len(tokens), finish="abort" if read == 4 else "stop")
    return answer | {"routed_experts": base64.b64encode(file.getvalue()).decode()}


@pytest.mark.parametrize("empty", [False, True])
def test_the_experts_of_an_answer_in_parts_are_those_of_the_first_that_read_a_token(attach, fakes, empty):
    """`empty`: a second update aborts the rest before its first token."""
    sampler = attach(1)
    held = []

    def answer(body):
        if len(body["token_ids"]) == 3 or (empty and len(held) == 1):
            held.append(body)
            sampler.weights.updates += 1
            return {"choices": [choice([], [], finish="abort") if len(held) == 2 else with_experts([5, 6], 4)]}
        later = with_experts([9], len(body["token_ids"]), first=100)
        return {"choices": [later]}

    fakes[0].answers[GENERATE] = (200, answer)
    [t] = sampler.generate(PROMPTS[:1], dataclasses.replace(SAMPLING, n=1, experts=True), version=7)
    assert t.tokens.tolist() == [10, 3, 4, 5, 6, 9] and t.experts.dtype == np.int16
    assert len(held) == 1 + empty
    np.testing.assert_array_equal(t.experts[:5, 0, 0], [0, 1, 2, 3, 104])
    assert (t.experts[5] == -1).all()


@pytest.mark.parametrize(
    "answer, said",
    [
        (choice([5, 2], [-1.0, -2.0]), "experts of none tokens in place of 4"),
        (with_experts([5, 2], 5), "experts of 5 tokens in place of 4"),
        (choice([5, 2], [-1.0, -2.0]) | {"routed_experts": "AAAA"}, "experts cannot be read"),
    ],
)
def test_an_answer_without_the_experts_of_every_token(attach, fakes, answer, said):
    sampler = attach(1)
    fakes[0].answers[GENERATE] = (200, {"choices": [answer]})
    with pytest.raises(RolloutError, match=said):
        sampler.generate(PROMPTS[:1], dataclasses.replace(SAMPLING, experts=True), version=7)


def test_the_kept_tokens_of_an_answer_in_parts_are_those_of_its_tokens(attach, fakes):
    """No ids: the whole vocabulary; more than were requested: marked."""
    sampler, asked = attach(1), []

    def answer(body):
        asked.append(body["sampling_params"].get("extra_args"))
        first, last = [5, 6], [[6, 7], [], [1, 2, 9]]
        if len(asked) == 1:
            sampler.weights.updates += 1
            return {"choices": [choice(first, [-1.0] * 2, finish="abort") | {"sampling_mask": [[4, 5], [6]]}]}
        return {"choices": [choice([7, 8, 9], [-1.0] * 3) | {"sampling_mask": last}]}

    fakes[0].answers[GENERATE] = (200, answer)
    [t] = sampler.generate(PROMPTS[:1], dataclasses.replace(SAMPLING, n=1, kept=2), version=7)
    assert t.tokens.tolist()[3:] == [5, 6, 7, 8, 9] and asked == [{"kept": 2}] * 2
    rows = [[-1, -1]] * 3 + [[4, 5], [6, -1], [6, 7], [-1, -1], [OVERFLOW, -1]]
    assert t.kept.tolist() == rows and t.kept.dtype == np.int32
    for mask, said in (
        (None, "kept tokens of none samples in place of 3"),
        ([[9]], "kept tokens of 1 samples in place of 3"),
        ([[7], [7], [9]], "sampled token 8, which is not among its 1 kept tokens"),
        ([[7], ["x"], [9]], "'x' is no token id from 0 to 999"),
    ):
        fakes[0].answers[GENERATE] = (200, {"choices": [choice([7, 8, 9], [-1.0] * 3) | {"sampling_mask": mask}]})
        with pytest.raises(RolloutError, match=said):
            attach(1).generate(PROMPTS[:1], dataclasses.replace(SAMPLING, n=1, kept=2), version=7)


@pytest.mark.parametrize(
    "replayed, said, option",
    [
        (["experts"], "returns no experts", "--worker-cls jppo.rollout.vllm.kept.RoutingWorker"),
        (["mask_replay"], "returns no kept tokens", "--worker-cls jppo.rollout.vllm.kept.KeptWorker"),
        (
            ["experts", "mask_replay"],
            "returns no experts",
            "--scheduler-cls jppo.rollout.vllm.kept.KeptRoutingScheduler",
        ),
    ],
)
def test_a_server_that_returns_less_is_refused_for_replay(fakes, settings, replayed, said, option):
    """The server that jppo.serve starts has the option."""
    how = settings(**limits(5.0, 2), **dict.fromkeys(replayed, True))
    assert option in " ".join(vllm_options(how, "cpu"))
    engine = start_vllm("model", "run", settings=how, urls=[fakes[0].url])
    with pytest.raises(UserError, match=said):
        engine.ready(eos_token_ids=[2], decode=str)
    engine.close()


def test_finish_length(attach, fakes):
    fakes[0].answers[GENERATE] = (200, {"choices": [choice([5], [-1.0], finish="length")]})
    assert attach(1).generate(PROMPTS[:1], SAMPLING, version=7)[0].finish == "length"


def test_too_long_for_the_server_is_the_users_fault(attach):
    long = dataclasses.replace(SAMPLING, max_tokens=62)
    with pytest.raises(UserError, match=r"3 tokens and max_tokens=62 must fit .*max_model_len=64"):
        attach().generate(PROMPTS, long, version=7)


def test_a_server_that_fails_again_and_again_ends_the_run_in_one_error(attach, fakes):
    sampler = attach(1)
    fakes[0].answers[GENERATE] = (500, {"error": "engine dead"})
    with pytest.raises(RolloutError, match=r"answered /inference/v1/generate with 500.*engine dead.*max_restarts=2"):
        sampler.generate(PROMPTS, SAMPLING, version=7)


@pytest.mark.parametrize(
    "route, answer, said",
    [
        ("/is_paused", (200, {"is_paused": True}), "is paused.*curl -X POST .*http.*/resume"),
        ("/is_paused", (404, {}), "404.*start it by `JPPO_SERVER_TOKEN=... python -m jppo.serve"),
        ("jppo_info", (500, {}), "500.*python -m jppo.serve"),
        ("/openapi.json", (200, {"paths": {}}), "has no /inference/v1/generate.*python -m jppo.serve"),
    ],
)
def test_a_server_that_is_not_fit_to_attach_to(attach, fakes, route, answer, said):
    fakes[0].answers[route] = answer
    with pytest.raises(UserError, match=said):
        attach(1)


@pytest.mark.parametrize(
    "info, said",
    [({"logprobs_mode": "raw_logprobs"}, "raw_logprobs"), ({"chunked_prefill": True}, "in chunks on a CPU")],
)
def test_a_server_with_the_wrong_settings(attach, fakes, info, said):
    good = json.loads(json.dumps(fakes[0].answers["jppo_info"][1]["results"][0]))
    fakes[0].answers["jppo_info"] = (200, {"results": [good | info]})
    with pytest.raises(UserError, match=said):
        attach(1)


@pytest.mark.parametrize("results", [[], None, {"ok": True}])
def test_a_call_without_a_result_of_a_worker_is_a_fault(fakes, results):
    fakes[0].answers["jppo_info"] = (200, {"results": results})
    with pytest.raises(RolloutError, match="answered jppo_info with"):
        call_workers(Endpoint(fakes[0].url, timeout_s=5.0, explain=str), "jppo_info")


def test_one_server_at_two_addresses_is_refused_in_one_line(fakes, settings):
    for fake, process in zip(fakes, ("a", "b"), strict=True):
        fake.answers["jppo_info"] = (
            200,
            {"results": [fake.answers["jppo_info"][1]["results"][0] | {"process": process}]},
        )
    other = fakes[0].url.replace("127.0.0.1", "localhost")

    def ready(*urls):
        engine = start_vllm("model", "run", settings=settings(**limits(5.0, 2)), urls=urls)
        try:
            return len(engine.ready(eos_token_ids=[2], decode=str).members)
        finally:
            engine.close()

    assert ready(fakes[0].url, fakes[1].url) == 2 and ready(other) == 1
    with pytest.raises(UserError, match=f"^rollout.urls: {fakes[0].url} and {other} are addresses of one server; name"):
        ready(fakes[0].url, fakes[1].url, other)


ROUTES = ("/v1/models", "/openapi.json", "/is_paused", "/weight_info", "jppo_info", "jppo_working", "/health")
ANSWERS = (
    None,
    1,
    "text",
    [],
    {},
    [[]],
    {"data": [{}]},
    {"data": [{"id": 1}]},
    {"data": None},
    {"results": [{}]},
    {"paths": []},
    {"is_paused": "false"},
    {"weight_version": []},
    json.loads("[" * 900 + "]" * 900),
)
INFOS = [(name, x) for name in ("max_model_len", "process", "dtype") for x in (True, -1, 1.5, [], None)]


@pytest.mark.parametrize("route", ROUTES)
def test_a_server_that_answers_with_anything_is_refused_or_asked_in_one_line(fakes, settings, route):
    def outcome():
        engine = start_vllm("model", "run", settings=settings(**limits(5.0, 0)), urls=[fakes[0].url])
        try:
            member = engine.ready(eos_token_ids=[2], decode=str).members[0]
            api = engine.make_api([2])
            assert api.version(member.endpoint) is None and api.working(member.endpoint, 1) is False
        except (RolloutError, UserError) as e:
            assert str(e).isprintable()
            return type(e)
        finally:
            engine.close()

    fakes[0].answers[GENERATE] = (200, echo)
    good = fakes[0].answers[route]
    for answer in ANSWERS:
        fakes[0].answers[route] = (200, answer)
        assert outcome() is (None if route in ("/weight_info", "jppo_working", "/health") else UserError)
    fakes[0].answers[route] = good
    if route == "jppo_info":
        for name, value in INFOS:
            fakes[0].answers[route] = (200, {"results": [good[1]["results"][0] | {name: value}]})
            assert outcome() is UserError


def test_no_model_is_refused_before_any_server(settings, tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        start_vllm(str(tmp_path), str(tmp_path), settings=settings(**limits(1.0, 0)), urls=[])


def test_a_quantised_model_is_served_with_plain_weights(tmp_path):
    config = {"model_type": "gpt_oss", "num_hidden_layers": 1, "quantization_config": {"quant_method": "mxfp4"}}
    config |= {"swiglu_limit": 7.0, "rms_norm_eps": 1e-05, "attention_bias": True}  # as published
    (tmp_path / "config.json").write_text(json.dumps(config))
    option, folder = arguments.model_options(str(tmp_path), str(tmp_path / "run"))
    assert option == "--hf-config-path"
    del config["quantization_config"]
    assert json.loads((pathlib.Path(folder) / "config.json").read_text()) == config
    assert arguments.model_options(folder, str(tmp_path / "run")) == []


def test_a_multimodal_model_is_served_as_its_text_model(tmp_path):
    text = {"model_type": "gemma3_text", "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    _, folder = arguments.model_options(str(tmp_path), str(tmp_path / "run"))
    served = json.loads((pathlib.Path(folder) / "config.json").read_text())
    assert served.items() >= text.items()
    assert served["architectures"] == ["Gemma3ForCausalLM"]


@pytest.mark.parametrize(
    "change",
    [dict(swiglu_alpha=1.5), dict(rms_norm_eps=1e-6), dict(attention_bias=False), dict(layer_types=["full_attention"])],
)
def test_a_gpt_oss_model_that_vllm_computes_otherwise_is_refused(tmp_path, change):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "num_hidden_layers": 1} | change))
    with pytest.raises(UserError, match=f"{next(iter(change))}=.*; set rollout.name=inprocess$") as e:
        arguments.model_options(str(tmp_path), str(tmp_path))
    assert "\n" not in str(e.value)
