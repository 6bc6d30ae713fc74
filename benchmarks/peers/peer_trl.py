"""TRL: the log-probs, the loss and the optimizer of its GRPOTrainer, on batches that are given.

TRL has no trainer with a critic, so that the critic's update is left out. Called are, of the trainer that a user would
make: `_get_per_token_logps_and_entropies` for log-probs, without the entropy, and for an update `compute_loss`, with
its loss `dapo` (a mean over the tokens), then accelerate's backward pass and clipping, and the optimizer that
`create_optimizer` makes. The loss takes the entropy, too, as it always does. What samples and grades is not called.
"""

import os
import tempfile

import datasets
import torch
import transformers
import trl
from peer_torch import Batch
from worker import Parts, Stage, Work, best_of, serve, timed

MICRO_BATCHES = (4, 8, 16, 32)


def make_trainer(work: Work, folder: str) -> trl.GRPOTrainer:
    """The trainer with jppo's numbers; gradients are not checkpointed, which would cost a forward pass."""
    hyperparameters = work.how
    args = trl.GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=work.dtype == "bfloat16",
        gradient_checkpointing=False,
        per_device_train_batch_size=work.mini_batch,
        num_generations=2,
        loss_type="dapo",
        beta=0.0,
        epsilon=hyperparameters["clip_ratio"],
        delta=hyperparameters["clip_ratio_c"],
        temperature=1.0,
        learning_rate=hyperparameters["lr"],
        adam_beta1=hyperparameters["betas"][0],
        adam_beta2=hyperparameters["betas"][1],
        weight_decay=hyperparameters["weight_decay"],
        max_grad_norm=hyperparameters["grad_clip"],
        optim="adamw_torch_fused",
        lr_scheduler_type="constant",
        report_to="none",
    )
    return trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=datasets.Dataset.from_list([{"prompt": "w1"}] * work.mini_batch),
        processing_class=transformers.AutoTokenizer.from_pretrained(work.model, pad_token="w0"),
    )


def descend(trainer: trl.GRPOTrainer, batch: Batch, work: Work, micro: int, *, whole: bool = True) -> float:
    """Runs one epoch or its first mini-batch, with one step per mini-batch; returns the mean loss."""
    model, accelerator, P = trainer.model, trainer.accelerator, work.prompt
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = work.mini_batch // micro
    total, minis = 0.0, range(0, len(batch.tokens) if whole else 1, work.mini_batch)
    for begin in minis:
        count = batch.mask[begin : begin + work.mini_batch].sum()
        for start in range(begin, begin + work.mini_batch, micro):
            at = slice(start, start + micro)
            inputs = {
                "prompt_ids": batch.tokens[at, :P],
                "prompt_mask": batch.valid[at, :P],
                "completion_ids": batch.tokens[at, P:],
                "completion_mask": batch.valid[at, P:],
                "advantages": batch.advantage[at],
                "old_per_token_logps": batch.old[at],
                "num_items_in_batch": count,
            }
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, inputs)
            accelerator.backward(loss)
            total += float(loss.detach()) / len(minis)
        accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    return total


def begin(work: Work) -> tuple[dict, dict[str, Stage]]:
    """Prepares and warms up the trainer."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    batch = Batch(work)
    trainer = make_trainer(work, tempfile.mkdtemp())
    trainer.create_optimizer()
    trainer.model.train()
    rows = batch.tokens, batch.valid

    @torch.no_grad()
    def score(micro: int, *, whole: bool = True) -> torch.Tensor:
        tokens, valid = (x if whole else x[: work.mini_batch] for x in rows)
        N = batch.mask.shape[1]
        return trainer._get_per_token_logps_and_entropies(trainer.model, tokens, valid, N, batch_size=micro)[0]

    first = score(MICRO_BATCHES[0])
    batch.old.copy_(first)
    micro = {
        "logprobs": best_of(MICRO_BATCHES, lambda n: score(n, whole=False)),
        "actor": best_of(MICRO_BATCHES, lambda n: descend(trainer, batch, work, n, whole=False)),
    }

    def scored() -> tuple[Parts, float]:
        seconds, check = timed(lambda: batch.mean(score(micro["logprobs"])))
        return {"logprobs": seconds}, check

    def updated() -> tuple[Parts, float]:
        seconds, loss = timed(lambda: descend(trainer, batch, work, micro["actor"]))
        return {"actor": seconds}, loss

    report = {
        "versions": {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "micro_batches": micro,
        "threads": torch.get_num_threads(),
        "logp": batch.mean(first),
    }
    return report, {"logprobs": scored, "update": updated}


if __name__ == "__main__":
    serve(begin)
