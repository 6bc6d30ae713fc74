"""Expert parallelism: tokens are exchanged with the devices of their experts by all-to-all. No token is dropped.

A pair of a token and an expert takes one row of the exchange. Shapes are fixed, so pairs are sent in rounds: a first
one with room for an even load, and smaller ones for as long as any device has pairs left.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

SMALLER = 8  # a further round has this part of the first one's room


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A position-wise function of experts, and the mesh axis over which they are sharded."""

    # (kernels, rows [N, D], weights [N, 1], rows by expert [E], their order by expert [N]) -> [N, D]
    run: Callable[..., jax.Array]
    axis: str
    mesh: Mesh | AbstractMesh
    experts: int  # of all devices


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_experts(exchange: Exchange, kernels: Any, x: jax.Array, weight: jax.Array, chosen: jax.Array) -> jax.Array:
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


def _forward(exchange: Exchange, *args: Any) -> tuple[jax.Array, Any]:
    return run_experts(exchange, *args), args


def _backward(exchange: Exchange, args: Any, given: jax.Array) -> tuple[Any, jax.Array, jax.Array, None]:
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


run_experts.defvjp(_forward, _backward)


class _Route(NamedTuple):
    """The pairs of a token and an expert that a device sends and gets, by device: consecutive ones by expert."""

    exchange: Exchange
    order: jax.Array  # [P] i32, of the device's pairs by expert
    start: jax.Array  # [devices] i32, the first pair for each device, in this order
    counts: jax.Array  # [devices] i32, pairs for each device
    ends: jax.Array  # [devices, experts here] i32: of each device's pairs for here, the last ones by expert, plus one
    most: jax.Array  # [] i32, of any device of the mesh for another
    device: jax.Array  # [P] i32, to which a pair is sent
    number: jax.Array  # [P] i32, of a pair among those for its device

    @classmethod
    def of(cls, exchange: Exchange, chosen: jax.Array) -> "_Route":
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
