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
from jax.sharding import Mesh, PartitionSpec

from jppo.models import lora, router
from jppo.models.config import ModelConfig
from jppo.models.expert_products import expert_outputs, join_kernels, sum_consecutive
from jppo.models.kernels import product, recomputed_by
from jppo.models.modules import MLP, Block
from jppo.models.sequence_parallel import (
    EXCHANGED,
    EXPERT,
    HEADS,
    Split,
    column_axes,
    gather_all,
    map_over_mesh,
    sum_grads,
    vary_like,
)


class Mixture(Block):
    """The sum of a token's active experts by the router's weights, and of a shared expert, by a gate if it has one."""

    mesh: Mesh | None
    split: Split

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        replayed: router.Replayed = None,
        counted: jax.Array | None = None,
        router_input: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the mixture; experts that are `replayed` [R, T, active] replace the router's choice.

        The router reads x, or `router_input` [R, T, D].
        """
        cfg, spec = self.cfg, self.cfg.experts
        assert spec is not None

        def param(name: str, *shape: int) -> jax.Array:
            initializers = {"bias": nn.initializers.zeros, "scale": nn.initializers.ones}
            init = initializers.get(name.rpartition("_")[2], nn.initializers.normal(cfg.initializer_range))
            return self.weight(name, init, *shape)

        D, E, M = cfg.hidden_size, spec.count, spec.width
        router_input = x if router_input is None else router_input
        if spec.names.beside:
            router_input = self.norm("router_norm")(router_input) * D**-0.5
        logits = product("rtd,de->rte", router_input, param("router", D, E), jnp.float32)
        if spec.names.biased:
            logits += param("router_bias", E)[None, None].astype(jnp.float32)
            biases = *param("gate_up_bias", 2, E, M)[:, :, None], param("down_bias", E, D)[:, :, None]
            kernels = *param("gate_up", 2, E, D, M), param("down", E, D, M), *biases
        elif spec.names.fused:
            kernels = *param("gate_up", 2, E, D, M), param("down", E, D, M)
        else:
            shapes = {"gate": "edr,erm->edm", "up": "edr,erm->edm", "down": "emr,erd->edm"}
            kernels = tuple(self._merge_adapters(name, param(name, E, D, M), eq) for name, eq in shapes.items())
        correction = None
        if spec.routing.corrected:
            correction = jax.lax.stop_gradient(self.param("correction", nn.initializers.zeros, (E,), jnp.float32))
        weight, chosen = router.choose_experts(logits, spec, correction, replayed)
        if spec.names.beside:
            weight *= param("expert_scale", E).astype(weight.dtype)[chosen]
        if self.is_mutable_collection(router.CHOICES) and not self.is_initializing():
            router_choice = chosen if replayed is None else router.choose_experts(logits, spec, correction)[1]
            self.put_variable(router.CHOICES, router.CHOICES_NAME, router_choice.astype(jnp.int16))
        if counted is not None and self.is_mutable_collection(router.SUMS):
            sums = router.sums_by_row(logits, spec, chosen, counted)
            self.put_variable(router.SUMS, router.SUMS_NAME, sums)
        y = mix(kernels, x, weight, chosen, cfg, mesh=self.mesh, split=self.split)
        if not spec.shared_width:
            return y
        shared = MLP(cfg, self.param_dtype, spec.shared_width, name="shared")(x)
        if not spec.names.shared_gate:
            return y + shared
        return y + jax.nn.sigmoid(product("rtd,dx->rtx", x, param("shared_gate", D, 1))) * shared

    def _merge_adapters(self, name: str, kernel: jax.Array, equation: str) -> jax.Array:
        """Merges the adapters of all experts into their kernels."""
        if not self.has_variable(lora.COLLECTION, name):
            return kernel
        adapter: dict[str, jax.Array] = self.get_variable(lora.COLLECTION, name)
        return kernel.astype(jnp.float32) + jnp.einsum(equation, adapter["a"], adapter["b"])


def mix(
    kernels: tuple[jax.Array, ...],
    x: jax.Array,
    weight: jax.Array,
    chosen: jax.Array,
    cfg: ModelConfig,
    *,
    mesh: Mesh | None = None,
    split: Split = EXCHANGED,
) -> jax.Array:
    """Computes the weighted sum of each token's experts: x [R, T, D], weights and indices [R, T, active] -> [R, T, D].

    The kernels, of gate, up and down, are [E, D, M]; any biases follow, [E, 1, M] of gate and up, [E, D, 1] of down.
    """
    chex.assert_rank([*kernels, x, weight, chosen], 3)
    return _mix(_Plan(cfg, None if mesh is None or mesh.size == 1 else mesh, split), kernels, x, weight, chosen)


class _Shards(NamedTuple):
    """The mesh axes that shard the experts' kernels [E, D, M], and of each the columns."""

    column_axes: tuple[tuple[str, ...], ...]
    experts: str | None = None
    width: str | None = None


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How each device of a mesh computes the outputs of its own tokens."""

    cfg: ModelConfig
    mesh: Mesh | None
    split: Split

    def shards(self, kernels: tuple[jax.Array, ...]) -> _Shards:
        """Returns the axes that shard such kernels; as the sharding rules, but only axes that exchange something."""
        if self.mesh is None:
            return _Shards(((),) * len(kernels))
        size, (E, _, M) = self.mesh.shape, kernels[0].shape
        expert_axes = () if E % size[EXPERT] else (EXPERT,)
        return _Shards(
            tuple(column_axes(self.mesh, kernel.shape[1], expert_axes) for kernel in kernels),
            EXPERT if expert_axes and size[EXPERT] > 1 else None,
            None if M % size[HEADS] else HEADS,
        )

    def on_mesh(self, fn: Callable[..., Any], kernels: tuple[jax.Array, ...], gradients: bool) -> Callable[..., Any]:
        """Maps a device's `fn(plan, shards, kernels, *arrays of rows)` over the mesh."""
        mesh, shards = self.mesh, self.shards(kernels)
        fn = functools.partial(fn, self, shards)
        if mesh is None:
            return fn
        specs = tuple(
            PartitionSpec(
                shards.experts, axes or None, shards.width if kernel.shape[2] == kernels[0].shape[2] else None
            )
            for kernel, axes in zip(kernels, shards.column_axes, strict=True)
        )
        return map_over_mesh(fn, mesh, specs, gradients=gradients, split=self.split)

    def device_outputs(
        self, shards: _Shards, kernels: tuple[jax.Array, ...], x: jax.Array, weight: jax.Array, chosen: jax.Array
    ) -> jax.Array:
        """Computes the outputs [R, T, D] of a device's tokens, with its experts or with a part of their width."""
        spec = self.cfg.experts
        assert spec is not None
        pair, kernels = (self.cfg, shards.width), join_kernels(tuple(vary_like(k, kernels[0]) for k in kernels))
        x, weight = vary_like(x, kernels[0]), vary_like(weight, kernels[0])  # each part of the width has a gradient
        flat_x, weight, chosen = (array.reshape(-1, array.shape[-1]) for array in (x, weight, chosen))
        if shards.experts is not None and self.mesh is not None:
            exchange = TokenExchange(functools.partial(expert_outputs, pair, 1), shards.experts, self.mesh, spec.count)
            return run_experts(exchange, kernels, flat_x, weight, chosen).reshape(x.shape)
        order = jnp.argsort(chosen.reshape(-1), stable=True)  # of pairs of a token and an expert
        sizes = jnp.bincount(chosen.reshape(-1), length=spec.count).astype(jnp.int32)
        outputs = expert_outputs(pair, spec.active, kernels, flat_x, weight.reshape(-1, 1), sizes, order)
        return sum_consecutive(outputs, spec.active).reshape(x.shape)


def _mix_backward(plan: _Plan, args: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    grad_kernels, grads = plan.on_mesh(_backward, args[0], True)(*args, cotangent)
    return grad_kernels, *grads, None


@recomputed_by(_mix_backward)
def _mix(plan: _Plan, kernels: tuple[jax.Array, ...], x: jax.Array, weight: jax.Array, chosen: jax.Array) -> jax.Array:
    outputs: jax.Array = plan.on_mesh(_forward, kernels, False)(kernels, x, weight, chosen)
    return outputs


def _forward(plan: _Plan, shards: _Shards, kernels: Any, x: jax.Array, weight: jax.Array, chosen: jax.Array) -> Any:
    """Computes the outputs of a device's tokens [R, T, D]."""
    full_kernels = gather_all(kernels, shards.column_axes, x)
    outputs = plan.device_outputs(shards, tuple(full_kernels), x, weight, chosen)
    return outputs if shards.width is None else jax.lax.psum(outputs, shards.width)


def _backward(
    plan: _Plan, shards: _Shards, kernels: Any, x: jax.Array, weight: jax.Array, chosen: jax.Array, cotangent: jax.Array
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, jax.Array]]:
    """Computes the gradients of the kernels, and of a device's tokens and weights, with activations recomputed."""
    full_kernels = gather_all(kernels, shards.column_axes, x)
    # Gradients of kernels are summed in f32: the products cast wide kernels to x's dtype.
    wide_kernels = tuple(kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32)) for kernel in full_kernels)

    def run(kernels: tuple[jax.Array, ...], x: jax.Array, weight: jax.Array) -> jax.Array:
        return plan.device_outputs(shards, kernels, x, weight, chosen)

    outputs, pull = jax.vjp(run, wide_kernels, x, weight)
    grad_kernels, grad_x, grad_weight = pull(vary_like(cotangent, outputs))
    if plan.mesh is not None:
        gradients_and_axes = zip(grad_kernels, shards.column_axes, strict=True)
        grad_kernels = [sum_grads(gradient, axes, shards.experts) for gradient, axes in gradients_and_axes]
    return tuple(new.astype(old.dtype) for new, old in zip(grad_kernels, kernels, strict=True)), (grad_x, grad_weight)


SMALLER = 8  # a further round has this part of the first one's room


@dataclasses.dataclass(frozen=True)
class TokenExchange:
    """A position-wise function of experts, and the mesh axis over which they are sharded."""

    # (kernels, rows [N, D], weights [N, 1], rows by expert [E], their order by expert [N]) -> [N, D]
    run: Callable[..., jax.Array]
    axis: str
    mesh: Mesh
    experts: int  # of all devices


def _send_backward(exchange: TokenExchange, args: Any, cotangent: jax.Array) -> tuple[Any, jax.Array, jax.Array, None]:
    """Sends rows and gradients of outputs; returns gradients of rows. Those of kernels are summed over rounds."""
    kernels, x, weight, chosen = args
    route, weight_rows = _Route.of(exchange, chosen), weight.reshape(-1, 1)

    def run_round(begin: jax.Array | int, room: int, totals: Any) -> Any:
        pair, by_expert = route.round_pairs(begin, room), route.sort_by_expert(begin, room)[::-1]
        rows, weights, slope = (route.send(array, pair) for array in (x, weight_rows, cotangent))
        by_kernels, *grads = jax.vjp(lambda *args: exchange.run(*args, *by_expert), kernels, rows, weights)[1](slope)
        grad_x, grad_weight = (route.send_back(slope, begin, room) for slope in grads)
        return jax.tree.map(jnp.add, totals, (by_kernels, route.sum_by_token(grad_x, len(x)), grad_weight))

    sum_dtype = jnp.promote_types(x.dtype, jnp.float32)
    zeros = jax.tree.map(jnp.zeros_like, kernels), jnp.zeros_like(x, sum_dtype), jnp.zeros_like(weight_rows)
    grad_kernels, grad_x, grad_weight = route.run_rounds(run_round, zeros)
    return grad_kernels, grad_x.astype(x.dtype), grad_weight.reshape(weight.shape), None


@recomputed_by(_send_backward)
def run_experts(exchange: TokenExchange, kernels: Any, x: jax.Array, weight: jax.Array, chosen: jax.Array) -> jax.Array:
    """Sums `run`'s outputs of tokens x [N, D] over their experts, [N, active] weights and indices.

    Called on each device of the mesh, which has the kernels of its experts. The experts' devices apply the weights, so
    that the weights' gradient needs no outputs to be sent again.
    """
    chex.assert_rank([x, weight, chosen], [2, 2, 2])
    route = _Route.of(exchange, chosen)

    def run_round(begin: jax.Array | int, room: int, total: jax.Array) -> jax.Array:
        pair, (order, sizes) = route.round_pairs(begin, room), route.sort_by_expert(begin, room)
        output = exchange.run(kernels, route.send(x, pair), route.send(weight.reshape(-1, 1), pair), sizes, order)
        return total + route.sum_by_token(route.send_back(output, begin, room), len(x))

    total_output: jax.Array = route.run_rounds(run_round, jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)))
    return total_output.astype(x.dtype)


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
        """Plans the exchange of tokens whose experts are `chosen` [tokens, active]."""
        sent = jnp.bincount(chosen.reshape(-1), length=exchange.experts).astype(jnp.int32)
        sent = sent.reshape(exchange.mesh.shape[exchange.axis], -1)
        counts = jnp.sum(sent, axis=1)
        received = jax.lax.all_to_all(sent, exchange.axis, 0, 0, tiled=True)
        # All devices of the mesh run as many rounds, so that none waits for another group's collective.
        most = jax.lax.pmax(jnp.max(counts), tuple(sorted(jax.typeof(counts).manual_axis_type.varying)))
        order = jnp.argsort(chosen.reshape(-1), stable=True).astype(jnp.int32)
        start, device = jnp.cumsum(counts) - counts, chosen.reshape(-1) // sent.shape[1]
        number = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True) - start[device]
        return cls(exchange, order, start, counts, jnp.cumsum(received, axis=1), most, device, number)

    def run_rounds(self, run_round: Callable[[jax.Array | int, int, Any], Any], start: Any) -> Any:
        """Runs `run_round(first pair, room, total)` until the pairs of every device for every other were sent."""
        room = -(-len(self.order) // len(self.counts))
        small = -(-room // SMALLER)
        total = run_round(0, room, start)
        more = jnp.maximum(0, -(-(self.most - room) // small))
        return jax.lax.fori_loop(0, more, lambda i, total: run_round(room + i * small, small, total), total)

    def round_pairs(self, begin: jax.Array | int, room: int) -> jax.Array:
        """Returns the pairs [devices, room] that a round sends; P where a slot stays empty."""
        number, P = begin + jnp.arange(room)[None], len(self.order)
        slot = jnp.where(number < self.counts[:, None], self.start[:, None] + number, P)
        return self.order.at[slot].get(mode="fill", fill_value=P)

    def send(self, x: jax.Array, pair: jax.Array) -> jax.Array:
        """Sends the rows of x [P or tokens, D] for pairs; returns those that came [devices * room, D], 0 if empty."""
        rows = x.at[pair // (len(self.order) // len(x))].get(mode="fill", fill_value=0)
        came: jax.Array = jax.lax.all_to_all(rows, self.exchange.axis, 0, 0, tiled=True)
        return came.reshape(-1, x.shape[-1])

    def send_back(self, output: jax.Array, begin: jax.Array | int, room: int) -> jax.Array:
        """Returns results to their senders, [P, ...] by pair; 0 for pairs that another round sends."""
        received = jax.lax.all_to_all(output.reshape(-1, room, output.shape[-1]), self.exchange.axis, 0, 0, tiled=True)
        number = self.number - begin
        slot = jnp.where((number >= 0) & (number < room), self.device * room + number, len(output))
        out: jax.Array = received.reshape(output.shape).at[slot].get(mode="fill", fill_value=0)
        return out

    def sum_by_token(self, x: jax.Array, tokens: int) -> jax.Array:
        """Sums pairs [P, D] over each token's experts, in f32."""
        return jnp.sum(x.reshape(tokens, -1, x.shape[1]), axis=1, dtype=jnp.promote_types(x.dtype, jnp.float32))

    def sort_by_expert(self, begin: jax.Array | int, room: int) -> tuple[jax.Array, jax.Array]:
        """Returns the order of a round's slots by expert, and the slots of each expert.

        Empty slots count for the last expert, as rows of zeros. Slots of a device are sorted, so none is compared.
        """
        expert_ends = jnp.clip(self.ends - begin, 0, room).at[:, -1].set(room)
        sizes = jnp.diff(expert_ends, axis=1, prepend=0)  # [devices, experts here]
        expert_start = (jnp.cumsum(sizes.T.reshape(-1)) - sizes.T.reshape(-1)).reshape(sizes.T.shape).T
        shift = expert_start - (expert_ends - sizes)  # from a slot's number to its place
        number = jnp.arange(room)[None]
        expert = jnp.sum(number[:, :, None] >= expert_ends[:, None], axis=-1)  # [devices, room]
        slot_position = (number + jnp.take_along_axis(shift, expert, axis=1)).reshape(-1)
        order = jnp.zeros_like(slot_position).at[slot_position].set(jnp.arange(slot_position.size), unique_indices=True)
        return order, jnp.sum(sizes, axis=0)
