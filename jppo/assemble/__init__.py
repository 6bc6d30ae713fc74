"""From settings to running parts: reads the config once and closes everything else over plain numbers.

The commands call it; below it nothing sees a config.
"""

from jppo.assemble.agreement import Match, Mismatch, agree
from jppo.assemble.ahead import fresh, graders, make_supply
from jppo.assemble.engine import (
    Source,
    open_engine,
    publish,
    publish_base,
    publish_stored,
    sampling,
    share_gpu,
    val_sampling,
)
from jppo.assemble.fit import require_models_fit
from jppo.assemble.forewarn import describe_sampling, forewarn
from jppo.assemble.handover import may_overlap
from jppo.assemble.hosts import join_hosts, own_folder, require_alike, require_shareable, summed
from jppo.assemble.inputs import (
    Inputs,
    make_adapters,
    read_inputs,
    read_models,
    read_test,
    read_tokenizer,
    speaking,
)
from jppo.assemble.learner import (
    Learner,
    attention_kernel,
    chunk_tokens,
    compile_passes,
    load_trained,
    make_decoder,
    make_descent,
    make_learner,
    make_mesh,
)
from jppo.assemble.logger import make_logger, require_loggers
from jppo.assemble.peak import introduce_peak, utilisation
from jppo.assemble.preview import dry_run
from jppo.assemble.recipe import make_recipe
from jppo.assemble.resume import Begun, finished, kept, origin, resume, save
from jppo.assemble.reward import make_panel
from jppo.assemble.rows import critic_mini_batch_size, make_plan, plan_of_run, sequences_of_step
from jppo.assemble.sandbox import introduce_sandbox

__all__ = [
    "Begun",
    "Inputs",
    "Learner",
    "Match",
    "Mismatch",
    "Source",
    "agree",
    "attention_kernel",
    "chunk_tokens",
    "compile_passes",
    "critic_mini_batch_size",
    "describe_sampling",
    "dry_run",
    "finished",
    "forewarn",
    "fresh",
    "graders",
    "introduce_peak",
    "introduce_sandbox",
    "join_hosts",
    "kept",
    "load_trained",
    "make_adapters",
    "make_decoder",
    "make_descent",
    "make_learner",
    "make_logger",
    "make_mesh",
    "make_panel",
    "make_plan",
    "make_recipe",
    "make_supply",
    "may_overlap",
    "open_engine",
    "origin",
    "own_folder",
    "plan_of_run",
    "publish",
    "publish_base",
    "publish_stored",
    "read_inputs",
    "read_models",
    "read_test",
    "read_tokenizer",
    "require_alike",
    "require_loggers",
    "require_models_fit",
    "require_shareable",
    "resume",
    "sampling",
    "save",
    "sequences_of_step",
    "share_gpu",
    "speaking",
    "summed",
    "utilisation",
    "val_sampling",
]
