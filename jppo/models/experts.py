"""Mixtures of experts: a router sends each token to some of a layer's experts. None is dropped.

Each device sorts its own tokens by expert. It gathers the columns of its experts' kernels once for each direction.
Tokens of experts on other devices are sent there, and the outputs back (`dispatch.py`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jppo.models import dispatch, lora, product, router
from jppo.models.config import ModelConfig
from jppo.models.expert_products import expert_outputs, joined_kernels, sum_consecutive
from jppo.models.modules import MLP, RMSNorm
from jppo.models.sequence_parallel import (
    EXPERT,
    HEADS,
    POSITIONS,
    WHOLE,
    columns,
    gathered,
    in_groups,
    row_axes,
    summed,
)

# (kernels, x [R, T, D], weights and indices of the tokens' experts [R, T, active], model) -> [R, T, D]
# The kernels, of gate, up and down, are [E, D, M]; any biases follow, [E, 1, M] of gate and up, [E, D, 1] of down.
Mix = Callable[[tuple[jax.Array, ...], jax.Array, jax.Array, jax.Array, ModelConfig], jax.Array]


class Mixture(nn.Module):
    """The sum of a token's active experts by the router's weights, and of a shared expert, by a gate if it has one."""

    cfg: ModelConfig
    param_dtype: Any
    mix: Mix

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        given: router.Given = None,
        counted: jax.Array | None = None,
        seen: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the mixture; experts that are `given` [R, T, active] replace the router's choice.

        The router reads x, or what it has `seen` [R, T, D].
        """
        cfg, spec = self.cfg, self.cfg.experts
        assert spec is not None

        def param(name: str, *shape: int) -> jax.Array:
            fixed = {"bias": nn.initializers.zeros, "scale": nn.initializers.ones}
            init = fixed.get(name.rpartition("_")[2], nn.initializers.normal(cfg.initializer_range))
            out: jax.Array = self.param(name, init, shape, self.param_dtype)
            return out

        D, E, M = cfg.hidden_size, spec.count, spec.width
        seen = x if seen is None else seen
        if spec.names.beside:
            seen = RMSNorm(cfg, self.param_dtype, name="router_norm")(seen) * D**-0.5
        logits = product.product("rtd,de->rte", seen, param("router", D, E), jnp.float32)
        if spec.names.biased:
            logits += param("router_bias", E)[None, None].astype(jnp.float32)
            biases = *param("gate_up_bias", 2, E, M)[:, :, None], param("down_bias", E, D)[:, :, None]
            kernels = *param("gate_up", 2, E, D, M), param("down", E, D, M), *biases
        elif spec.names.fused:
            kernels = *param("gate_up", 2, E, D, M), param("down", E, D, M)
        else:
            shapes = {"gate": "edr,erm->edm", "up": "edr,erm->edm", "down": "emr,erd->edm"}
            kernels = tuple(self._adapted(name, param(name, E, D, M), of) for name, of in shapes.items())
        correction = None
        if spec.routing.corrected:
            correction = jax.lax.stop_gradient(self.param("correction", nn.initializers.zeros, (E,), jnp.float32))
        weight, chosen = router.choose_experts(logits, spec, correction, given)
        if spec.names.beside:
            weight *= param("expert_scale", E).astype(weight.dtype)[chosen]
        if self.is_mutable_collection(router.CHOICES) and not self.is_initializing():
            own = chosen if given is None else router.choose_experts(logits, spec, correction)[1]
            self.put_variable(router.CHOICES, router.CHOICES_NAME, own.astype(jnp.int16))
        if counted is not None and self.is_mutable_collection(router.SUMS):
            sums = router.sums_by_row(logits, spec, chosen, counted)
            self.put_variable(router.SUMS, router.SUMS_NAME, sums)
        y = self.mix(kernels, x, weight, chosen, cfg)
        if not spec.shared_width:
            return y
        shared = MLP(cfg, self.param_dtype, spec.shared_width, name="shared")(x)
        if not spec.names.shared_gate:
            return y + shared
        return y + jax.nn.sigmoid(product.product("rtd,dx->rtx", x, param("shared_gate", D, 1))) * shared

    def _adapted(self, name: str, kernel: jax.Array, equation: str) -> jax.Array:
        """Merges the adapters of all experts into their kernels."""
        if not self.has_variable(lora.COLLECTION, name):
            return kernel
        beside: dict[str, jax.Array] = self.get_variable(lora.COLLECTION, name)
        return kernel.astype(jnp.float32) + jnp.einsum(equation, beside["a"], beside["b"])


def mix(
    kernels: tuple[jax.Array, ...], x: jax.Array, weight: jax.Array, chosen: jax.Array, cfg: ModelConfig
) -> jax.Array:
    """Computes the experts' outputs on one device."""
    chex.assert_rank([*kernels, x, weight, chosen], 3)
    return _mix(_Plan(cfg, None, False), kernels, x, weight, chosen)


def make_mix(mesh: Mesh | AbstractMesh | None, *, whole_rows: bool = False) -> Mix:
    """Makes the same on a mesh, with x sharded as rows and their positions; `whole_rows`: as whole rows."""
    mesh = None if mesh is None or mesh.size == 1 else mesh
    return lambda kernels, x, weight, chosen, cfg: _mix(_Plan(cfg, mesh, whole_rows), kernels, x, weight, chosen)


class _Shards(NamedTuple):
    """The mesh axes that shard the experts' kernels [E, D, M], and of each the columns."""

    columns: tuple[tuple[str, ...], ...]
    experts: str | None = None
    width: str | None = None


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How each device of a mesh computes the outputs of its own tokens."""

    cfg: ModelConfig
    mesh: Mesh | AbstractMesh | None
    whole_rows: bool

    def shards(self, kernels: tuple[jax.Array, ...]) -> _Shards:
        """Returns the axes that shard such kernels; as the sharding rules, but only axes that exchange something."""
        if self.mesh is None:
            return _Shards(((),) * len(kernels))
        size, (E, _, M) = self.mesh.shape, kernels[0].shape
        taken = () if E % size[EXPERT] else (EXPERT,)
        return _Shards(
            tuple(columns(self.mesh, kernel.shape[1], taken) for kernel in kernels),
            EXPERT if taken and size[EXPERT] > 1 else None,
            None if M % size[HEADS] else HEADS,
        )

    def on_mesh(self, fn: Callable[..., Any], kernels: tuple[jax.Array, ...], gradients: bool) -> Callable[..., Any]:
        """Maps `fn(plan, shards, kernels, *arrays of rows)` over devices."""
        mesh, shards = self.mesh, self.shards(kernels)
        fn = functools.partial(fn, self, shards)
        if mesh is None:
            return fn
        of_kernels = tuple(
            PartitionSpec(
                shards.experts, axes or None, shards.width if kernel.shape[2] == kernels[0].shape[2] else None
            )
            for kernel, axes in zip(kernels, shards.columns, strict=True)
        )

        def spread(fn: Callable[..., Any], *groups: tuple[str, ...]) -> Callable[..., Any]:
            rows = PartitionSpec(*groups, row_axes(), POSITIONS)
            if self.whole_rows:
                rows = PartitionSpec(WHOLE.rows)
            outs = (tuple(PartitionSpec(*groups, *spec) for spec in of_kernels), rows, rows) if gradients else rows

            def call(kernels: Any, *arrays: Any) -> Any:
                ins = of_kernels, *(rows for _ in arrays)
                return jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)(kernels, *arrays)

            return call

        return in_groups(spread, fn)

    def local(
        self, shards: _Shards, kernels: tuple[jax.Array, ...], x: jax.Array, weight: jax.Array, chosen: jax.Array
    ) -> jax.Array:
        """Computes the outputs [R, T, D] of a device's tokens, with its experts or with a part of their width."""
        spec = self.cfg.experts
        assert spec is not None
        of, kernels = (self.cfg, shards.width), joined_kernels(kernels)
        flat, weight, chosen = (array.reshape(-1, array.shape[-1]) for array in (x, weight, chosen))
        if shards.experts is not None and self.mesh is not None:
            exchange = dispatch.Exchange(
                functools.partial(expert_outputs, of, 1), shards.experts, self.mesh, spec.count
            )
            return dispatch.run_experts(exchange, kernels, flat, weight, chosen).reshape(x.shape)
        order = jnp.argsort(chosen.reshape(-1), stable=True)  # of pairs of a token and an expert
        sizes = jnp.bincount(chosen.reshape(-1), length=spec.count).astype(jnp.int32)
        outputs = expert_outputs(of, spec.active, kernels, flat, weight.reshape(-1, 1), sizes, order)
        return sum_consecutive(outputs, spec.active).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(plan: _Plan, kernels: tuple[jax.Array, ...], x: jax.Array, weight: jax.Array, chosen: jax.Array) -> jax.Array:
    out: jax.Array = plan.on_mesh(_forward, kernels, False)(kernels, x, weight, chosen)
    return out


def _mix_forward(plan: _Plan, *args: Any) -> tuple[jax.Array, Any]:
    return _mix(plan, *args), args


def _mix_backward(plan: _Plan, args: Any, given: jax.Array) -> tuple[Any, ...]:
    slopes: tuple[Any, ...] = plan.on_mesh(_backward, args[0], True)(*args, given)
    return *slopes, None


_mix.defvjp(_mix_forward, _mix_backward)


def _forward(plan: _Plan, shards: _Shards, kernels: Any, x: jax.Array, weight: jax.Array, chosen: jax.Array) -> Any:
    """Computes the outputs of a device's tokens [R, T, D]."""
    whole = gathered(kernels, shards.columns, x.dtype)
    out = plan.local(shards, tuple(whole), x, weight, chosen)
    return out if shards.width is None else jax.lax.psum(out, shards.width)


def _backward(
    plan: _Plan, shards: _Shards, kernels: Any, x: jax.Array, weight: jax.Array, chosen: jax.Array, given: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    """Computes the gradients of the kernels and of a device's tokens, with the experts' activations recomputed."""
    whole = gathered(kernels, shards.columns, x.dtype)
    # Gradients of kernels are summed in f32: the products cast wide kernels to x's dtype.
    wide = tuple(kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32)) for kernel in whole)

    def run(kernels: tuple[jax.Array, ...], x: jax.Array, weight: jax.Array) -> jax.Array:
        return plan.local(shards, kernels, x, weight, chosen)

    by_kernels, by_x, by_weight = jax.vjp(run, wide, x, weight)[1](given)
    if shards.width is not None:  # each device has a partial sum, from its part of the experts' width
        by_x, by_weight = jax.lax.psum((by_x, by_weight), shards.width)
    if plan.mesh is not None:
        pairs = zip(by_kernels, shards.columns, strict=True)
        by_kernels = [summed(slope, axes, shards.experts) for slope, axes in pairs]
    if shards.width is not None:  # the bias of down has no part of the width
        by_kernels = [*by_kernels[:5], *(jax.lax.psum(slope, shards.width) for slope in by_kernels[5:])]
    return tuple(new.astype(old.dtype) for new, old in zip(by_kernels, kernels, strict=True)), by_x, by_weight
