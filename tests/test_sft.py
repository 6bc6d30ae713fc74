"""Fine-tuning as a command: it learns, and what it writes is a model."""

import json
import os

import jax
import pytest

from examples import arithmetic
from jppo import settings, sft
from jppo.errors import UserError
from jppo.models import hf
from jppo.runlog.durable_files import own
from jppo.runlog.logger import read_metrics


def test_the_loss_falls_and_the_model_is_written(tmp_path):
    rows = arithmetic.make(seed=1, test=64, sloppy=0.0, demonstrations=1)["sft"]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arithmetic.write_model(tmp_path / "model")
    config = settings.sft_default()
    config.model.path = str(tmp_path / "model")
    config.model.init = "random"
    config.data.train_files = str(tmp_path / "sft.jsonl")
    config.data.train_batch_size = 64
    config.data.max_prompt_length = 6
    config.data.max_response_length = 4
    config.data.row_lengths = 1
    config.optim.lr, config.mesh.sequence = 3e-3, 2
    config.trainer.run_dir = str(tmp_path / "run")
    config.trainer.total_training_steps = 30
    settings.check(config)
    sft.train(config)
    losses = [m["sft/loss"] for m in read_metrics(tmp_path / "run")]
    assert len(losses) == 30
    assert losses[0] > 2.0 and losses[-1] < 0.75 * losses[0]  # from ignorance to the digits' shares
    _, cfg = hf.read_config(tmp_path / "run/hf")
    params = hf.load_params(tmp_path / "run/hf", cfg, head="lm", param_dtype="float32")
    assert all(bool(jax.numpy.isfinite(x).all()) for x in jax.tree.leaves(params))
    with own(tmp_path / "run"), pytest.raises(UserError, match=f"belongs to process {os.getpid()} "):
        sft.train(config)
