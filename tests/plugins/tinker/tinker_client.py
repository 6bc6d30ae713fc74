"""Loops on the official `tinker` client, run by a Python that has it: prints their results as JSON."""

import json
import os
import sys

import numpy as np
import tinker
from tinker import types

BASE, RANK = sys.argv[1], int(sys.argv[2])
ADAM = types.AdamParams(learning_rate=2e-2)


def datum(tokens, **arrays):
    targets = np.asarray(tokens[1:], np.int64)
    inputs = {name: np.asarray(x, np.float32) for name, x in arrays.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs | {"target_tokens": targets}
    )


def supervised(client, steps):
    rows = [[1, 2, 3, 4, 5], [5, 4, 3, 2], [7, 7, 8, 8, 9, 9]]
    data = [datum(row, weights=np.ones(len(row) - 1)) for row in rows]
    found = []
    for _ in range(steps):
        loss, step = client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)
        out = loss.result()
        step.result()
        by_token = -sum(x["logprobs"].to_numpy().sum() for x in out.loss_fn_outputs)
        assert abs(by_token - out.metrics["loss:sum"]) < 1e-3 * by_token
        found.append(out.metrics["loss:sum"])
    return found, client.forward(data, "cross_entropy").result().metrics["loss:sum"]


def rl(client, steps, loss):
    prompt, found = [3, 4], []
    for step in range(steps):
        how = [types.SamplingParams(max_tokens=6, temperature=1.0, seed=4 * step + i) for i in range(4)]
        sampler = client.save_weights_and_get_sampling_client()
        if hasattr(sampler, "result"):
            sampler = sampler.result()
        futures = [sampler.sample(types.ModelInput.from_ints(prompt), 8, one) for one in how]
        groups, data = [future.result().sequences for future in futures], []
        for group in groups:
            rewards = np.array([np.mean([token == 5 for token in one.tokens]) for one in group])
            found.append(rewards.mean())
            for one, advantage in zip(group, rewards - rewards.mean(), strict=True):
                zeros, tokens = [0.0] * (len(prompt) - 1), list(one.tokens)
                data.append(
                    datum(
                        prompt + tokens,
                        logprobs=zeros + list(one.logprobs),
                        advantages=zeros + [advantage] * len(tokens),
                    )
                )
        client.forward_backward(data, loss).result()
        client.optim_step(ADAM).result()
    return np.reshape(found, (steps, -1)).mean(1).tolist()


def refused(call):
    try:
        call()
    except Exception as e:
        return str(e)
    return None


service = tinker.ServiceClient()
first = service.create_lora_training_client(BASE, rank=RANK, seed=1).result()
other = tinker.ServiceClient().create_lora_training_client(BASE, rank=RANK, seed=2).result()
out = {"info": first.get_info().is_lora}
before = supervised(other, 0)[1]
out["losses"], out["after"] = supervised(first, 12)
out["untouched"] = [before, supervised(other, 0)[1]]
path = first.save_state("one").result().path
supervised(first, 3)
first.load_state_with_optimizer(path).result()
out["loaded"] = supervised(first, 0)[1]
again = service.create_training_client_from_state_with_optimizer(path)
again = again.result() if hasattr(again, "result") else again
out["from_state"] = supervised(again, 0)[1]
for loss in ("importance_sampling", "ppo", "cispo"):
    client = service.create_lora_training_client(BASE, rank=RANK, seed=3).result()
    out[loss] = rl(client, 12, loss)
named = first.save_weights_for_sampler("named").result().path
greedy = types.SamplingParams(max_tokens=4, temperature=0.0)
sampler = service.create_sampling_client(model_path=named)
out["greedy"] = list(sampler.sample(types.ModelInput.from_ints([1, 2]), 1, greedy).result().sequences[0].tokens)
scored = types.ModelInput.from_ints([1, 2, 3])
out["scores"] = sampler.compute_logprobs(scored).result()
out["forward"] = first.forward([datum([1, 2, 3])], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
out["refused"] = {
    "rank": refused(lambda: service.create_lora_training_client(BASE, rank=RANK + 1).result()),
    "base": refused(lambda: service.create_lora_training_client("other", rank=RANK).result()),
    "loss": refused(lambda: first.forward_backward([datum([1, 2])], "gspo").result()),
    "topk": refused(lambda: sampler.sample(scored, 1, greedy, topk_prompt_logprobs=1).result()),
}
stranger = tinker.ServiceClient(api_key=os.environ["OTHER_KEY"])
out["refused"]["sampler"] = refused(lambda: stranger.create_sampling_client(model_path=named).result())
out["refused"]["state"] = refused(lambda: stranger.create_training_client_from_state(path).result())
print(json.dumps(out))
