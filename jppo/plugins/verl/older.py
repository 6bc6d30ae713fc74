"""The meaning of names in older versions of verl and in its forks, by the sources of a checkout or by a version."""

import dataclasses
import fractions
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from jppo.errors import UserError
from jppo.plugins.verl.compose import TUNING, find_main, main_of, read_file, verl_of
from jppo.plugins.verl.derived import fully_async, training_engine
from jppo.plugins.verl.name import GetKey, key_of, value_or
from jppo.plugins.verl.own_code import changed_functions

# What older versions lack: by its name an expression that the sources of newer ones have, and the first version.
_FEATURES = {
    "kl in reward": (r"use_kl_in_reward", (0, 3, 1)),
    "two clips": (r"clip_ratio_low", (0, 3, 1)),
    "dual clip": (r"clip_ratio_c\b", (0, 3, 1)),
    "optional filter": (r"filter_overlong_prompts", (0, 3)),
    "sampled tests": (r"val_kwargs", (0, 3)),
    "mini-batches of prompts": (r"actor\.ppo_mini_batch_size \*= self\.config\.rollout\.n\b|rollout_n\b", (0, 2)),
    "critic's of prompts": (r"rollout_n\b", (0, 4)),
    "half of the squares": (r"vf_loss = 0\.5 \*", (0, 0)),  # 0.4.0 alone lacks it
    "warm-up from 1": (r"critic_warmup <= self\.global_steps|rollout_n\b", (0, 2)),
    "gen batches": (r"gen_batch_size", (0, 4)),
    "engine of FSDP": (r"(?s)\A(?!.*self\.config\.grad_clip)", (0, 8)),
    "cosine": (r"actor_lr_scheduler = get_cosine", (0, 4)),  # of FSDP's older workers
    "V1": (r"trainer\.use_v1\b", (0, 9)),
    "group filter": (r"filter_groups_metric|algorithm\.filter_groups\b", (0, 9)),
    "steps of publishes": (r"train_batch_size // self\.parameter_sync_step", (0, 9)),
}
GROUPS = (key_of("R.n_agent"), "data.n_samples", "agent_grpo.n")  # forks' numbers of samples, beside rollout.n
_NEW = re.compile(  # keys that verl 0.3 does not have
    r"algorithm\.(use_kl_in_reward|norm_adv|filter_groups|rollout_)|trainer\.(val_before|log_val|device|use_|v1|rollout_d)"
    r"|algorithm\.adv_estimator=(opo|gpg|gdpo|distill|\w*token_baseline|\w+_(vectorized|pass\w*|baseline))"
    r"|actor_rollout_ref\.(actor|ref)\.(clip_ratio_|loss_agg|policy_loss|checkpoint\.save|strategy=fsdp2|entropy_(ch|fr))"
    r"|actor_rollout_ref\.(model\.(lora|use_sh|use_li|use_fu)|rollout\.(mode|multi_turn|agent|engine_kwargs|calculate))"
    r"|reward\.|ray_(init|kwargs)|model_engine|async_training|distillation|global_profiler|data\.(custom_cls|reward_fn_key)"
    r"|reward_model\.(launch|sandbox|overlong|reward_kwargs)|actor_rollout_ref\.\w+\.(\w+\.)?(offload_policy|model_dtype)"
)
_RECIPES, _USUAL = "reward_model.overlong_buffer.", "reward_model.reward_kwargs."  # places of the over-long penalty
_COMMENT = re.compile(r"(?m)^[ \t]*#.*$")
_NO_DUAL_CLIP = 10000.0  # a ratio that no token reaches


@dataclasses.dataclass(frozen=True)
class Version:
    """What the verl of a script lacks, and how that is known."""

    lacks: frozenset[str] = frozenset()
    source: str = "verl 0.9.1"
    known: bool = True
    greedy: bool = False  # tests are greedy without do_sample
    subtracts_kl: bool = False
    rewards_kl: bool = True  # the trainer calls apply_kl_penalty
    filters: bool = True  # the data set leaves out long prompts
    code: pathlib.Path | None = None  # verl/ of the checkout
    unread: tuple[str, ...] = ()  # beginnings of keys that the trainer does not read


def find_version(given: str, main: str, words: Iterable[str], root: str, folder: str) -> Version:
    """Returns the verl of a script: the one given, else of its checkout's sources, else by the keys that it gives."""
    is_dapo = main.endswith("main_dapo")
    unread: tuple[str, ...] = () if is_dapo or not main else (_RECIPES,)
    if given:
        if not (match := re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?\S*", given)):
            raise UserError(f"--verl={given}: no version; give one as in --verl=0.2")
        number = tuple(int(part or 0) for part in match.groups())
        lacks = frozenset(name for name, (_, first) in _FEATURES.items() if number < first)
        lacks |= {"half of the squares"} if number == (0, 4, 0) else set()
        lacks |= {"warm-up from 0"} if (0, 4) <= number < (0, 6) else set()
        unread = (_USUAL,) if is_dapo and number < (0, 6) else unread
        return Version(lacks, f"verl {given}", greedy=number < (0, 7), unread=unread)
    if not main:
        return Version()
    if verl := verl_of(root, folder):
        files = [file for part in ("trainer", "workers", "utils") for file in sorted((verl / part).rglob("*.py"))]
        text = _COMMENT.sub("", "\n".join(map(read_file, files)))
        lacks = frozenset(name for name, (words_of, _) in _FEATURES.items() if not re.search(words_of, text))
        greedy = re.search(r"if not do_sample", text) is not None
        subtracts = re.search(r"policy_loss = policy_loss - kl_loss", text) is not None
        rewards = re.search(r"(?<!def )\bapply_kl_penalty\(", text) is not None
        config = verl / "trainer" / "config"
        if (own := config / "ppo_megatron_trainer.yaml").is_file():
            says = re.search(r"gradient_checkpointing|- model@|- ppo_trainer", read_file(own))
            lacks |= set() if says else {"megatron's checkpointing"}
        lacks |= {"warm-up from 0"} if re.search(r"return min_lr_ratio \+ \(1", text) else set()
        lacks |= {"two clips always"} if re.search(r"cliprange_low != -1", text) else set()
        dataset = verl / "utils/dataset/rl_dataset.py"
        filters = not dataset.is_file() or "<= self.max_prompt_length" in _COMMENT.sub("", read_file(dataset))
        file = find_main(main, root, folder) or find_main(main, str(verl.parent), folder)
        unread = _unread_places(file, verl) if file else unread
        return Version(lacks, str(verl), True, greedy, subtracts, rewards, filters, verl, unread)
    newer = main.startswith("recipe.") or any(_NEW.match(word) for word in words)
    return Version(known=newer, unread=unread)


def _unread_places(file: pathlib.Path, verl: pathlib.Path) -> tuple[str, ...]:
    """Returns the place of the over-long penalty that a trainer does not read: DAPO's recipe has had its own."""

    def read(name: str, *files: pathlib.Path) -> bool:
        texts = (_COMMENT.sub("", read_file(one)) for one in files if one.is_file())
        return any(re.search(rf"reward(_model)?(\.|\.get\(.|\[.){name}\b", text) for text in texts)

    around = (one for one in file.parent.glob("*.py") if not one.name.startswith("main_"))
    if not read("overlong_buffer", file, *around, verl / "trainer/ppo/reward.py"):
        return (_RECIPES,)
    loops = (verl / "experimental").rglob("*reward*/**/*.py")  # from 0.6 on
    return (_USUAL,) if read("overlong_buffer", file) and not read("reward_kwargs", file, *loops) else ()


def modernize(values: dict[str, Any], get: GetKey, version: Version, main: str = "") -> Iterator[str]:
    """Gives values, in place, the names and meanings of verl 0.9.1; yields what has changed."""
    old, lacks = f"{version.source}: ", version.lacks
    yield from _batch_as_loaded(values, get, version, main)
    yield from _train_as_older_workers(values, get, version)
    samples = _whole(get("R.n"), 1)
    group = samples
    for key in GROUPS:
        group *= _whole(values.get(key), 1)
    mini = _whole(get("A.ppo_mini_batch_size"), 0)
    if mini and (group != samples or "mini-batches of prompts" in lacks):
        responses = mini * (1 if "mini-batches of prompts" in lacks else samples)
        values[key_of("A.ppo_mini_batch_size")] = fractions.Fraction(responses, group)
        if group > 1:
            yield f"{old}ppo_mini_batch_size={mini} is {responses} responses, with {group} for a prompt"
    critic = _whole(values.get("critic.ppo_mini_batch_size"), mini)
    if critic and group > 1 and "critic's of prompts" in lacks:
        values["critic.ppo_mini_batch_size"] = fractions.Fraction(critic, group)
    if group != samples:
        values[key_of("R.n")] = group
    if "kl in reward" in lacks:
        loss = bool(get("A.use_kl_loss"))
        values["algorithm.use_kl_in_reward"] = version.rewards_kl and not loss
        values.setdefault(key_of("A.entropy_coeff"), 0.001)
        if loss or version.rewards_kl:
            yield f"{old}the KL is in the {'loss alone' if loss else 'reward'}, as use_kl_loss={loss} says"
        else:
            yield f"{old}the KL is nowhere: its trainer does not call apply_kl_penalty"
    if "two clips" in lacks:
        for end in ("low", "high"):
            values[key_of(f"A.clip_ratio_{end}")] = get("A.clip_ratio")
    for end in ("low", "high") if "two clips always" in lacks else ():
        if get(f"A.clip_ratio_{end}") == -1:
            values[key_of(f"A.clip_ratio_{end}")] = get("A.clip_ratio")
    if "half of the squares" in lacks and get("algorithm.adv_estimator") == "gae":
        values["critic.optim.clip_grad"] = get("critic.optim.clip_grad") / 2
        yield f"{old}the critic's loss is twice jppo's, so critic.grad_clip is half of verl's"
    if "megatron's checkpointing" in lacks and training_engine(get) == "megatron":
        values[key_of("M.enable_gradient_checkpointing")] = False
    if "dual clip" in lacks:
        values[key_of("A.clip_ratio_c")] = _NO_DUAL_CLIP
    if "optional filter" in lacks:
        values["data.filter_overlong_prompts"] = version.filters
        if version.filters:
            yield f"{old}prompts above data.max_prompt_length are left out"
    if "sampled tests" in lacks or (version.greedy and not get("VAL.do_sample") and get("R.mode") != "async"):
        if get("VAL.temperature"):
            yield f"{old}tests are greedy"
        values[key_of("VAL.temperature")] = 0.0
    if "sampled tests" in lacks:
        values[key_of("VAL.n")] = 1
    if "warm-up from 1" in lacks and _whole(get("trainer.critic_warmup"), 0) > 0:
        values["trainer.critic_warmup"] = get("trainer.critic_warmup") + 1
    if values.get("async_training.use_rollout_log_probs"):  # until 0.8, of the fully asynchronous trainer
        values[key_of("CORRECTION.bypass_mode")] = True


def _batch_as_loaded(values: dict[str, Any], get: GetKey, version: Version, main: str) -> Iterator[str]:
    """Makes the batch of the older trainers, without a filter, the prompts that they load at once."""
    old, lacks = f"{version.source}: ", version.lacks
    is_v1 = main_of(main) in ("", "trainer.main_ppo") and "V1" not in lacks and get("trainer.use_v1") is not False
    filters = main.endswith("main_dapo") or is_v1 or ("V1" in lacks and "group filter" not in lacks)
    if get("algorithm.filter_groups.enable") and not filters and not fully_async(get):
        values["algorithm.filter_groups.enable"] = False
        yield f"{old}the trainer does not read algorithm.filter_groups; no prompts are left out"
    loaded, batch = get("data.gen_batch_size"), get("data.train_batch_size")
    reads = not is_v1 and (main.endswith("main_dapo") or "gen batches" not in lacks) and not fully_async(get)
    if reads and loaded and loaded != batch and not get("algorithm.filter_groups.enable"):
        values["data.train_batch_size"] = loaded
        yield f"{old}a step has data.gen_batch_size={loaded} prompts, without algorithm.filter_groups"


def _train_as_older_workers(values: dict[str, Any], get: GetKey, version: Version) -> Iterator[str]:
    """Gives FSDP's engine the clip and the warm-up of its older workers: `grad_clip`, none by 0 steps, from the end."""
    if "engine of FSDP" not in version.lacks or training_engine(get) != "fsdp":
        return
    actor = "actor_rollout_ref.actor"
    for section in (actor, "critic") if get("trainer.use_legacy_worker_impl") != "disable" else ():
        if "cosine" in version.lacks and get(schedule := f"{section}.optim.lr_scheduler_type") != "constant":
            yield f"{version.source}: the learning rate is constant, whatever {schedule}={get(schedule)} says"
            values[schedule] = "constant"
        if get(f"{section}.optim.lr_warmup_steps") == 0:
            values[f"{section}.optim.lr_warmup_steps_ratio"] = 0.0
        if "warm-up from 0" in version.lacks and section == actor and get("A.optim.lr_scheduler_type") == "cosine":
            values[f"{actor}.optim.init_lr_ratio"] = get("A.optim.min_lr_ratio")
        key, clip = f"{section}.optim.clip_grad", value_or(get(f"{section}.grad_clip"), 1.0)
        if values.get(key, clip) != clip:
            yield f"{version.source}: {section}.grad_clip={clip} clips, not optim.clip_grad={values[key]}"
        values[key] = clip


def faults(get: GetKey, version: Version, main: str) -> Iterator[tuple[str, str]]:
    """Yields why the command may not be the script's run: an unknown version, or another trainer's code."""
    if not version.known:
        yield (
            "the version of verl",
            "unknown: until 0.3 the KL is in the reward without use_kl_loss, entropy_coeff is 0.001, and until 0.2 long"
            " prompts are left out; 0.9.1 is taken: give --verl=0.9 or --verl=0.2 behind the script",
        )
    if main_of(main).startswith("trainer.") and not re.search(r"(^|\.)verl\.trainer\.", main):
        yield main, "a trainer of another package than verl; its own code is not translated"
    if version.code:
        yield from changed_functions(version.code, get, tuning=main_of(main) in TUNING)
    if not version.rewards_kl and "kl in reward" not in version.lacks and get("algorithm.use_kl_in_reward"):
        yield "algorithm.use_kl_in_reward", f"the trainer in {version.source} does not call apply_kl_penalty"
    if "steps of publishes" in version.lacks and get("trainer.v1.trainer_mode") == "separate_async":
        yield "trainer.v1.trainer_mode=separate_async", f"{version.source} counts updates as steps, jppo publishes"
    if version.subtracts_kl and get("A.use_kl_loss"):
        yield key_of("A.use_kl_loss"), f"the loss in {version.source} subtracts the KL, and jppo adds it"


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
