"""vLLM's workers on a CPU, and schedulers: answers with the experts of every token, or the tokens that top_p etc. kept.

vLLM gets them by `--worker-cls` and `--scheduler-cls`; answers have the form of vLLM's own, which needs its second
model runner and so Triton: `--enable-return-routed-experts`, and `--return-sampling-mask`, which refuses requests that
are greedy or have no top_k. A request names the most kept tokens that it takes in `extra_args`; its answer has no ids
for the whole vocabulary, and at most one more than that.
"""

from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector, AuxRequestOutput
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.cpu_worker import CPUWorker


class RoutingScheduler(Scheduler):
    """Passes the experts from the worker to the answers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.aux_output_connector = AuxOutputSchedulerConnector()


class RoutingWorker(CPUWorker):
    """Keeps the experts of each token by its place in the KV cache, so that cached prefixes have theirs too."""

    returns_experts = True

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Attaches the recorder of experts to the loaded model."""
        super().initialize_from_config(kv_cache_config)
        self._capturer = RoutedExpertsCapturer(self.scheduler_config.max_num_batched_tokens, self.vllm_config)
        bind_routed_experts_capturer(self.model_runner.get_model(), self._capturer)
        slots = kv_cache_config.num_blocks * kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._by_slot = np.zeros((slots, *self._capturer.shape_per_token), self._capturer.output_dtype_name)
        self._returned: dict[str, int] = {}  # tokens of each request whose experts are returned
        self._outputs: dict[str, AuxRequestOutput] = {}

    def execute_model(self, scheduler_output: Any) -> Any:
        """Runs the model and keeps the experts of the tokens that it read."""
        out = super().execute_model(scheduler_output)
        for name in scheduler_output.finished_req_ids:
            self._returned.pop(name, None)
        self._outputs = {}
        if not scheduler_output.total_num_scheduled_tokens:
            return out
        batch, start = self.model_runner.input_batch, 0
        table = batch.block_table[0]
        rows = self._capturer.snapshot_routing_data(scheduler_output.total_num_scheduled_tokens).numpy()
        for i, name in enumerate(batch.req_ids):
            num_computed, count = int(batch.num_computed_tokens_cpu[i]), scheduler_output.num_scheduled_tokens[name]
            num_returned = self._returned.get(name, 0)
            begin = min(num_returned, num_computed)  # a request that was preempted is read anew
            position = np.arange(begin, num_computed + count)
            slots = table.get_numpy_array()[i, position // table.block_size] * table.block_size
            slots += position % table.block_size
            self._by_slot[slots[num_computed - begin :]] = rows[start : start + count]
            self._outputs[name] = AuxRequestOutput(num_returned, self._by_slot[slots[num_returned - begin :]])
            start += count
        return out

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Adds the experts to the sampled tokens."""
        out = super().sample_tokens(grammar_output)
        for name, tokens in zip(out.req_ids, out.sampled_token_ids, strict=True):
            if tokens:  # else a part of a prompt, whose experts the next answer has
                output = self._outputs[name]
                self._returned[name] = output.token_start + len(output.rows)
        out.aux_output_connector_output = self._outputs
        return out


class KeptScheduler(Scheduler):
    """Passes the kept tokens from the worker to the answers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.return_sampling_mask = True


class KeptWorker(CPUWorker):
    """Reads the kept tokens from the log-probs of the truncated distribution."""

    @property
    def returns_kept(self) -> bool:
        """Whether every sampled token has them: a draft's tokens would not."""
        return self.vllm_config.speculative_config is None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model and attaches to the sampler."""
        super().load_model(*args, **kwargs)
        sampler: Any = self.model_runner.sampler
        original_sample, self._logprobs = sampler.sample, None

        def sample(*args: Any, **kwargs: Any) -> Any:
            sampled, self._logprobs = original_sample(*args, **kwargs)
            return sampled, self._logprobs

        sampler.sample = sample

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Adds the kept tokens to the sampled ones."""
        out = super().sample_tokens(grammar_output)
        logprobs, self._logprobs = self._logprobs, None
        most = [_most_kept(self.model_runner.requests[name]) for name in out.req_ids]
        if logprobs is not None and any(most):
            is_kept = logprobs.numpy() > -np.inf
            rows = [_kept_ids(row, count) if count else _NO_IDS for row, count in zip(is_kept, most, strict=True)]
            offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
            out.sampling_masks = SamplingMaskLists(np.concatenate([_NO_IDS, *rows]), offsets)
        return out


class KeptRoutingScheduler(KeptScheduler, RoutingScheduler):
    """Passes both kept tokens and experts."""


class KeptRoutingWorker(KeptWorker, RoutingWorker):
    """Returns both kept tokens and experts."""


class SpeculationWorker(CPUWorker):
    """Samples speculated tokens as it should.

    Without Triton, vLLM 0.32 writes the temperature, top_k and top_p of a draft's tokens to a copy that it drops, and
    samples them with whatever was in memory. Greedy requests are not affected.
    """

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model and replaces vLLM's expansion of sampling parameters."""
        module: Any = rejection_sampler
        original = module.apply_top_k_top_p  # raises where no request has a draft
        module.apply_top_k_top_p = lambda logits, k, p: original(logits, k, p) if len(logits) else logits
        module.expand_batch_to_tokens = _expand_to_tokens
        super().load_model(*args, **kwargs)


def _expand_to_tokens(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """Repeats each request's value for its tokens."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


_NO_IDS = np.empty(0, np.int32)


def _most_kept(request: Any) -> int:
    return int((request.sampling_params.extra_args or {}).get("kept", 0))


def _kept_ids(is_kept: np.ndarray, most_kept: int) -> np.ndarray:
    """Returns the ids of a sample's kept tokens; none for the whole vocabulary, at most one more than `most_kept`."""
    ids = np.flatnonzero(is_kept).astype(np.int32)
    if len(ids) == len(is_kept):
        return _NO_IDS
    return ids[: most_kept + 1]
