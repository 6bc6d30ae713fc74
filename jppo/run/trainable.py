"""A trained network with its state: parameters, optimizer, and the gradient that is accumulated for the next step."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from jppo.errors import UserError
from jppo.learner import optim, ppo, recipe
from jppo.learner.batch import Mini
from jppo.models import placing, router
from jppo.models.lora import Weights, join
from jppo.settings import Optimizer
from jppo.types import Array, Params


class Trainable:
    """The policy or the critic of a custom loop."""

    def __init__(self, how: ppo.ModelUpdate, params: Params, opt: Any, section: Optimizer, total_steps: int):
        """`section` has the optimizer's settings; its schedule is over `total_steps`."""
        self.how, self.params, self.opt = how, params, opt
        self._section, self._schedule = section, recipe.rate_schedule(section, total_steps)
        self._carry: Any = None
        self.accumulated = 0  # gradients since the last step
        self._learns = False

    @property
    def model(self) -> Weights:
        """Returns the whole model, its frozen base included."""
        return self.how.model(self.params)

    def forward_backward(self, accumulate: Any, mini: Mini, *further: Any) -> tuple[dict[str, float], list[Any]]:
        """Adds the gradient of a mini-batch; returns its metrics, and the sums of each micro-batch."""
        how = dataclasses.replace(self.how, accumulate=accumulate)
        params, base, further = placing.to_device((self.params, how.base, further))
        carry, self._carry = how.zeros() if self._carry is None else self._carry, None
        try:
            carry, sums = ppo.forward_backward(how, params, base, carry, mini, *further)
        except BaseException:
            self.discard()  # the carry was donated
            raise
        self._carry = carry
        self.accumulated += 1
        self._learns = self._learns or mini.learns
        found = jax.device_get(sums)
        metrics = [{name: x for name, x in one.items() if np.ndim(x) == 0 or name == router.LOAD} for one in found]
        return ppo.update_metrics([(metrics, {})], how.name), found

    def select(self, select: Any, mini: Mini, key: Array, step: Array) -> Mini:
        """Marks the tokens that a loss treats apart."""
        params, base = placing.to_device((self.params, self.how.base))
        chosen: Mini = select(join(params, base), mini, key, step, self.accumulated)
        return chosen

    def optim_step(self, step: Array, given: dict[str, float | None]) -> dict[str, float]:
        """Takes an optimizer step with the accumulated gradient, by the settings or the `given` hyperparameters."""
        name, how = self.how.name, self.how
        where: Any = step
        if any(x is not None for x in given.values()):
            assert how.apply_given is not None
            where, how = self._hyperparameters(step, given), dataclasses.replace(how, apply=how.apply_given)
        before, carry = self.params, self._carry
        self._carry = None
        params = placing.take(self.params)
        params, self.opt, stats = ppo.optim_step(how, params, self.opt, carry, where, learns=self._learns)
        self.params = jax.block_until_ready(placing.put_back(params, before))
        self.discard()
        return {f"{name}/{key}": float(value) for key, value in jax.device_get(stats).items()}

    def _hyperparameters(self, step: Array, given: dict[str, float | None]) -> optim.Hyperparameters:
        s, name = self._section, self.how.name
        betas: Any = s.betas
        usual = dict(lr=float(self._schedule(step)), beta1=betas[0], beta2=betas[1], eps=optim.ADAM_EPS)
        usual |= dict(weight_decay=s.weight_decay, grad_clip=s.grad_clip)
        said = {key: value for key, value in given.items() if value is not None}
        for key, value in said.items():
            if s.optimizer != "adamw" and key not in ("lr", "grad_clip"):
                raise UserError(
                    f"optim_step({key}={value}) is of AdamW, and {name}.optimizer={s.optimizer!r}; leave {key} out"
                )
            within = 0 <= value < 1 if key.startswith("beta") else value >= 0
            if not within or not math.isfinite(value):
                rule = "from 0 to below 1" if key.startswith("beta") else "a finite number, at least 0"
                raise UserError(f"optim_step({key}={value}): {key} must be {rule}; correct it")
        found = usual | said
        found["grad_clip"] = found["grad_clip"] or math.inf
        return optim.Hyperparameters(**{key: np.float32(value) for key, value in found.items()})

    def discard(self) -> None:
        """Drops the accumulated gradient."""
        self._carry, self.accumulated, self._learns = None, 0, False
