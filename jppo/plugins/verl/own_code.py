"""Functions of a checkout's verl that decide an update and are none of verl's: no key says what they change."""

import ast
import hashlib
import io
import pathlib
import re
import textwrap
import tokenize
from collections.abc import Iterator, Mapping

from jppo.plugins.verl.compose import read_file
from jppo.plugins.verl.derived import training_engine
from jppo.plugins.verl.known_functions import KNOWN
from jppo.plugins.verl.name import GetKey

_SCORING = ("naive", "batch", "dapo", "prime")
_SCORES = ("__init__", "gsm8k", "math", "math_reward", "math_dapo")
_MANAGERS = ("workers/reward_manager", "experimental/reward_loop/reward_manager")
# By file below verl/: the functions that decide an update.
FUNCTIONS = {
    "trainer/ppo/core_algos.py": r"compute_\w+|kl_penalty\w*|agg_loss",
    "trainer/ppo/ray_trainer.py": "apply_kl_penalty|compute_advantage|compute_response_mask",
    "workers/actor/dp_actor.py": "update_policy",
    "workers/critic/dp_critic.py": "update_critic",
    "workers/actor/megatron_actor.py": "update_policy|forward_backward_batch|make_minibatch_iterator",
    "workers/fsdp_workers.py": "_build_model_optimizer|_build_critic_model_optimizer",
    "workers/utils/losses.py": "ppo_loss|value_loss|sft_loss",
    **{f"{home}/{name}.py": "__call__|run_single|compute_scores|verify" for home in _MANAGERS for name in _SCORING},
    **{f"utils/reward_score/{name}.py": r"\w+" for name in _SCORES},
    "trainer/main_ppo.py": "_select_rm_score_fn|_default_compute_score",
    "utils/dataset/rl_dataset.py": "__getitem__|_build_messages|_read_files_and_tokenize|maybe_filter_out_long_prompts",
    "utils/dataset/sft_dataset.py": "__getitem__|_read_files_and_tokenize",
    "utils/dataset/multiturn_sft_dataset.py": "__getitem__|_read_files_and_process|_process_\\w+",
}
TUNING = ("sft_dataset.", "multiturn_sft_dataset.", "losses.sft_loss")


def changed_functions(verl: pathlib.Path, get: GetKey, *, tuning: bool) -> Iterator[tuple[str, str]]:
    """Yields the functions that a script uses and that are not verl's in its checkout: the name, and why that is."""
    for file, names in FUNCTIONS.items():
        path = verl / file
        if not path.is_file():
            continue
        try:
            found = fingerprints(read_file(path), names)
        except (SyntaxError, tokenize.TokenError) as e:
            yield path.stem, f"{path} cannot be read as Python ({e}), so it is not compared with verl's"
            continue
        for name, (line, fingerprint) in found.items():
            known = KNOWN.get(f"{path.stem}.{name}", "")
            if known and fingerprint not in known.split() and _is_used(f"{path.stem}.{name}", get, tuning):
                yield f"{path.stem}.{name}", f"changed in {path}:{line}; no key says how, and jppo has verl's"


def fingerprints(source: str, names: str) -> Mapping[str, tuple[int, str]]:
    """Returns line and fingerprint of the functions of a module that `names` matches, by name.

    It is of the body without docstring, comments, blanks and the last commas of brackets.
    """
    lines, found = source.splitlines(keepends=True), {}
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and re.fullmatch(names, function.name):
            is_docstring = ast.get_docstring(function, clean=False) is not None
            if body := function.body[is_docstring:]:
                text = textwrap.dedent("".join(lines[body[0].lineno - 1 : function.end_lineno]))
                fingerprint = hashlib.sha256(_squeezed(text).encode()).hexdigest()[:6]
                found[function.name] = (function.lineno, fingerprint)
    return found


def _squeezed(text: str) -> str:
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return re.sub(r",(?=[)\]}])", "", "".join("".join(lines).split()).replace("'", '"'))


def _is_used(name: str, get: GetKey, tuning: bool) -> bool:
    """Whether a run with these settings uses a function, by FILE.NAME; when in doubt, it does."""
    estimator, loss = str(get("algorithm.adv_estimator")), str(get("A.policy_loss.loss_mode"))
    in_reward, megatron = get("algorithm.use_kl_in_reward"), training_engine(get) == "megatron"
    if tuning or name.startswith(TUNING):
        return tuning and name.startswith(TUNING)
    if match := re.search(r"\.compute_(\w+?)_(outcome_)?advantage(_return)?$", name):
        return match[1] == estimator
    if match := re.search(r"\.compute_policy_loss_(\w+)$", name):
        return match[1] == loss
    if name.startswith(("dp_", "fsdp_", "megatron_")) and megatron != name.startswith("megatron_"):
        return False
    if name.startswith((*_SCORES, "main_ppo.")):
        return not get("FUNCTION.path")
    if name.endswith(("value_loss", "update_critic", "_build_critic_model_optimizer")):
        return estimator == "gae"
    if name.endswith("entropy_loss"):
        return bool(get("A.entropy_coeff"))
    if name.endswith("apply_kl_penalty"):
        return bool(in_reward)
    if ".kl_penalty" in name:
        return bool(in_reward or get("A.use_kl_loss"))
    file = name.partition(".")[0]
    return file not in _SCORING or file == (get("reward.reward_manager.name") or "naive")
