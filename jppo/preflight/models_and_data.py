"""Checks of a run's inputs: models and their parity with transformers, tokenizer, data, sampling, reward."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jppo import plugins
from jppo.child_process import python_path
from jppo.data import check as data_check
from jppo.data.tokenizer import end_token_ids, load_tokenizer
from jppo.errors import UserError
from jppo.models import decoder, heads, hf
from jppo.models.config import ModelConfig
from jppo.preflight import memory, memory_budget
from jppo.preflight.finding import GIB, Finding
from jppo.preflight.preview import describe_sampling
from jppo.rewards import check as reward_check
from jppo.rewards.graders import grader_of
from jppo.rewards.make import make_refusal, make_reward_sum, needed_columns, require_values
from jppo.rollout.protocol import Agent
from jppo.rollout.servers.make import open_reference
from jppo.run.agreement import sampling_warnings
from jppo.run.inputs import Inputs, columns_of
from jppo.run.make import path_of_critic, read_models_of_run
from jppo.run.tokenizer import read_tokenizer
from jppo.settings import Settings, template_arguments
from jppo.types import Params

ERROR_LENGTH = 200  # characters of an error
PARITY_TOKENS = 12
PARITY_TOLERANCE = 1e-3  # of a log-prob, in float32
PARITY_MEMORY = GIB  # of torch and transformers in the worker
PARITY_LIMIT_S = 240.0


def check_models(c: Settings) -> Iterator[Finding]:
    """Checks every model's directory and weight headers."""
    models = read_models_of_run(c)
    policy = models.policy
    random = ", random weights" if c.model.init == "random" else ""
    parts = [
        f"{c.model.path}: {policy.family}, {memory.engine_bytes(policy, 'float32') / 4e6:,.0f}M parameters{random}"
    ]
    if policy.unread is not None:
        parts.append(policy.unread)
    if models.critic is not None and path_of_critic(c) != c.model.path:
        parts.append(f"critic {path_of_critic(c)}")
    if models.reference is not None and c.ref.path != "policy":
        parts.append(f"reference {c.ref.path}")
    if c.ref.url:
        parts.append(f"reference at {c.ref.url}")
    yield Finding("model files", "OK", "; ".join(parts))


def check_reference_server(c: Settings, inputs: Inputs) -> Iterator[Finding]:
    """Asks the servers of ref.url for their models, and reports them."""
    servers = open_reference(c, inputs.tokenizer)
    if servers is not None:
        yield Finding("teacher", "OK", str(servers))


def check_tokenizer(c: Settings) -> Iterator[Finding]:
    """Checks the tokenizer against the models, the end tokens, and the template."""
    tokenizer = read_tokenizer(c, *read_models_of_run(c).configs)
    ends = " ".join(map(str, tokenizer.convert_ids_to_tokens(end_token_ids(c.model.path, tokenizer))))
    ends = f"end tokens {ends} are ignored" if c.rollout.ignore_eos else f"a response ends with {ends}"
    template = "a chat template" if tokenizer.chat_template else "no chat template: prompts must be text"
    yield Finding("tokenizer", "OK", f"{len(tokenizer):,} tokens, {ends}, {template}")


def check_sampling(c: Settings) -> Iterator[Finding]:
    """Checks how responses are sampled, and whether the trainer learns from that distribution."""
    yield Finding("sampling", "OK", describe_sampling(c))
    for alert in sampling_warnings(c):
        yield Finding("sampling", "WARN", alert.found, alert.remedy)


def check_data(c: Settings, inputs: Inputs) -> Iterator[Finding]:
    """Checks training and test set like `jppo.data.check`, and counts the rows that training uses."""
    options_of_set = dict(
        tokenizer=inputs.tokenizer,
        prompt_role=c.data.prompt_role,
        system_prompt=c.data.system_prompt,
        custom_cls=c.data.custom_cls,
        columns=columns_of(c),
        template_arguments=template_arguments(c.data.apply_chat_template_kwargs),
    )
    graded = (source for source in inputs.sources if _graded_without_rule(c) or grader_of(source) is not None)
    graders = dict.fromkeys(graded, "rule")
    options = dict[str, Any](
        max_prompt_length=c.data.max_prompt_length,
        graders=graders,
        refuse=make_refusal(c),
        needed=needed_columns(c, bool(inputs.reward_arguments()["tool_rewards"])),
    )
    train = data_check.read_set(c.data.train_files, "data.train_files", **options_of_set)
    val = data_check.read_set(c.data.val_files, "data.val_files", **options_of_set)
    for title, data, used in (("train data", train, inputs.train), ("test data", val, inputs.val)):
        lengths, _ = data_check.lengths(data)
        yield Finding(
            title,
            "OK",
            f"{len(used.prompts):,} of {len(data.rows):,} rows; prompts of {lengths.min()} to {lengths.max()} tokens"
            f" (data.max_prompt_length={c.data.max_prompt_length}); {used.overlong} left out, {used.truncated} cut",
        )
        for note in data_check.data_findings(data, **options):
            if not note.good:
                yield Finding(title, "WARN", f"{note.about}: {note.found}", _data_remedy(note.about))
    shared = data_check.overlap(train, val)
    if not shared.good:
        yield Finding("test data", "WARN", f"{shared.about}: {shared.found}", "remove them from one of the sets")


def _graded_without_rule(c: Settings) -> bool:
    """Whether anything but a rule by data source grades the rows."""
    r, talk = c.reward, c.rollout.multi_turn
    own_reward = talk.environment or _agent_rewards(c)
    return bool(r.function or r.grader or r.judge.api_type or r.model.path or own_reward)


def _agent_rewards(c: Settings) -> bool:
    return bool(c.rollout.agent and c.rollout.agent_reward != "graders")


def _data_remedy(about: str) -> str:
    """Returns the remedy for a note of `jppo.data.check`."""
    return {
        "rows": "give every row the same columns",
        "source": "name a rule by data_source, or set reward.grader or reward.function",
        "answers": "give them a ground_truth, or remove them",
        "duplicates": "remove them, unless they should count more",
        "asserts": "change them, or set reward.code.tests=native, where a program can cheat",
        "over-long": "raise data.max_prompt_length, or see data.filter_overlong_prompts and data.truncation",
    }[about]


def check_scorers(c: Settings) -> Iterator[Finding]:
    """Checks that judge and reward model are there, without scoring anything."""
    if c.reward.judge.api_type:
        plugins.load("judge.make").make_judge(c.reward.judge).close()
    if c.reward.model.path:
        m = c.reward.model
        tokenizer, steps = load_tokenizer(m.path), bool(m.step_aggregation)
        classifier = plugins.load("reward_models.classifier")
        classifier.read_classifier(m.path, tokenizer=tokenizer, max_length=m.max_length, steps=steps)
    yield Finding("reward", "OK", "nothing was scored: jppo.doctor asks the judge and the reward model")


def check_reward(c: Settings, inputs: Inputs, mesh: Mesh, agent: Agent | None) -> Iterator[Finding]:
    """Checks with the run's own reward that right answers earn more than wrong ones; `agent` holds conversations."""
    with contextlib.ExitStack() as stack:
        reward_sum = make_reward_sum(c, mesh, **inputs.reward_arguments())
        stack.callback(reward_sum.close)
        require_values(c, reward_sum, inputs.train.prompts)
        reward_sum.ready()
        checks = reward_check.check_sources(
            c, reward_sum, inputs.train.prompts, agent, inputs.tokenizer, inputs.end_tokens
        )
    for check in checks:
        message = str(check)
        if check.errors:
            first_error = check.errors[0][1].partition("\n")[0]
            message += (
                f"; {len(check.errors)} of {check.graded} could not be graded, the first: {first_error[:ERROR_LENGTH]}"
            )
        remedy = "check data_source, ground_truth and reward.*: python -m jppo.rewards.check shows more"
        if check.good:
            yield Finding("reward", "WARN" if check.warning else "OK", message, check.warning)
        else:
            yield Finding("reward", "FAIL", message, remedy)
    if agent is None and inputs.agent is not None:
        yield Finding("reward", "OK", "the agent program was not run: jppo.doctor runs it")


def check_parity(c: Settings) -> Iterator[Finding]:
    """Compares the policy's log-probs of a few random tokens with transformers'; skipped without torch."""
    policy = read_models_of_run(c).policy
    if c.model.init == "random":
        yield Finding("parity", "OK", "skipped: random weights")
        return
    needed, free = memory.engine_bytes(policy, "float32") + PARITY_MEMORY, memory_budget.host_room()
    if free is not None and needed > free:
        message = f"skipped: it takes {needed / GIB:.1f} GiB, and {free / GIB:.1f} are free"
        yield Finding("parity", "WARN", message, "run scripts/check_parity.py on a larger machine")
        return
    directory = str(hf.resolve_directory(c.model.path, weights=True))
    ids = np.random.default_rng(0).integers(0, policy.vocab_size, PARITY_TOKENS).astype(np.int32)
    expected = transformers_logprobs(c.rollout.python, directory, ids)
    if isinstance(expected, str):
        message = f"skipped: no {expected} to compare with; training does not need it"
        yield Finding("parity", "OK", message)
        return
    _, short_config = hf.read_config(
        directory, longest=PARITY_TOKENS
    )  # transformers scales positions by the tokens that it is given
    gap = float(np.abs(own_logprobs(directory, short_config, ids) - expected).max())
    message = f"largest gap to transformers' log-probs {gap:.1e} on {PARITY_TOKENS - 1} tokens"
    if gap <= PARITY_TOLERANCE:
        yield Finding("parity", "OK", message)
    else:
        remedy = f"do not train it: python scripts/check_parity.py {c.model.path} says where they differ"
        yield Finding("parity", "FAIL", f"{message}, more than {PARITY_TOLERANCE:g}", remedy)


def transformers_logprobs(python: str, directory: str, ids: np.ndarray) -> np.ndarray | str:
    """Returns transformers' log-probs from the interpreter that has vLLM and torch; or the missing package."""
    command = [python if python else sys.executable, "-m", "jppo.preflight.parity_worker", directory, *map(str, ids)]
    try:
        result = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=PARITY_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise UserError(f"transformers gave no log-probs: {e}; set rollout.python to a working interpreter") from e
    if result.returncode != 0:
        message = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        raise UserError(f"transformers cannot read {directory}: {message[-300:]}; download the model again")
    reply = json.loads(result.stdout.splitlines()[-1])
    return str(reply["missing"]) if "missing" in reply else np.array(reply["logp"], np.float32)


def own_logprobs(directory: str, cfg: ModelConfig, ids: np.ndarray) -> np.ndarray:
    """Returns jppo's log-probs of each token after the first."""
    model = decoder.Decoder(cfg, dtype="float32", param_dtype="float32")

    @jax.jit
    def logp(values: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        segment, position = jnp.ones_like(inputs), jnp.arange(inputs.shape[1], dtype=jnp.int32)[None]
        hidden: Any = model.apply({"params": values}, inputs, segment, position)
        return heads.logprob_of(heads.logits_of((hidden, decoder.head_kernel(values, cfg), cfg)), targets)

    with jax.default_matmul_precision("highest"):
        values = hf.load_params(directory, cfg, head="lm", param_dtype=jnp.float32)
        return np.asarray(logp(values, ids[None, :-1], ids[None, 1:])).squeeze(0)
