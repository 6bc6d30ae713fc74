"""TRL's GRPOTrainer as a user would run it, on the prompts and the reward of a task: `grpo.py` starts it.

    PYTHON run_trl.py WORK.json

WORK.json has the paths of model and prompts, the reward function and the recipe's numbers (`grpo.py` writes it). TRL
samples with transformers' `generate`, its engine where no GPU is. The KL to the starting model is in the loss. The
seconds of a stage are those of the trainer's own functions. The last line on stdout is JSON: a line of seconds, reward
and KL per step.
"""

import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import datasets
import torch
import transformers
import trl

# jppo's stage: functions of the trainer. A pass is the policy's or the reference's by its model.
STAGES = {"gen": "_generate", "reward": "_calculate_rewards", "logprobs": "_get_per_token_logps_and_entropies"}


def reward_function(place: str) -> Callable[..., list[float]]:
    """Returns the task's compute_score as TRL calls it; conversations come as lists of messages."""
    path, _, name = place.rpartition(":")
    spec = importlib.util.spec_from_file_location("reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    score = getattr(module, name)

    def reward(completions, data_source, ground_truth, **_):
        rows = zip(data_source, completions, ground_truth, strict=True)
        return [score(source, messages[0]["content"], truth)["score"] for source, messages, truth in rows]

    return reward


class Timed(trl.GRPOTrainer):
    """The trainer, with the seconds of its stages by step."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.seconds: dict[str, float] = defaultdict(float)
        self.scoring = False  # log-probs outside of an update
        for stage, name in STAGES.items():
            setattr(self, name, self._timed(stage, getattr(self, name)))

    def _timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if stage == "logprobs" and not self.scoring:
                return function(*args, **kwargs)
            name = {"logprobs": "ref" if args and args[0] is self.ref_model else "old_log_prob"}.get(stage, stage)
            began = time.perf_counter()
            output = function(*args, **kwargs)
            self.seconds[name] += time.perf_counter() - began
            return output

        return timed

    def _generate_and_score_completions(self, inputs):
        self.scoring = True
        output = super()._generate_and_score_completions(inputs)
        self.scoring = False
        return output


class Steps(transformers.TrainerCallback):
    """Collects a line per step of the recipe, which is several optimizer steps."""

    def __init__(self, optimizer_steps: int):
        self.each, self.lines, self.trainer, self.began = optimizer_steps, [], None, 0.0
        self.rewards: list[float] = []

    def on_train_begin(self, args, state, control, **_):
        self.began = time.perf_counter()

    def on_log(self, args, state, control, logs, **_):
        if "reward" in logs:
            self.rewards.append(logs["reward"])

    def on_step_end(self, args, state, control, **_):
        if state.global_step % self.each:
            return
        seconds = dict(self.trainer.seconds) | {"step": time.perf_counter() - self.began}
        seconds["update_actor"] = seconds["step"] - sum(v for name, v in seconds.items() if name != "step")
        self.lines.append(seconds)
        self.trainer.seconds.clear()
        self.began = time.perf_counter()


def arguments(work: dict[str, Any], folder: str) -> trl.GRPOConfig:
    """Returns jppo's numbers under TRL's names; one optimizer step per mini-batch."""
    steps = work["responses"] // work["mini_batch"]
    return trl.GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=work["micro_batch"],
        gradient_accumulation_steps=work["mini_batch"] // work["micro_batch"],
        generation_batch_size=work["responses"],
        num_generations=work["n"],
        max_completion_length=work["max_tokens"],
        max_steps=work["steps"] * steps,
        temperature=work["temperature"],
        loss_type="dapo",
        beta=work["kl_coef"],
        epsilon=work["clip_ratio"],
        delta=work["clip_ratio_c"],
        learning_rate=work["lr"],
        adam_beta1=work["betas"][0],
        adam_beta2=work["betas"][1],
        weight_decay=work["weight_decay"],
        max_grad_norm=work["grad_clip"],
        optim="adamw_torch_fused",
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=work["seed"],
    )


def main(path: str) -> None:
    """Trains and prints seconds, memory and metrics."""
    work = json.loads(pathlib.Path(path).read_text())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rows = [json.loads(line) for line in pathlib.Path(work["train_files"]).read_text().splitlines()]
    steps = Steps(work["responses"] // work["mini_batch"])
    trainer = Timed(
        model=transformers.AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32),
        reward_funcs=reward_function(work["reward"]),
        args=arguments(work, tempfile.mkdtemp()),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(work["model"]),
        callbacks=[steps],
    )
    steps.trainer = trainer
    trainer.train()
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"versions": versions, "steps": steps.lines, "rewards": steps.rewards}))


if __name__ == "__main__":
    main(sys.argv[1])
