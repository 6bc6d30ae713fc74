"""The reward model of the settings, with the engine that computes its scores."""

import functools
import pathlib
from typing import Any

import jax

from jppo.data.tokenizer import decode, load_tokenizer
from jppo.learner import sharding, state
from jppo.models import fused, hf, sequence_parallel
from jppo.models.decoder import attention_settings
from jppo.plugins.reward_models.classifier import (
    Classifier,
    JaxRewardModel,
    choose_engine,
    convert_weights,
    locate,
    read_classifier,
)
from jppo.plugins.reward_models.model import ModelPart, Normalizer, StepPart, Texts
from jppo.plugins.reward_models.model_process import TransformersRewardModel, VllmRewardModel
from jppo.rollout.vllm.arguments import check_vllm
from jppo.settings import RewardModel


def make_reward_model(m: RewardModel, policy_tokenizer: Any, mesh: jax.sharding.Mesh, log: pathlib.Path) -> ModelPart:
    """Makes the reward model and its engine."""
    steps = bool(m.step_aggregation)
    directory = convert_weights(locate(m.path), python=m.python, steps=steps)
    tokenizer = load_tokenizer(m.path)
    classifier = read_classifier(m.path, tokenizer=tokenizer, max_length=m.max_length, directory=directory, steps=steps)
    texts = Texts(tokenizer, max_length=m.max_length)
    engines = {"jax": _make_jax_model, "transformers": _make_transformers_model, "vllm": _make_vllm_model}
    scorer = engines[choose_engine(m.engine, classifier.model_type)](m, classifier, mesh, log)
    if steps:
        return StepPart(
            scorer,
            texts,
            batch_size=m.batch_size,
            aggregation=m.step_aggregation,
            delimiter=m.step_delimiter,
            mark=m.step_token or m.step_delimiter,
            decode=functools.partial(decode, policy_tokenizer),
        )
    normalizer = Normalizer() if m.normalize else None
    return ModelPart(scorer, texts, batch_size=m.batch_size, normalizer=normalizer, clip=m.clip)


def _make_jax_model(m: RewardModel, classifier: Classifier, mesh: jax.sharding.Mesh, log: pathlib.Path) -> Any:
    _, cfg = hf.read_config(classifier.directory, longest=m.max_length)
    needs = fused.Needs(
        **attention_settings(cfg),
        head_dim=cfg.kernel_dim,
        dtype=m.dtype,
        one_segment=True,
        longest=m.max_length,
        sinks=cfg.sinks,
    )
    gpu = fused.capability(mesh.devices.flat[0])
    kernel, _ = fused.choose_kernel("auto", needs, backend=sharding.platform(mesh), gpu=gpu)
    return JaxRewardModel(
        classifier,
        batch_size=m.batch_size,
        max_length=m.max_length,
        dtype=m.dtype,
        shardings=state.model_weights(cfg, mesh, head="trunk", param_dtype=m.dtype).shardings,
        rows=sharding.whole_rows_sharding(mesh),
        attend=fused.make_attention(kernel, needs, mesh=mesh, split=sequence_parallel.WHOLE),
    )


def _make_transformers_model(m: RewardModel, classifier: Classifier, mesh: jax.sharding.Mesh, log: pathlib.Path) -> Any:
    log.mkdir(parents=True, exist_ok=True)
    return TransformersRewardModel(
        classifier, log=log / "reward_model.log", python=m.python, device=m.device, dtype=m.dtype, threads=m.threads
    )


def _make_vllm_model(m: RewardModel, classifier: Classifier, mesh: jax.sharding.Mesh, log: pathlib.Path) -> Any:
    log.mkdir(parents=True, exist_ok=True)
    return VllmRewardModel(
        classifier,
        build=check_vllm(m.python, "reward.model.python"),
        batch_size=m.batch_size,
        max_length=m.max_length,
        log=log / "reward_model.log",
        python=m.python,
        dtype=m.dtype,
        threads=m.threads,
        gpu_memory_utilization=m.gpu_memory_utilization,
    )
