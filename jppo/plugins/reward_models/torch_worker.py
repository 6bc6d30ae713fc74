"""The worker process of `model_process.py`: a transformers sequence or token classifier in torch.

    python -m jppo.plugins.reward_models.torch_worker DIRECTORY PARENT_PID DEVICE DTYPE THREADS KIND

Messages are JSON with a length prefix of eight bytes. The first output is {"ready": {...}} or {"refused": why}. Each
input {"ids": [[...], ...]} is answered by {"scores": [...]} or {"error": why}. A token classifier (KIND is token) also
reads "positions", and gives the log-odds of each text there. The interpreter needs only torch and transformers. The
process ends with its parent.
"""

import json
import os
import struct
import sys
import threading
import time
from typing import Any, BinaryIO

import torch
import transformers

_POLL_S = 0.5


class Refused(Exception):
    """The directory holds no reward model."""


def main(directory: str, parent: int, device: str, dtype: str, threads: int, kind: str) -> None:
    """Answers requests until its input ends or its parent is gone."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with messages
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    torch.set_num_threads(threads)
    try:
        model = load_classifier(directory, device=device, dtype=dtype, kind=kind)
    except Refused as e:
        _write_message(replies, {"refused": str(e)})
        return
    _write_message(replies, {"ready": {"device": device}})
    while (message := _read_message(sys.stdin.buffer)) is not None:
        try:
            ids = message["ids"]
            scores = score_at(model, ids, message["positions"]) if kind == "token" else score(model, ids)
            _write_message(replies, {"scores": scores})
        except BrokenPipeError:
            return
        except Exception as e:  # of this batch only, such as out of memory
            _write_message(replies, {"error": f"{type(e).__name__}: {e}"})


def load_classifier(directory: str, *, device: str, dtype: str, kind: str = "sequence") -> Any:
    """Loads the model with all weights; Refused if some are missing or it has too many labels."""
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as e:  # a family that transformers lacks
        raise Refused(
            f"transformers cannot read its config.json, and a model's own code (auto_map) is not run: {str(e)[:200]};"
            " reward.function=PATH.py:compute_score can run any model, and reward.judge.* asks a server"
        ) from e
    if config.num_labels not in ((1, 2) if kind == "token" else (1,)):
        raise Refused(f"config.json gives it num_labels={config.num_labels}; a reward model has one")
    has_soft_caps = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    try:
        model, info = getattr(transformers, f"AutoModelFor{kind.title()}Classification").from_pretrained(
            directory,
            config=config,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            local_files_only=True,
            **({"attn_implementation": "eager"} if has_soft_caps else {}),  # the only implementation with soft caps
        )
    except (OSError, ValueError, RuntimeError) as e:  # no weights, unknown class, other shapes
        raise Refused(str(e)) from e
    if info["missing_keys"]:
        names = ", ".join(sorted(info["missing_keys"])[:3])
        raise Refused(f"its weights lack {names}, which would be random; a reward model is a {kind} classifier")
    return model.eval().to(device)


def score(model: Any, ids: list[list[int]]) -> list[float]:
    """Returns the logit of each sequence: in one pass if the model has a padding token, otherwise one by one."""
    pad = model.config.get_text_config().pad_token_id
    if pad is None and len(ids) > 1:
        return [score(model, [sequence])[0] for sequence in ids]
    logits = _logits(model, ids)
    if logits.shape != (len(ids), 1):
        raise ValueError(f"the model gives logits of shape {list(logits.shape)}, not {[len(ids), 1]}")
    scores: list[float] = logits[:, 0].tolist()
    return scores


def score_at(model: Any, ids: list[list[int]], positions: list[list[int]]) -> list[list[float]]:
    """Returns the log-odds of each sequence at its places: its logit, or of two labels the difference."""
    logits = _logits(model, ids)  # [texts, tokens, labels]
    odds = logits[..., -1] - (logits[..., 0] if logits.shape[-1] == 2 else 0)
    return [odds[i, columns].tolist() for i, columns in enumerate(positions)]


def _logits(model: Any, ids: list[list[int]]) -> Any:
    """Returns the logits of the padded sequences, [texts, labels] or [texts, tokens, labels] f32."""
    pad, longest = model.config.get_text_config().pad_token_id or 0, max(map(len, ids))
    tokens = torch.tensor([sequence + [pad] * (longest - len(sequence)) for sequence in ids])
    mask = torch.tensor([[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in ids])
    with torch.inference_mode():
        return model(input_ids=tokens.to(model.device), attention_mask=mask.to(model.device)).logits.float()


def _read_message(stream: BinaryIO) -> Any:
    """Reads the next message; None at the end."""
    prefix = stream.read(8)
    if len(prefix) < 8:
        return None
    (size,) = struct.unpack(">Q", prefix)
    body = stream.read(size)
    return json.loads(body) if len(body) == size else None


def _write_message(stream: BinaryIO, message: Any) -> None:
    body = json.dumps(message).encode()
    stream.write(struct.pack(">Q", len(body)) + body)
    stream.flush()


def _exit_with_parent(parent: int) -> None:
    """Ends this process when its parent has ended; runs in a thread."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), sys.argv[6])
