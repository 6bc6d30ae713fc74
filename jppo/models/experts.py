"""Mixtures of experts: a router sends each token to some of a layer's experts. None is dropped.

Each device sorts its own tokens by expert. It gathers the columns of the experts' kernels once for each direction.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jppo.models import lora, product, router, routing
from jppo.models.config import ModelConfig
from jppo.models.grouped import grouped
from jppo.models.modules import ACTIVATIONS, MLP
from jppo.models.spread import HEADS, POSITIONS, WHOLE, columns, gathered, in_groups, row_axes, summed

# (kernels, x [R, T, D], weights and indices of the tokens' experts [R, T, active], model) -> [R, T, D]
# The kernels, of gate, up and down, are [E, D, M]; any biases follow, [E, 1, M] of gate and up, [E, D, 1] of down.
Mix = Callable[[tuple[jax.Array, ...], jax.Array, jax.Array, jax.Array, ModelConfig], jax.Array]


class Mixture(nn.Module):
    """The sum of a token's active experts by the router's weights, and of a shared expert, by a gate if it has one."""

    cfg: ModelConfig
    param_dtype: Any
    mix: Mix

    @nn.compact
    def __call__(self, x: jax.Array, given: routing.Given = None) -> jax.Array:
        """Computes the mixture; experts that are `given` [R, T, active] replace the router's choice."""
        cfg, how = self.cfg, self.cfg.experts
        assert how is not None

        def param(name: str, *shape: int) -> jax.Array:
            init = nn.initializers.zeros if name.endswith("bias") else nn.initializers.normal(cfg.initializer_range)
            out: jax.Array = self.param(name, init, shape, self.param_dtype)
            return out

        D, E, M = cfg.hidden_size, how.count, how.width
        logits = product.product("rtd,de->rte", x, param("router", D, E), jnp.float32)
        correction = None
        if how.routing.corrected:
            one = self.param("correction", nn.initializers.zeros, (E,), jnp.float32)
            correction = jnp.broadcast_to(jax.lax.stop_gradient(one), logits.shape)
        if how.names.fused:
            logits += param("router_bias", E)[None, None].astype(jnp.float32)
            biases = *param("gate_up_bias", 2, E, M)[:, :, None], param("down_bias", E, D)[:, :, None]
            kernels = *param("gate_up", 2, E, D, M), param("down", E, D, M), *biases
        else:
            shapes = {"gate": "edr,erm->edm", "up": "edr,erm->edm", "down": "emr,erd->edm"}
            kernels = tuple(self._adapted(name, param(name, E, D, M), of) for name, of in shapes.items())
        if self.is_mutable_collection(routing.COLLECTION) and not self.is_initializing():
            own = router.choose(logits, how, correction)[1]
            self.put_variable(routing.COLLECTION, routing.NAME, own.astype(jnp.int16))
        y = self.mix(kernels, x, *router.choose(logits, how, correction, given), cfg)
        if not how.shared_width:
            return y
        shared = MLP(cfg, self.param_dtype, how.shared_width, name="shared")(x)
        if not how.names.shared_gate:
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


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How each device of a mesh computes the outputs of its own tokens."""

    cfg: ModelConfig
    mesh: Mesh | AbstractMesh | None
    whole_rows: bool

    def on_mesh(self, fn: Callable[..., Any], kernels: tuple[jax.Array, ...], gradients: bool) -> Callable[..., Any]:
        """Maps `fn(plan, width's axis, columns, kernels, *arrays of rows)` over devices."""
        mesh, M = self.mesh, kernels[0].shape[2]
        split = HEADS if mesh is not None and M % mesh.shape[HEADS] == 0 else None
        sharded = [columns(mesh, kernel.shape[1]) for kernel in kernels]
        fn = functools.partial(fn, self, split, sharded)
        if mesh is None:
            return fn
        of_kernels = tuple(
            PartitionSpec(None, axes or None, split if kernel.shape[2] == M else None)
            for kernel, axes in zip(kernels, sharded, strict=True)
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(plan: _Plan, kernels: tuple[jax.Array, ...], x: jax.Array, weight: jax.Array, chosen: jax.Array) -> jax.Array:
    out: jax.Array = plan.on_mesh(_forward, kernels, False)(kernels, x, weight, chosen)
    return out


def _mix_forward(plan: _Plan, *args: Any) -> tuple[jax.Array, Any]:
    return _mix(plan, *args), args


def _mix_backward(plan: _Plan, args: Any, given: jax.Array) -> tuple[Any, ...]:
    found: tuple[Any, ...] = plan.on_mesh(_backward, args[0], True)(*args, given)
    return *found, None


_mix.defvjp(_mix_forward, _mix_backward)


def _forward(
    plan: _Plan,
    split: str | None,
    columns: list[tuple[str, ...]],
    kernels: Any,
    x: jax.Array,
    weight: jax.Array,
    chosen: jax.Array,
) -> jax.Array:
    """Computes the outputs of a device's tokens [R, T, D]."""
    whole = gathered(kernels, columns, x.dtype)
    out = _local(plan.cfg, split, chosen, tuple(whole), x, weight)
    return out if split is None else jax.lax.psum(out, split)


def _backward(
    plan: _Plan,
    split: str | None,
    columns: list[tuple[str, ...]],
    kernels: Any,
    x: jax.Array,
    weight: jax.Array,
    chosen: jax.Array,
    given: jax.Array,
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    """Computes the gradients of the kernels and of a device's tokens, with the experts' activations recomputed."""
    whole = gathered(kernels, columns, x.dtype)
    # Gradients of kernels are summed in f32: the products cast wide kernels to x's dtype.
    wide = tuple(kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32)) for kernel in whole)
    local = functools.partial(_local, plan.cfg, split, chosen)
    by_kernels, by_x, by_weight = jax.vjp(local, wide, x, weight)[1](given)
    if split is not None:  # each device has a partial sum, from its part of the experts' width
        by_x, by_weight = jax.lax.psum((by_x, by_weight), split)
    if plan.mesh is not None:
        by_kernels = [summed(slope, axes) for slope, axes in zip(by_kernels, columns, strict=True)]
    if split is not None:  # the bias of down has no part of the width
        by_kernels = [*by_kernels[:5], *(jax.lax.psum(slope, split) for slope in by_kernels[5:])]
    return tuple(new.astype(old.dtype) for new, old in zip(by_kernels, kernels, strict=True)), by_x, by_weight


def _local(
    cfg: ModelConfig,
    split: str | None,
    chosen: jax.Array,
    kernels: tuple[jax.Array, ...],
    x: jax.Array,
    weight: jax.Array,
) -> jax.Array:
    """Computes the outputs [R, T, D] of tokens with whole kernels, or with a part of the experts' width."""
    how, (gate, up, down, *biases), flat = cfg.experts, kernels, x.reshape(-1, x.shape[-1])
    assert how is not None
    weight, chosen = weight.reshape(-1, how.active), chosen.reshape(-1, how.active)
    order = jnp.argsort(chosen.reshape(-1), stable=True)  # of pairs of a token and an expert
    place = jnp.argsort(order)  # of each pair among the sorted ones
    sizes = jnp.bincount(chosen.reshape(-1), length=how.count).astype(jnp.int32)
    rows = _taken(how.active, flat, order, place)
    gates, ups = grouped(rows, gate, sizes), grouped(rows, up, sizes)
    if biases:
        ones = jnp.ones((len(rows), 1), x.dtype)
        gates, ups = gates + grouped(ones, biases[0], sizes), ups + grouped(ones, biases[1], sizes)
    outs = grouped(_gated(cfg, gates, ups), down, sizes, True)
    if biases:  # once, where several devices have a part of the width
        share = ones if split is None else ones * (jax.lax.axis_index(split) == 0)
        outs += grouped(share, biases[2], sizes, True)
    each = _taken(1, outs, place, order).reshape(*chosen.shape, -1)
    mixed = jnp.sum(weight[:, :, None] * each.astype(weight.dtype), axis=1)
    return mixed.astype(x.dtype).reshape(x.shape)


def _gated(cfg: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Computes an expert's activation: activation(gate) * up, or gate sigmoid(alpha gate) (up + 1) of clamped ones."""
    assert cfg.experts is not None
    if cfg.experts.clamp is None:
        return ACTIVATIONS[cfg.activation](gate) * up
    alpha, limit = cfg.experts.clamp
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _taken(times: int, x: jax.Array, order: jax.Array, place: jax.Array) -> jax.Array:
    """Returns x's rows, each repeated so many times, in this order; `place` inverts it. No gradient is a scatter."""
    return x[order // times]


def _taken_forward(times: int, x: jax.Array, order: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _taken(times, x, order, place), place


def _taken_backward(times: int, place: jax.Array, given: jax.Array) -> tuple[jax.Array, None, None]:
    each = given[place].reshape(-1, times, given.shape[-1])
    return jnp.sum(each, axis=1, dtype=jnp.promote_types(given.dtype, jnp.float32)).astype(given.dtype), None, None


_taken.defvjp(_taken_forward, _taken_backward)
