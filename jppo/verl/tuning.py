"""Arguments of verl's fine-tuning as settings of jppo.sft, by the rows of PPO's actor."""

import dataclasses
from collections.abc import Sequence

from jppo import settings
from jppo.settings import UserError, table
from jppo.verl import overrides
from jppo.verl.name import key_of
from jppo.verl.translate import Line, Translation
from jppo.verl.translate import translate as translate_ppo

_RENAMED = {  # a prefix of a key is enough; {engine} is the place of the engine's keys
    "optim.lr_scheduler": "A.optim.lr_scheduler_type",
    "optim.": "A.optim.",
    "engine.": "{engine}.",
    "model.partial_pretrain": "M.path",
    "model.fsdp_config.": "A.fsdp_config.",
    "model.strategy": "A.strategy",
    "model.": "M.",
    "data.micro_batch_size_per_gpu": "A.ppo_micro_batch_size_per_gpu",
    "data.max_token_len_per_gpu": "A.ppo_max_token_len_per_gpu",
    "data.use_dynamic_bsz": "A.use_dynamic_bsz",
    "data.": "tuning.",
    "ulysses_sequence_parallel_size": "A.ulysses_sequence_parallel_size",
    "use_remove_padding": "M.use_remove_padding",
    "checkpoint.": "A.checkpoint.",
    "trainer.checkpoint.": "A.checkpoint.",
    "trainer.test_freq": "tuning.test_freq",
    "trainer.seed": "data.seed",
}
_ENGINES = {name: f"A.{name}" for name in ("megatron", "veomni", "torchtitan", "automodel")}
_OF_CHOICE = {  # defaults of verl's YAML files of optimizers and engines
    "optim=veomni": " optim.lr_scheduler_type=cosine",
    "optim=torchtitan": " optim.lr_scheduler_type=linear",
    "optim=automodel": " optim.lr=1e-5 optim.lr_scheduler_type=cosine optim.min_lr_ratio=0.01 optim.init_lr_ratio=0.1",
    "engine=automodel": " engine.activation_checkpointing=False",
}
_OF_PPO = {  # settings that jppo.sft does without
    "rollout.servers": "jppo.sft trains on all devices of its host",
    "trainer.nnodes": "jppo.sft runs on one host",
    "trainer.save_contents": "checkpoints are whole, and RUN_DIR/hf is the model",
    "trainer.val_before_train": "jppo.sft tests nothing",
}
_DEFAULTS = "data.train_batch_size=256 trainer.total_epochs=4 trainer.project_name=gsm8k-sft"
_DEFAULTS += " trainer.experiment_name=test trainer.n_gpus_per_node=1"
_NEW = " optim.lr=1e-3 data.use_dynamic_bsz=True data.max_token_len_per_gpu=8192"
_OLD = " optim.lr=1e-5 optim.betas=[0.9,0.95] optim.lr_warmup_steps_ratio=0.1 optim.lr_scheduler=cosine"
_OLD += " data.micro_batch_size_per_gpu=4"
_PAIRS = " data.prompt_key=question data.response_key=answer"
_SAME = ("data.train_files", "data.train_batch_size", "data.max_prompt_length", "data.max_response_length")
GROUPS = ("model", "engine", "optim", "profiler")  # choices among verl's YAML files


def translate(words: Sequence[str], main: str, root: str, folder: str) -> Translation:
    """Translates the arguments of sft_trainer and fsdp_sft_trainer."""
    old = overrides.main_of(main) == "trainer.fsdp_sft_trainer"
    chosen = {word.partition("=")[0].lstrip("+"): word.partition("=")[2] for word in words}
    place = _ENGINES.get(chosen.get("engine", ""), "A.fsdp_config")

    def rename(key: str) -> str:
        for before, after in {**dict(zip(_SAME, _SAME, strict=True)), **_RENAMED}.items():
            if key == before or (before.endswith(".") and key.startswith(before)):
                return key_of(after.format(engine=place) + key[len(before) :])
        return key

    said = [word for word in words if word.partition("=")[0] not in GROUPS]
    try:
        longest = int(chosen.get("data.max_length", 1024))
    except ValueError as e:
        raise UserError(f"data.max_length={chosen['data.max_length']}: it must be a number of tokens") from e
    lengths = [f"data.max_prompt_length={longest // 2}", f"data.max_response_length={longest - longest // 2}"]
    chats = not old or chosen.get("data.multiturn.enable", "").lower() == "true"
    defaults = _DEFAULTS + (_OLD if old else _NEW) + ("" if chats else _PAIRS)
    defaults += "".join(text for choice, text in _OF_CHOICE.items() if choice in words)
    usual = lengths + [word for word in defaults.split() if word.partition("=")[0] not in chosen]
    found = translate_ppo([*usual, *said], main=main, root=root, folder=folder, rename=rename)
    known = table.by_name(settings.sft_default())
    values = {_own(name): value for name, value in found.settings.items()}
    lines = [_line(line, known) for line in found.lines if line.said not in usual or line.kind == "missing"]
    if chats:  # without pairs of texts
        values = {name: value for name, value in values.items() if name not in ("data.prompt_key", "data.response_key")}
    else:
        values["data.prompt_role"] = "user"
    values["data.learn_turns"] = "all" if chats else "last"
    return dataclasses.replace(
        found,
        settings={name: value for name, value in values.items() if name in known},
        given=frozenset(_own(name) for name in found.given),
        lines=tuple(lines),
        notes=(),
    )


def _own(name: str) -> str:
    return name.replace("actor.", "optim.", 1) if name.startswith("actor.") else name


def _line(line: Line, known: dict[str, object]) -> Line:
    """Returns the line with jppo.sft's name of a setting, or the reason why it has none."""
    name, _, value = line.why.partition("=")
    if line.kind != "same":
        return dataclasses.replace(line, why=line.why.replace("actor.", "optim."))
    if _own(name) in known:
        return dataclasses.replace(line, why=f"{_own(name)}={value}")
    if name == "trainer.nnodes" and value != "1":
        return dataclasses.replace(line, kind="missing", why="jppo.sft runs on one host")
    why = _OF_PPO.get(name)
    return dataclasses.replace(line, kind="needless" if why else "missing", why=why or f"jppo.sft has no {name}")
