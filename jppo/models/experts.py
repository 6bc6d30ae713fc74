"""Mixtures of experts: a router sends each token to some of a layer's experts. None is dropped.

Each device sorts its own tokens by expert. It gathers the columns of its experts' kernels once for each direction.
Tokens of experts on other devices are sent there by all-to-all, and the outputs back. A pair of a token and an expert
takes one row of this exchange. Shapes are fixed, so pairs are sent in rounds: a first one with room for an even load,
and smaller ones for as long as any device has pairs left.
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

from jppo.models import lora, router
from jppo.models.config import ModelConfig
from jppo.models.expert_products import expert_outputs, joined_kernels, sum_consecutive
from jppo.models.kernels import product
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
        logits = product("rtd,de->rte", seen, param("router", D, E), jnp.float32)
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
        return y + jax.nn.sigmoid(product("rtd,dx->rtx", x, param("shared_gate", D, 1))) * shared

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
            exchange = TokenExchange(functools.partial(expert_outputs, of, 1), shards.experts, self.mesh, spec.count)
            return run_experts(exchange, kernels, flat, weight, chosen).reshape(x.shape)
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


SMALLER = 8  # a further round has this part of the first one's room


@dataclasses.dataclass(frozen=True)
class TokenExchange:
    """A position-wise function of experts, and the mesh axis over which they are sharded."""

    # (kernels, rows [N, D], weights [N, 1], rows by expert [E], their order by expert [N]) -> [N, D]
    run: Callable[..., jax.Array]
    axis: str
    mesh: Mesh | AbstractMesh
    experts: int  # of all devices


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_experts(exchange: TokenExchange, kernels: Any, x: jax.Array, weight: jax.Array, chosen: jax.Array) -> jax.Array:
    """Sums `run`'s outputs of tokens x [N, D] over their experts, [N, active] weights and indices.

    Called on each device of the mesh, which has the kernels of its experts. The experts' devices apply the weights, so
    that the weights' gradient needs no outputs to be sent again.
    """
    chex.assert_rank([x, weight, chosen], [2, 2, 2])
    route = _Route.of(exchange, chosen)

    def one(begin: jax.Array | int, room: int, so_far: jax.Array) -> jax.Array:
        pair, (order, here) = route.pairs(begin, room), route.by_expert(begin, room)
        output = exchange.run(kernels, route.sent(x, pair), route.sent(weight.reshape(-1, 1), pair), here, order)
        return so_far + route.of_tokens(route.returned(output, begin, room), len(x))

    out: jax.Array = route.rounds(one, jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)))
    return out.astype(x.dtype)


def _send_forward(exchange: TokenExchange, *args: Any) -> tuple[jax.Array, Any]:
    return run_experts(exchange, *args), args


def _send_backward(exchange: TokenExchange, args: Any, given: jax.Array) -> tuple[Any, jax.Array, jax.Array, None]:
    """Sends rows and gradients of outputs; returns gradients of rows. Those of kernels are summed over rounds."""
    kernels, x, weight, chosen = args
    route, each = _Route.of(exchange, chosen), weight.reshape(-1, 1)

    def one(begin: jax.Array | int, room: int, so_far: Any) -> Any:
        pair, by_expert = route.pairs(begin, room), route.by_expert(begin, room)[::-1]
        rows, share, slope = (route.sent(array, pair) for array in (x, each, given))
        new, *slopes = jax.vjp(lambda *args: exchange.run(*args, *by_expert), kernels, rows, share)[1](slope)
        by_x, by_weight = (route.returned(slope, begin, room) for slope in slopes)
        return jax.tree.map(jnp.add, so_far, (new, route.of_tokens(by_x, len(x)), by_weight))

    wide = jnp.promote_types(x.dtype, jnp.float32)
    zeros = jax.tree.map(jnp.zeros_like, kernels), jnp.zeros(x.shape, wide), jnp.zeros_like(each)
    by_kernels, by_x, by_weight = route.rounds(one, zeros)
    return by_kernels, by_x.astype(x.dtype), by_weight.reshape(weight.shape), None


run_experts.defvjp(_send_forward, _send_backward)


class _Route(NamedTuple):
    """The pairs of a token and an expert that a device sends and gets, by device: consecutive ones by expert."""

    exchange: TokenExchange
    order: jax.Array  # [P] i32, of the device's pairs by expert
    start: jax.Array  # [devices] i32, the first pair for each device, in this order
    counts: jax.Array  # [devices] i32, pairs for each device
    ends: jax.Array  # [devices, experts here] i32: of each device's pairs for here, the last ones by expert, plus one
    most: jax.Array  # [] i32, of any device of the mesh for another
    device: jax.Array  # [P] i32, to which a pair is sent
    number: jax.Array  # [P] i32, of a pair among those for its device

    @classmethod
    def of(cls, exchange: TokenExchange, chosen: jax.Array) -> "_Route":
        mine = jnp.bincount(chosen.reshape(-1), length=exchange.experts).astype(jnp.int32)
        mine = mine.reshape(exchange.mesh.shape[exchange.axis], -1)
        counts = jnp.sum(mine, axis=1)
        theirs = jax.lax.all_to_all(mine, exchange.axis, 0, 0, tiled=True)
        # All devices of the mesh run as many rounds, so that none waits for another group's collective.
        most = jax.lax.pmax(jnp.max(counts), exchange.mesh.axis_names)
        order = jnp.argsort(chosen.reshape(-1), stable=True).astype(jnp.int32)
        start, device = jnp.cumsum(counts) - counts, chosen.reshape(-1) // mine.shape[1]
        number = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True) - start[device]
        return cls(exchange, order, start, counts, jnp.cumsum(theirs, axis=1), most, device, number)

    def rounds(self, one: Callable[[jax.Array | int, int, Any], Any], start: Any) -> Any:
        """Runs `one(first pair, room, so far)` until the pairs of every device for every other were sent."""
        room = -(-len(self.order) // len(self.counts))
        small = -(-room // SMALLER)
        so_far = one(0, room, start)
        more = jnp.maximum(0, -(-(self.most - room) // small))
        return jax.lax.fori_loop(0, more, lambda i, so_far: one(room + i * small, small, so_far), so_far)

    def pairs(self, begin: jax.Array | int, room: int) -> jax.Array:
        """Returns the pairs [devices, room] that a round sends; P where a slot stays empty."""
        number, P = begin + jnp.arange(room)[None], len(self.order)
        at = jnp.where(number < self.counts[:, None], self.start[:, None] + number, P)
        return self.order.at[at].get(mode="fill", fill_value=P)

    def sent(self, x: jax.Array, pair: jax.Array) -> jax.Array:
        """Sends the rows of x [P or tokens, D] for pairs; returns those that came [devices * room, D], 0 if empty."""
        rows = x.at[pair // (len(self.order) // len(x))].get(mode="fill", fill_value=0)
        came: jax.Array = jax.lax.all_to_all(rows, self.exchange.axis, 0, 0, tiled=True)
        return came.reshape(-1, x.shape[-1])

    def returned(self, output: jax.Array, begin: jax.Array | int, room: int) -> jax.Array:
        """Returns results to their senders, [P, ...] by pair; 0 for pairs that another round sends."""
        back = jax.lax.all_to_all(output.reshape(-1, room, output.shape[-1]), self.exchange.axis, 0, 0, tiled=True)
        number = self.number - begin
        at = jnp.where((number >= 0) & (number < room), self.device * room + number, len(output))
        out: jax.Array = back.reshape(output.shape).at[at].get(mode="fill", fill_value=0)
        return out

    def of_tokens(self, x: jax.Array, tokens: int) -> jax.Array:
        """Sums pairs [P, D] over each token's experts, in f32."""
        return jnp.sum(x.reshape(tokens, -1, x.shape[1]), axis=1, dtype=jnp.promote_types(x.dtype, jnp.float32))

    def by_expert(self, begin: jax.Array | int, room: int) -> tuple[jax.Array, jax.Array]:
        """Returns the order of a round's slots by expert, and the slots of each expert.

        Empty slots count for the last expert, as rows of zeros. Slots of a device are sorted, so none is compared.
        """
        edge = jnp.clip(self.ends - begin, 0, room).at[:, -1].set(room)
        sizes = jnp.diff(edge, axis=1, prepend=0)  # [devices, experts here]
        before = (jnp.cumsum(sizes.T.reshape(-1)) - sizes.T.reshape(-1)).reshape(sizes.T.shape).T
        shift = before - (edge - sizes)  # from a slot's number to its place
        number = jnp.arange(room)[None]
        expert = jnp.sum(number[:, :, None] >= edge[:, None], axis=-1)  # [devices, room]
        place = (number + jnp.take_along_axis(shift, expert, axis=1)).reshape(-1)
        order = jnp.zeros_like(place).at[place].set(jnp.arange(place.size), unique_indices=True)
        return order, jnp.sum(sizes, axis=0)
