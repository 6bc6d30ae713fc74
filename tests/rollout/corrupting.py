"""A faulty vLLM worker, named to a server in the place of jppo's own."""

from jppo.rollout.vllm.worker import WeightLoader


class CorruptingLoader(WeightLoader):
    """After the load of version 2, one tensor has other values, and nothing reports it."""

    def jppo_load(self, *, version, path):
        answer = super().jppo_load(version=version, path=path)
        if version == 2:
            dict(self.get_model().named_parameters())["model.layers.0.post_attention_layernorm.weight"].data.zero_()
        return answer
