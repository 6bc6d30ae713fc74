"""What no translation could mean: models that see or hear, float16, a teacher that jppo lacks; and foreign tools."""

import pathlib
import re
from collections.abc import Callable
from typing import Any

import yaml

from jppo.errors import expanded
from jppo.verl.distillation import untaught
from jppo.verl.name import Look

_SEES = re.compile(
    r"(?i)(?<![a-z])(vl|vlm|vla|vision|omni|llava\w*|internvl\w*|minicpm-?[vo]\w*|pixtral|audio|video)(?![a-z])"
)


_LACKING = re.compile(
    r"(?i)(?<![a-z])(seed[-_]?oss|glm[-_]?\d|chatglm|mimo|hy[-_]?v?3|hunyuan|nemotron|minicpm|minimax|internlm|baichuan"
    r"|ernie|deepseek[-_]v(3\.2|4))"
)
_UNLIKE_LLAMA = re.compile(
    r"(?i)(?<![a-z])(\d+x\d+b|a\d+(\.\d+)?b|moe|\w*moe|mixtral|moonlight|kimi|gpt[-_]?oss|qwen3[-_]?next|qwen3[._]?5"
    r"|deepseek[-_](v[23]|coder-v2|r1(?!-distill))|dsv[23])(?![a-z])"
)


def unlike_llama(look: Look) -> bool:
    """Whether a model has experts, latent attention or gated delta nets, by its settings or its published name."""
    experts = ("A.megatron.expert_model_parallel_size", "R.expert_parallel_size")
    named = _UNLIKE_LLAMA.search(str(look("M.path")).rstrip("/").rpartition("/")[2])
    return bool(named or look("R.enable_rollout_routing_replay") or any((look(key) or 1) > 1 for key in experts))


def sees(key: str, value: Any, _: Look) -> str:
    """Why a key asks for a model that sees or hears, or ''."""
    keys = ("data.image_key", "data.video_key", "data.audio_key", "actor_rollout_ref.rollout.limit_images")
    if (key in keys and value is not None) or (key == "actor_rollout_ref.actor.freeze_vision_tower" and value):
        return "jppo's models read text"
    if key == "actor_rollout_ref.model.path" and _SEES.search(str(value).rstrip("/").rpartition("/")[2]):
        return "jppo's models read text, and this one has images, video or sound"
    if key in ("data.train_files", "data.val_files") and re.search("geo3k|geometry3k", str(value)):
        return "jppo's models read text, and Geometry3k has images"
    return ""


def lacking(key: str, value: Any, _: Look) -> str:
    """Why a key asks for a family of models that jppo lacks, by a published name, or ''."""
    found = _LACKING.search(str(value).rstrip("/").rpartition("/")[2])
    if key != "actor_rollout_ref.model.path" or not found or (expanded(str(value)) / "config.json").is_file():
        return ""
    return f"jppo has no {found[0]} models; docs/architecture.md lists its families"


def halves(key: str, value: Any, _: Look) -> str:
    """Why a key asks for training in float16, or ''."""
    typed = "dtype" in key and not key.startswith(("actor_rollout_ref.rollout.", "reward."))
    half = typed and str(value).lower() in ("fp16", "float16", "half", "torch.float16")
    if half or (key.endswith(".fp16") and value):
        return "training in float16; bfloat16 has the range of float32 and needs no loss scaling"
    return ""


REFUSED: tuple[Callable[[str, Any, Look], str], ...] = (sees, lacking, halves, untaught)


def foreign_tools(path: str) -> str:
    """Returns the classes of verl's in a YAML file of tools, if it can be read."""
    try:
        found = yaml.safe_load(pathlib.Path(path).expanduser().read_text(encoding="utf-8"))
        names = [str(tool["class_name"]) for tool in found["tools"]]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return ""
    return ", ".join(name for name in names if name.startswith(("verl.", "recipe.")))
