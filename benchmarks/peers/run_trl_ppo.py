"""TRL's PPOTrainer on the task `randomwalks`: `randomwalks.py` starts it.

    PYTHON run_trl_ppo.py WORK.json

WORK.json has the paths of model and prompts and the recipe's numbers. The newest release with a PPOTrainer is 1.12,
under trl.experimental. Its reward model is a module around the task's reward function. The last line on stdout is JSON:
seconds and mean score of each step.
"""

import json
import os
import pathlib
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import datasets
import torch
import transformers
import trl
from trl.experimental.ppo import PPOConfig, PPOTrainer

from examples.randomwalks import compute_score


class Ids(torch.nn.Module):
    """A backbone whose hidden states are the token ids, [B, T, 1]; those of padding are 0."""

    def forward(self, input_ids, **_):
        return SimpleNamespace(hidden_states=[input_ids.unsqueeze(-1)])


class RuleReward(torch.nn.Module):
    """A reward model whose every position has the optimality of the sequence's text."""

    base_model_prefix = "backbone"

    def __init__(self, tokenizer):
        super().__init__()
        self.backbone, self.tokenizer = Ids(), tokenizer

    def score(self, ids):
        texts = self.tokenizer.batch_decode(ids.squeeze(-1), skip_special_tokens=True)
        scores = [compute_score("randomwalks", text[1:], text[0]) for text in texts]
        return torch.tensor(scores)[:, None, None].expand(*ids.shape)


class Steps(transformers.TrainerCallback):
    """Collects seconds and mean score of each step."""

    def __init__(self):
        self.seconds, self.scores, self.began = [], [], 0.0

    def on_train_begin(self, args, state, control, **_):
        self.began = time.perf_counter()

    def on_log(self, args, state, control, logs, **_):
        self.scores.append(logs["objective/scores"])

    def on_step_end(self, args, state, control, **_):
        self.seconds.append(time.perf_counter() - self.began)
        self.began = time.perf_counter()


def arguments(work: dict[str, Any], folder: str) -> PPOConfig:
    """Returns jppo's numbers under TRL's names.

    TRL takes an optimizer step per mini-batch only if a step's batch is not accumulated.
    """
    return PPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=work["responses"],
        gradient_accumulation_steps=1,
        num_mini_batches=work["responses"] // work["mini_batch"],
        local_rollout_forward_batch_size=work["responses"],
        num_ppo_epochs=work["epochs"],
        total_episodes=work["steps"] * work["responses"],
        response_length=work["max_tokens"],
        stop_token="eos",
        temperature=1.0,
        kl_coef=0.0,
        gamma=1.0,
        lam=work["lam"],
        cliprange=work["clip_ratio"],
        cliprange_value=work["cliprange_value"],
        vf_coef=work["vf_coef"],
        learning_rate=work["lr"],
        lr_scheduler_type="constant",
        adam_beta1=work["betas"][0],
        adam_beta2=work["betas"][1],
        adam_epsilon=1e-8,
        weight_decay=work["weight_decay"],
        num_sample_generations=0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=work["seed"],
    )


def main(path: str) -> None:
    """Trains and prints versions, seconds and scores."""
    work = json.loads(pathlib.Path(path).read_text())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.set_seed(work["seed"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(work["model"])
    lines = pathlib.Path(work["train_files"]).read_text().splitlines()
    rows = [{"input_ids": tokenizer(json.loads(line)["prompt"])["input_ids"]} for line in lines]
    steps = Steps()
    policy, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32) for _ in range(2)
    )
    trainer = PPOTrainer(
        args=arguments(work, tempfile.mkdtemp()),
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=RuleReward(tokenizer),
        value_model=transformers.AutoModelForSequenceClassification.from_pretrained(
            work["model"], num_labels=1, dtype=torch.float32
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[steps],
    )
    trainer.train()
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"versions": versions, "seconds": steps.seconds, "scores": steps.scores}))


if __name__ == "__main__":
    main(sys.argv[1])
