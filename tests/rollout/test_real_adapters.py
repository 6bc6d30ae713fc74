"""A real vLLM that is given adapters alone: it samples from the base with them, version by version."""

import importlib.util
import pathlib

import numpy as np
import pytest

from jppo.models import config_reader, hf_write, lora
from jppo.rollout.vllm.client import start_vllm
from tests.rollout.test_real_vllm import GREEDY, PROMPTS, SAMPLING, gap, make_model, random_weights

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup"),
]
HOW = lora.Lora(rank=5, alpha=12, targets=tuple(lora.TARGETS))


def random_adapters(cfg, seed):
    """What a training would have learned."""
    rng = np.random.default_rng(seed)
    return lora.params.tree(
        lora.adapter_table(cfg, HOW, head="lm"), lambda e: rng.normal(size=e.shape).astype(np.float32) * 0.1
    )


@pytest.mark.slow
def test_adapters_beside_the_base_are_what_peft_makes_of_both(settings, tmp_path):
    peft = pytest.importorskip("peft")
    config = make_model(tmp_path / "model", "tied")
    cfg = config_reader.parse_config(config.to_dict(), path="config.json")
    base, tensors = random_weights(config, 1)
    engine = start_vllm(
        str(tmp_path / "model"),
        str(tmp_path / "run"),
        settings=settings(
            max_model_len=384,
            max_num_seqs=64,
            start_timeout_s=180.0,
            lora_rank=HOW.rank,
            request_timeout_s=60.0,
            health_timeout_s=60.0,
            max_restarts=0,
        ),
        urls=[],
    )
    try:
        sampler = engine.ready(eos_token_ids=[2], decode=str)
        sampler.load(tensors.items(), version=1)
        assert gap(base, sampler.generate(PROMPTS, SAMPLING, version=1)) < 1e-3
        models = {}
        for version in (1, 2):
            learned = random_adapters(cfg, version)
            path = hf_write.save_adapter(tmp_path / f"v{version}", learned, cfg, HOW, base="model")
            fresh, _ = random_weights(config, 1)
            models[version] = peft.PeftModel.from_pretrained(fresh, path).eval()
            sampler.load_adapter(
                lambda out, learned=learned: hf_write.save_adapter(out, learned, cfg, HOW, base="model"),
                version=version,
            )
            # the prompts are long enough to be cached: nothing of the version before may be left
            for sampling in (SAMPLING, GREEDY):
                found = sampler.generate(PROMPTS, sampling, version=version)
                if sampling is SAMPLING:
                    assert gap(models[version], found) < 1e-3
        assert gap(models[1], sampler.generate(PROMPTS, SAMPLING, version=2)) > 0.1, "the test can tell them apart"
        # whole weights again: the adapters are no longer part of the model
        new, tensors = random_weights(config, 3)
        sampler.load(tensors.items(), version=3)
        assert gap(new, sampler.generate(PROMPTS, SAMPLING, version=3)) < 1e-3
    finally:
        engine.close()
    assert not list(pathlib.Path("/dev/shm").glob("jppo-weights-*/adapter-*"))
