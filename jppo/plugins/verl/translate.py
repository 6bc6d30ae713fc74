"""Translates verl's overrides, of PPO and of fine-tuning, to jppo's settings, with an account of each."""

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from jppo.errors import UserError, expanded
from jppo.plugins.sandbox.shell import HIDDEN
from jppo.plugins.verl import derived, older, overrides
from jppo.plugins.verl.compose import main_of
from jppo.plugins.verl.derived import teacher_fault
from jppo.plugins.verl.name import GetKey, KeyRow, Needless, Unsupported, key_of, read_with
from jppo.plugins.verl.names import FOLLOWING, KEYS, OF_CONFIG, UNCHANGED, current_key, find_row
from jppo.plugins.verl.values import CONVERSIONS, without_server_settings
from jppo.settings import sft_default, table

_DICTS = (  # keys whose value is a dict
    "data.apply_chat_template_kwargs",
    key_of("R.engine_kwargs.vllm"),
    key_of("R.engine_kwargs.sglang"),
)
_OFF: tuple[Any, ...] = (None, False, 0, -1, "", "null", "none", "None", [], {})
_UNREAD = {key_of(short) for short in (  # verl's own YAML has them, without a need
  "reward.num_workers", "A.calculate_entropy", "data.image_key", "data.video_key", "data.audio_key", "R.skip_dump_dir",
  "trainer.default_hdfs_dir", "critic.model.tokenizer_path", "A.checkpoint.load_contents",
)}  # fmt: skip
_RUN_DIR = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"  # in verl's YAML
_OF_ENGINE = {"veomni": "cosine", "torchtitan": "linear"}  # schedules of verl's YAML
PATHS = ("model.path", "data.train_files", "data.val_files")  # from the base config, if verl's line omits them


@dataclasses.dataclass(frozen=True)
class Line:
    """The result of one override."""

    text: str  # KEY=VALUE, as given
    kind: str  # same, needless, missing or unknown
    why: str  # for same: jppo's SETTING=VALUE


@dataclasses.dataclass(frozen=True)
class Translation:
    """jppo's settings, and the account of verl's overrides: what became of each."""

    settings: dict[str, Any]
    overridden: frozenset[str]  # set by overrides; the others are verl's defaults
    lines: tuple[Line, ...]
    notes: tuple[str, ...]
    changes: tuple[str, ...] = ()  # names that mean something else in jppo, or did in the script's verl


def translate(
    words: Iterable[str],
    config: Mapping[str, Any] | None = None,
    *,
    main: str = "",
    root: str = "",
    folder: str = "",
    rename: Callable[[str], str] = lambda key: key,
    version: older.Version | None = None,
) -> Translation:
    """Translates the arguments of verl's PPO trainers to jppo's settings, with an account of each argument.

    Keys that no override gives have verl's defaults; with a jppo `config`, its values, and the result has no settings
    but those that the overrides change. YAML is read relative to `root`, of the module, or `folder`, where it starts.
    A `version` is the script's verl, 0.9.1 without.
    """
    by_key, rejected = overrides.read_overrides(words, main, root, folder)
    lines = [Line(word, "unknown", why) for word, why in rejected.items()]
    unread = dict(_take_unread(by_key, version.unread if version else ()))
    lines += [Line(text, "needless", "the trainer does not read it") for text in unread]
    values: dict[str, Any] = {}
    text_of: dict[str, str] = {}
    by_file: set[str] = set()  # keys of the checkout's YAML
    for key, override in by_key.items():
        current = current_key(rename(key))
        if override.file and (override.value == _RUN_DIR or (override.value in _OFF and current.startswith(_DICTS))):
            continue
        values.pop(current, None)  # order of the last overrides
        values[current], text_of[current] = override.value, override.text
        (by_file.add if override.file else by_file.discard)(current)
    for key in _DICTS:
        _merge_entries(values, text_of, key)
    _name_teacher(values, text_of)

    def get(short: str) -> Any:
        """Returns verl's value of a key, also a short one: as overridden, of the config, or the default."""
        key = key_of(short)
        if key in values:
            return values[key]
        row = find_row(key)
        if config is not None and key in OF_CONFIG:
            return OF_CONFIG[key](config, values)
        if config is not None and row and row.key == key and row.setting and row.convert in UNCHANGED:
            return config[row.setting]
        default = row.default if row and row.key == key else None
        return get(default[1:]) if isinstance(default, str) and default.startswith("=") else default

    if schedule := _OF_ENGINE.get(derived.training_engine(get)):
        for key in map(key_of, ("A.optim.lr_scheduler_type", "critic.optim.lr_scheduler_type")):
            values.setdefault(key, schedule)
            text_of.setdefault(key, "")
    overrides.interpolate(values, lambda key: get(current_key(rename(key))))
    _drop_defaults(values, by_file)
    _check(values, text_of, get)
    was = set(values)
    changes = [f"the trainer does not read {place}*" for place in dict.fromkeys(unread.values())]
    changes += older.modernize(values, get, version, main) if version else []
    text_of |= dict.fromkeys(set(values) - was, "")
    by_file |= set(values) - was
    settings: dict[str, Any] = {}
    for name in KEYS if config is None else ():
        if name.default is not None and name.key not in values and _is_read(name, name.key, get):
            # A fault of the value is in the line of the key.
            with contextlib.suppress(Needless, Unsupported, TypeError, ValueError, ZeroDivisionError):
                settings[name.setting] = CONVERSIONS[name.convert](get(name.key), get)
    changed = set[str]()
    for key, value in values.items():
        line, setting, converted = _account(key, value, text_of[key] or f"{key}={value}", get)
        asks = line.kind in ("missing", "unknown") or (setting and converted != getattr(find_row(key), "default", None))
        if text_of[key] and (asks or key not in by_file):
            lines.append(line)
        if setting:
            settings[setting] = converted
            (changed.add if key not in by_file or setting in PATHS else changed.discard)(setting)
    tools = key_of("TURNS.tool_config_path")
    if names := _foreign_tools(settings.get("rollout.multi_turn.tool_config_path", "")):
        lines.append(
            Line(text_of[tools], "missing", f"it names classes of verl's, {names}; write them as PATH.py:CLASS")
        )
    decides = {key for key, (_, keys, _) in FOLLOWING.items() if any(key_of(short) in values for short in keys.split())}
    settings = without_server_settings(settings | _following(get, FOLLOWING.keys() if config is None else decides))
    lines += [Line(text, "missing", why) for text, why in older.faults(get, version, main)] if version else []
    estimator = get("algorithm.adv_estimator")
    if config is None and (own := settings["algorithm.adv_estimator"]) not in (estimator, "distill"):
        changes.append(f"algorithm.adv_estimator={estimator} with one sample a prompt is {own}: the score itself")
    horizon, epochs = "trainer.total_training_steps", "trainer.total_epochs"
    if all(key in values and key not in by_file and values[key] for key in (horizon, epochs)):
        changes.append(f"{horizon}={values[horizon]} ends the run; in verl {epochs}={values[epochs]} does, if earlier")
    notes = list(_notes(values, get, bool(version and "kl in reward" in version.lacks))) if config is None else []
    return Translation(settings, frozenset(changed), tuple(lines), tuple(notes), tuple(changes))


def _take_unread(by_key: dict[str, overrides.Override], places: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Takes away the keys of places that neither trainer nor another key reads; yields the given ones and the place."""
    for place in places:
        if not any(f"${{{place[:-1]}" in str(override.value) for override in by_key.values()):
            for key in [key for key in by_key if key.startswith(place)]:
                if (override := by_key.pop(key)).text and not override.file:
                    yield override.text, place


def _drop_defaults(values: dict[str, Any], by_file: set[str]) -> None:
    """Leaves out keys of YAML that ask for nothing: verl's defaults, and unknown ones that are off."""
    for key in [key for key in by_file if key in values]:
        row, value = find_row(key), values[key]
        is_default = row and row.default is not None and str(value) == str(row.default) and key == row.key
        is_off = (row is None and value in _OFF) or (getattr(row, "kind", "") != "same" and "${" in str(value))
        if is_default or is_off or key in _UNREAD:
            del values[key]


def _following(get: GetKey, names: Collection[str]) -> dict[str, Any]:
    """Returns the values of those settings in `names` that several of verl's keys decide together, by `FOLLOWING`."""
    settings: dict[str, Any] = {}
    for setting, (follow, keys, _) in FOLLOWING.items():
        if setting not in names or _is_unused_critic(setting, get):
            continue
        with contextlib.suppress(Needless, Unsupported):  # the translation of the key alone reports these
            try:
                value = follow(get)
            except (TypeError, ValueError, AttributeError, ZeroDivisionError) as e:
                raise UserError(f"{setting}: one of its keys, {keys}, has a value without a meaning in verl") from e
            if value is not None:
                settings[setting] = value
    return settings


def _check(values: dict[str, Any], text_of: dict[str, str], get: GetKey) -> None:
    """Raises a UserError for values that cannot be translated: secrets, texts for numbers, unsupported features."""
    for key, value in values.items():
        row = find_row(key)
        default = row.default if row else None
        if row and row.kind == "same" and HIDDEN in str(value):
            raise UserError(
                f"{text_of[key]}: the variable of the environment looks like a secret, which a script does not get;"
                f" give {key}=VALUE behind the file"
            )
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        if is_number and not isinstance(value, int | float | None) and value != "after_each_epoch":
            raise UserError(f"{text_of[key]}: it must be a number, as verl's own {default} is")
        for find_fault in _FAULTS:
            if fault := find_fault(key, value, get):
                raise UserError(f"{text_of[key]}: not supported: {fault}")


_TEACHERS = "distillation.teacher_models."


def _name_teacher(values: dict[str, Any], text_of: dict[str, str]) -> None:
    """Renames the single teacher, if it has a name, to `teacher_model`, as verl does."""
    names = {key.split(".")[2] for key in values if key.startswith(_TEACHERS)} - {"teacher_model"}
    if len(names) == 1:
        prefix = f"{_TEACHERS}{names.pop()}."
        for key in [key for key in values if key.startswith(prefix)]:
            new_key = f"{_TEACHERS}teacher_model.{key.removeprefix(prefix)}"
            values[new_key], text_of[new_key] = values.pop(key), text_of.pop(key)


def _merge_entries(values: dict[str, Any], text_of: dict[str, str], key: str) -> None:
    """Merges overrides of a dict's entries into one value of `key`."""
    entries = [name for name in values if name.startswith(f"{key}.")]
    if entries:
        text_of[key] = " ".join(text_of[name] for name in entries)
        values[key] = {name.removeprefix(f"{key}."): values.pop(name) for name in entries}


def _account(key: str, value: Any, text: str, get: Any) -> tuple[Line, str, Any]:
    """Returns the line of the account about an override, and jppo's setting and value if it has one."""
    row = find_row(key)
    if row is None:
        return Line(text, "unknown", "no name of verl's that jppo knows of; it is left out"), "", None
    kind, why = row.kind, row.why
    if _is_unused_critic(key, get):
        kind, why = "needless", f"algorithm.adv_estimator={get('algorithm.adv_estimator')} has no critic"
    elif not _is_read(row, key, get):
        kind, why = "needless", f"read only with {row.only}"
    elif kind == "missing" and value in row.off:
        kind, why = "needless", "it asks for nothing"
    elif kind == "same" and "${" in str(value):
        kind, why = "missing", f"what ${{...}} stands for is not known here; give {key}=VALUE behind the file"
    return _convert(row, value, text, get) if kind == "same" else (Line(text, kind, why), "", None)


def _convert(row: KeyRow, value: Any, text: str, get: Any) -> tuple[Line, str, Any]:
    """Converts a value by its row; returns the line about it, jppo's setting and value."""
    try:
        converted = CONVERSIONS[row.convert](value, get)
    except Needless as e:
        return Line(text, "needless", str(e)), "", None
    except Unsupported as e:
        return Line(text, "missing", str(e)), "", None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as e:
        raise UserError(f"{text}: a value of this kind has no meaning in verl; it stands for {row.setting}") from e
    why = f"{row.setting}={converted}"
    if row.convert == "logger_names":
        loggers = [logger.strip("' ") for logger in str(value).strip("[]").split(",")]
        if unsupported := [logger for logger in loggers if logger not in (*converted.split(","), "file")]:
            why += f" (not supported: {', '.join(unsupported)})"
    return Line(text, "same", why), row.setting, converted


def _is_read(row: KeyRow, key: str, get: Any) -> bool:
    """Whether verl reads a key, given the others."""
    return not _is_unused_critic(key, get) and (not row.only or key == row.only or read_with(row.only, get))


def _is_unused_critic(key: str, get: Any) -> bool:
    return key.startswith("critic.") and get("algorithm.adv_estimator") != "gae"


def _notes(values: dict[str, Any], get: Any, is_older: bool) -> Iterable[str]:
    """Yields notes on keys that are missing, or that verl reads otherwise than their names say."""
    settings = {name.setting for key in values if (name := find_row(key))}
    if absent := [setting for setting in PATHS if setting not in settings]:
        yield f"{', '.join(absent)}: not given; those of jppo://gsm8k are taken"
    if get("algorithm.adv_estimator") == "gae" and "critic.model.path" not in values:
        yield "critic.model.path is not given; the critic begins as the policy, not as verl's own default"
    if "algorithm.kl_ctrl.kl_coef" in values and not is_older and not get("algorithm.use_kl_in_reward"):
        yield (
            "algorithm.kl_ctrl.kl_coef is read only with algorithm.use_kl_in_reward=True; verl until 0.3 (--verl=0.3)"
            " has the KL in the reward unless use_kl_loss"
        )
    if get("CORRECTION.bypass_mode") and key_of("trainer.use_v1") not in values:
        keys = ("CORRECTION.loss_type", "CORRECTION.rollout_is", "CORRECTION.rollout_rs")
        if any(key_of(short) in values for short in keys):
            yield (
                "verl 0.9.1's trainer with use_v1=True reads no other key of rollout_correction in bypass_mode; jppo"
                " does what verl's documentation and its older trainer do"
            )
    a = key_of("A.clip_ratio")
    if a in values and not is_older and (get(f"{a}_low"), get(f"{a}_high")) != (values[a], values[a]):
        low, high = get(f"{a}_low"), get(f"{a}_high")
        yield f"{a}={values[a]} clips nothing in verl: clip_ratio_low={low} and clip_ratio_high={high} do"


_SEES = re.compile(
    r"(?i)(?<![a-z])(vl|vlm|vla|vision|omni|llava\w*|internvl\w*|minicpm-?[vo]\w*|pixtral|audio|video)(?![a-z])"
)
_LACKING = re.compile(
    r"(?i)(?<![a-z])(seed[-_]?oss|glm[-_]?\d|chatglm|mimo|hy[-_]?v?3|hunyuan|nemotron|minicpm|minimax|internlm|baichuan"
    r"|ernie|deepseek[-_]v(3\.2|4))"
)


def _vision_fault(key: str, value: Any, _: GetKey) -> str:
    """Returns why a key asks for a model that sees or hears, or ''."""
    keys = ("data.image_key", "data.video_key", "data.audio_key", "actor_rollout_ref.rollout.limit_images")
    if (key in keys and value is not None) or (key == "actor_rollout_ref.actor.freeze_vision_tower" and value):
        return "jppo's models read text"
    if key == "actor_rollout_ref.model.path" and _SEES.search(str(value).rstrip("/").rpartition("/")[2]):
        return "jppo's models read text, and this one has images, video or sound"
    if key in ("data.train_files", "data.val_files") and re.search("geo3k|geometry3k", str(value)):
        return "jppo's models read text, and Geometry3k has images"
    return ""


def _family_fault(key: str, value: Any, _: GetKey) -> str:
    """Returns why a key asks for a family of models that jppo lacks, by a published name, or ''."""
    match = _LACKING.search(str(value).rstrip("/").rpartition("/")[2])
    if key != "actor_rollout_ref.model.path" or not match or (expanded(str(value)) / "config.json").is_file():
        return ""
    return f"jppo has no {match[0]} models; docs/architecture.md lists its families"


_FAULTS: tuple[Callable[[str, Any, GetKey], str], ...] = (_vision_fault, _family_fault, teacher_fault)


def _foreign_tools(path: str) -> str:
    """Returns the names of verl's classes in a YAML file of tools; '' if there are none."""
    try:
        config = yaml.safe_load(pathlib.Path(path).expanduser().read_text(encoding="utf-8"))
        names = [str(tool["class_name"]) for tool in config["tools"]]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return ""
    return ", ".join(name for name in names if name.startswith(("verl.", "recipe.")))


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
_GROUPS = ("model", "engine", "optim", "profiler")  # choices among verl's YAML files


def translate_tuning(
    words: Sequence[str], main: str, root: str, folder: str, version: older.Version | None = None
) -> Translation:
    """Translates the arguments of verl's sft_trainer and fsdp_sft_trainer to settings of jppo.sft."""
    is_older = main_of(main) == "trainer.fsdp_sft_trainer"
    given = overrides.read_overrides(words, main, root, folder)[0]
    given_values = {key: override.text.partition("=")[2] for key, override in given.items()}
    engine_prefix = _ENGINES.get(given_values.get("engine", ""), "A.fsdp_config")

    def rename_key(key: str) -> str:
        for old, new in {**dict(zip(_SAME, _SAME, strict=True)), **_RENAMED}.items():
            if key == old or (old.endswith(".") and key.startswith(old)):
                return key_of(new.format(engine=engine_prefix) + key[len(old) :])
        return key

    try:
        longest = int(given_values.get("data.max_length", 1024))
    except ValueError as e:
        raise UserError(f"data.max_length={given_values['data.max_length']}: it must be a number of tokens") from e
    lengths = [f"data.max_prompt_length={longest // 2}", f"data.max_response_length={longest - longest // 2}"]
    chats = not is_older or given_values.get("data.multiturn.enable", "").lower() == "true"
    defaults = _DEFAULTS + (_OLD if is_older else _NEW) + ("" if chats else _PAIRS)
    defaults += "".join(text for choice, text in _OF_CHOICE.items() if choice in words)
    default = lengths + [word for word in defaults.split() if word.partition("=")[0] not in given_values]
    known = older.Version(code=version.code) if version else None
    translation = translate([*default, *words], main=main, root=root, folder=folder, rename=rename_key, version=known)
    names = table.by_name(sft_default())
    values = {_sft_name(name): value for name, value in translation.settings.items()}
    lines = [
        _sft_line(line, names)
        for line in translation.lines
        if (line.text not in default or line.kind == "missing") and line.text.partition("=")[0] not in _GROUPS
    ]
    if chats:  # without pairs of texts
        values = {name: value for name, value in values.items() if name not in ("data.prompt_key", "data.response_key")}
    else:
        values["data.prompt_role"] = "user"
    values["data.learn_turns"] = "all" if chats else "last"
    return dataclasses.replace(
        translation,
        settings={name: value for name, value in values.items() if name in names},
        overridden=frozenset(_sft_name(name) for name in translation.overridden),
        lines=tuple(lines),
        notes=(),
    )


def _sft_name(name: str) -> str:
    return name.replace("actor.", "optim.", 1) if name.startswith("actor.") else name


def _sft_line(line: Line, known_settings: dict[str, object]) -> Line:
    """Returns the line with jppo.sft's name of a setting, or the reason why it has none."""
    name, _, value = line.why.partition("=")
    if line.kind != "same":
        return dataclasses.replace(line, why=line.why.replace("actor.", "optim."))
    if _sft_name(name) in known_settings:
        return dataclasses.replace(line, why=f"{_sft_name(name)}={value}")
    if name == "trainer.nnodes" and value != "1":
        return dataclasses.replace(line, kind="missing", why="jppo.sft runs on one host")
    why = _OF_PPO.get(name)
    return dataclasses.replace(line, kind="needless" if why else "missing", why=why or f"jppo.sft has no {name}")
