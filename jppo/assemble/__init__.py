"""From settings to running parts: reads the config once and closes everything else over plain numbers.

The commands call it; below it nothing sees a config.
"""

from jppo.assemble.agreement import agree
from jppo.assemble.engine import ENGINES, publish, publish_base, sampling, share_gpu
from jppo.assemble.inputs import Inputs, make_adapters, read_inputs, read_models, read_tokenizer
from jppo.assemble.learner import (
    Learner,
    attention_kernel,
    chunk_tokens,
    critic_mini_batch_size,
    load_trained,
    make_decoder,
    make_descent,
    make_learner,
    make_mesh,
    make_plan,
    plan_of_run,
    sequences_of_step,
)
from jppo.assemble.preview import dry_run
from jppo.assemble.recipe import make_recipe
from jppo.assemble.reward import make_panel

__all__ = [
    "ENGINES",
    "Inputs",
    "Learner",
    "agree",
    "attention_kernel",
    "chunk_tokens",
    "critic_mini_batch_size",
    "dry_run",
    "load_trained",
    "make_adapters",
    "make_decoder",
    "make_descent",
    "make_learner",
    "make_mesh",
    "make_panel",
    "make_plan",
    "make_recipe",
    "plan_of_run",
    "publish",
    "publish_base",
    "read_inputs",
    "read_models",
    "read_tokenizer",
    "sampling",
    "sequences_of_step",
    "share_gpu",
]
