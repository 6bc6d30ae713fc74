"""transformers and torch: what one writes with them, by the losses of PPO as verl has them.

Rows are padded to the longest that may be, the attention mask says what is real, attention is torch's SDPA, the
language head is applied to the positions of the response alone, bfloat16 is autocast over weights in float32. A
mini-batch is cut into micro-batches of the size that is the fastest here.
"""

import os

import numpy as np
import torch
import transformers
from worker import Parts, Stage, Work, best_of, serve, timed

MICRO_BATCHES = (4, 8, 16, 32)


def clipped(logp, old, advantage, hyperparameters):
    """The clipped surrogate of each token, with the bound of the dual clip."""
    ratio = torch.exp(logp - old)
    low, high = 1.0 - hyperparameters["clip_ratio"], 1.0 + hyperparameters["clip_ratio"]
    held = torch.maximum(-advantage * ratio, -advantage * torch.clamp(ratio, low, high))
    bound = torch.where(advantage < 0, -advantage * hyperparameters["clip_ratio_c"], torch.inf)
    return torch.minimum(held, bound)


def clipped_value(value, old, returns, hyperparameters):
    """Half the squared error of each token, of the value or of the clipped value, whichever is larger."""
    near = torch.clamp(value, old - hyperparameters["cliprange_value"], old + hyperparameters["cliprange_value"])
    return 0.5 * torch.maximum((value - returns) ** 2, (near - returns) ** 2)


class Batch:
    """The work as tensors."""

    def __init__(self, work: Work):
        self.tokens = torch.from_numpy(work.tokens.astype(np.int64))
        self.valid = torch.from_numpy(work.valid.astype(np.int64))
        self.mask = torch.from_numpy(work.mask.astype(np.float32))
        self.advantage, self.returns, self.value = (
            torch.from_numpy(x) for x in (work.advantage, work.returns, work.value)
        )
        self.prompt = work.prompt
        self.old = torch.zeros_like(self.mask)

    def mean(self, x: torch.Tensor) -> float:
        """Over the tokens of the responses."""
        return float((x * self.mask).sum() / self.mask.sum())


def logprobs(model, batch: Batch, at: slice) -> torch.Tensor:
    """[b, N] log-probs of the responses."""
    tokens, N = batch.tokens[at], batch.mask.shape[1]
    out = model(input_ids=tokens, attention_mask=batch.valid[at], logits_to_keep=N + 1, use_cache=False)
    logits, targets = out.logits[:, :-1].float(), tokens[:, batch.prompt :]
    return logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)


def values(model, batch: Batch, at: slice) -> torch.Tensor:
    """[b, N] values of the states before the responses' tokens."""
    out = model(input_ids=batch.tokens[at], attention_mask=batch.valid[at], use_cache=False)
    return out.logits[:, batch.prompt - 1 : -1, 0].float()


def descend(model, optimizer, batch: Batch, work: Work, micro: int, loss, *, whole: bool = True) -> float:
    """Runs one epoch, with one step per mini-batch by the mean over its tokens; returns the mean loss.

    Not whole: the first mini-batch alone.
    """
    total, minis = 0.0, range(0, len(batch.tokens) if whole else 1, work.mini_batch)
    for begin in minis:
        count = batch.mask[begin : begin + work.mini_batch].sum()
        for start in range(begin, begin + work.mini_batch, micro):
            at = slice(start, start + micro)
            with torch.autocast("cpu", torch.bfloat16, enabled=work.dtype == "bfloat16"):
                each = loss(model, at)
            share = (each * batch.mask[at]).sum() / count
            share.backward()
            total += float(share.detach()) / len(minis)
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.how["grad_clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total


def adamw(model, hyperparameters) -> torch.optim.Optimizer:
    """The optimizer, in torch's fused form."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=hyperparameters["lr"],
        betas=hyperparameters["betas"],
        weight_decay=hyperparameters["weight_decay"],
        fused=True,
    )


def begin(work: Work) -> tuple[dict, dict[str, Stage]]:
    """Prepares and warms up both models."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    hyperparameters, batch = work.how, Batch(work)
    load = dict(dtype=torch.float32, attn_implementation="sdpa")
    actor = transformers.AutoModelForCausalLM.from_pretrained(work.model, **load).train()
    described = transformers.AutoConfig.from_pretrained(work.model, num_labels=1, classifier_dropout=0.0)
    critic = transformers.AutoModelForTokenClassification.from_pretrained(work.model, config=described, **load).train()
    actor_opt, critic_opt = adamw(actor, hyperparameters), adamw(critic, hyperparameters)

    @torch.no_grad()
    def score(micro: int, *, whole: bool = True) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=work.dtype == "bfloat16"):
            starts = range(0, len(batch.tokens) if whole else work.mini_batch, micro)
            return torch.cat([logprobs(actor, batch, slice(start, start + micro)) for start in starts])

    def actor_loss(model, at: slice) -> torch.Tensor:
        return clipped(logprobs(model, batch, at), batch.old[at], batch.advantage[at], hyperparameters)

    def critic_loss(model, at: slice) -> torch.Tensor:
        return clipped_value(values(model, batch, at), batch.value[at], batch.returns[at], hyperparameters)

    first = score(MICRO_BATCHES[0])
    batch.old.copy_(first)
    of_actor, of_critic = (actor, actor_opt, batch, work), (critic, critic_opt, batch, work)
    micro = {
        "logprobs": best_of(MICRO_BATCHES, lambda n: score(n, whole=False)),
        "actor": best_of(MICRO_BATCHES, lambda n: descend(*of_actor, n, actor_loss, whole=False)),
        "critic": best_of(MICRO_BATCHES, lambda n: descend(*of_critic, n, critic_loss, whole=False)),
    }

    def scored() -> tuple[Parts, float]:
        seconds, check = timed(lambda: batch.mean(score(micro["logprobs"])))
        return {"logprobs": seconds}, check

    def updated() -> tuple[Parts, float]:
        on_actor, loss = timed(lambda: descend(*of_actor, micro["actor"], actor_loss))
        on_critic, _ = timed(lambda: descend(*of_critic, micro["critic"], critic_loss))
        return {"actor": on_actor, "critic": on_critic}, loss

    report = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "micro_batches": micro,
        "threads": torch.get_num_threads(),
        "logp": batch.mean(first),
    }
    return report, {"logprobs": scored, "update": updated}


if __name__ == "__main__":
    serve(begin)
