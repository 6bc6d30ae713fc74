"""vLLM's worker on a CPU, and a scheduler, with the experts of every token in their answers.

vLLM gets them by `--worker-cls` and `--scheduler-cls`. On a GPU vLLM itself does so by
`--enable-return-routed-experts`, which needs its second model runner and so Triton. Answers have the same form.
"""

from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector, AuxRequestOutput
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.core.sched.scheduler import Scheduler
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
            before, count = int(batch.num_computed_tokens_cpu[i]), scheduler_output.num_scheduled_tokens[name]
            first = self._returned.get(name, 0)
            begin = min(first, before)  # a request that was preempted is read anew
            position = np.arange(begin, before + count)
            slot = table.get_numpy_array()[i, position // table.block_size] * table.block_size
            slot += position % table.block_size
            self._by_slot[slot[before - begin :]] = rows[start : start + count]
            self._outputs[name] = AuxRequestOutput(first, self._by_slot[slot[first - begin :]])
            start += count
        return out

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Adds the experts to the sampled tokens."""
        out = super().sample_tokens(grammar_output)
        for name, tokens in zip(out.req_ids, out.sampled_token_ids, strict=True):
            if tokens:  # else a part of a prompt, whose experts the next answer has
                found = self._outputs[name]
                self._returned[name] = found.token_start + len(found.rows)
        out.aux_output_connector_output = self._outputs
        return out
