"""The train state, initialised in its shards: everything that training changes, with the step's number and shuffles."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from optax.contrib import MuonDimensionNumbers

from jppo.learner import sharding, streams
from jppo.learner.optim import in_f32, map_state
from jppo.learner.trainable import Trainable
from jppo.models import hf, kernels, lora, params, placing
from jppo.models.config import ModelConfig
from jppo.models.decoder import init_head, init_params
from jppo.models.freeze import ALL_LEARN, Frozen
from jppo.models.lora import Base, Lora
from jppo.models.params import Head
from jppo.types import Array, Params, TrainState

Spare = Mapping[str, Any]  # rows of padding that a mesh added to arrays, by field of the train state


@dataclasses.dataclass(frozen=True)
class ModelLayout:
    """The parameters of one model as shapes and shardings, before any is loaded."""

    cfg: ModelConfig
    head: Head
    shapes: Params
    shardings: Params
    spare: Params  # padding rows of the first axis
    still: Params  # rows at the end of the first axis that no update changes: padding, or all of a buffer's
    matrices: Params  # MuonDimensionNumbers of the layers' matrices; None: other parameters


def model_weights(
    cfg: ModelConfig, mesh: Mesh, *, head: Head, param_dtype: Any, adapters: Lora | None = None,
    frozen: Frozen = ALL_LEARN,
) -> ModelLayout:  # fmt: skip
    """Returns shapes and shardings of a model with this head, from the table of parameters; of the base of adapters.

    Parameters that are `frozen` are left out.
    """
    entries = tuple(entry for entry in params.table(cfg, head=head) if entry.path not in frozen)
    return _make_layout(cfg, mesh, entries, head=head, dtype=param_dtype, method=lora.base_method(cfg, adapters))


def adapters(cfg: ModelConfig, mesh: Mesh, spec: Lora, *, head: Head) -> ModelLayout:
    """Returns shapes and shardings of a model's adapters, and of a critic's value head; in f32."""
    return _make_layout(cfg, mesh, lora.adapter_table(cfg, spec, head=head), head=head, dtype=jnp.float32)


def _make_layout(
    cfg: ModelConfig, mesh: Mesh, entries: tuple[params.Entry, ...], *, head: Head, dtype: Any, method: str = "none"
) -> ModelLayout:
    """Makes the layout of the parameters in a table; `method` is the quantisation of those that are frozen."""
    shapes = params.tree(entries, lambda entry: kernels.stored_form(entry, dtype, method))
    shardings = sharding.param_shardings(mesh, params.tree(entries, lambda entry: entry.axes), shapes)
    matrices = params.tree(entries, lambda entry: entry.matrix and MuonDimensionNumbers(*entry.matrix))
    spare, still = (params.tree(entries, operator.attrgetter(name)) for name in ("padding", "still"))
    return ModelLayout(cfg, head, shapes, shardings, spare, still, matrices)


def abstract(layout: ModelLayout) -> Params:
    """Returns the parameters as abstract arrays; nothing is allocated."""
    return _with_shardings(layout.shapes, layout.shardings)


def _with_shardings(shapes: Any, places: Any) -> Any:
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, places)


def _param_dtype(layout: ModelLayout) -> Any:
    """Returns the dtype of a model's parameters; codes of quantised ones have another."""
    return layout.shapes["embed"]["embedding"].dtype


def load_sharded(layout: ModelLayout, path: str, *, init: str, key: jax.Array) -> Params:
    """Loads the parameters in their shards from the checkpoint at `path`.

    They are random ones if init is 'random', and shapes without arrays if it is 'shapes'.
    """
    if init == "shapes":
        return abstract(layout)
    dtype = _param_dtype(layout)
    if init == "random":
        draw = functools.partial(init_params, layout.cfg, head=layout.head, param_dtype=dtype)
        return jax.jit(lambda key: kernels.stored_like(layout.shapes, draw(key)), out_shardings=layout.shardings)(key)
    return hf.load_params(path, layout.cfg, head=layout.head, param_dtype=dtype, shardings=layout.shardings, key=key)


def on_trunk(layout: ModelLayout, trunk: Params, *, key: jax.Array) -> Params:
    """Makes a critic on a policy's trunk: the same arrays, and a new value head."""
    shared_weights = {name: part for name, part in trunk.items() if name in layout.shapes}
    if placing.are_shapes(trunk):
        return shared_weights | {"score": abstract(layout)["score"]}
    score = init_head(layout.cfg, key, head="value", param_dtype=_param_dtype(layout))["score"]
    return shared_weights | {"score": placing.put(score, layout.shardings["score"])}


def adapt(layout: ModelLayout, values: Params, spec: Lora, *, key: jax.Array, path: str = "") -> tuple[Params, Base]:
    """Splits a model into learned and frozen weights: adapters of `layout` with a critic's value head, and the base.

    The adapters are fresh, or a policy's at `path`.
    """

    def init_learned(values: Params) -> Params:
        new_weights = lora.init(layout.cfg, spec, key)
        if layout.head == "value":
            new_weights["score"] = jax.tree.map(lambda x: x.astype(jnp.float32), values["score"])
        return new_weights

    scores = {"score": values["score"]} if layout.head == "value" else {}
    base = Base({name: x for name, x in values.items() if name not in scores}, spec.scale, spec.dropout)
    if placing.are_shapes(values):
        return abstract(layout), base
    if path:
        return hf.load_adapters(path, layout.cfg, spec, shardings=layout.shardings), base
    return jax.jit(init_learned, out_shardings=layout.shardings)(scores), base


def init_optimizer(tx: optax.GradientTransformation, layout: ModelLayout, values: Params) -> tuple[Any, Any]:
    """Initialises the optimizer's state in its shards, or as shapes for shapes; returns also its shardings."""
    shardings = sharding.optimizer_shardings(tx, layout.shapes, layout.shardings)
    begin = jax.jit(lambda p: tx.init(in_f32(p)), out_shardings=shardings)
    if placing.are_shapes(values):
        return _with_shardings(jax.eval_shape(begin, layout.shapes), shardings), shardings
    return begin(placing.to_device(values)), shardings


def spare_of_optimizer(tx: optax.GradientTransformation, layout: ModelLayout) -> Any:
    """Returns the number of padding rows, as `layout.spare`, for each leaf of the optimizer's state."""

    def count(leaf: Any, shape: Any, rows: int) -> int:
        axes = sharding.axes_of(leaf.shape, shape.shape)
        return rows if axes and all(0 in one for one in axes) else 0

    return map_state(count, jax.eval_shape(tx.init, layout.shapes), layout.shapes, layout.spare, other=lambda _: 0)


def spare_rows(*, policy: Trainable | None = None, value: Trainable | None = None) -> Spare:
    """Returns the rows of mesh padding of these models and their optimizers; {} without any."""
    spares: dict[str, Any] = {}
    for name, model in (("policy", policy), ("value", value)):
        if model is not None:
            spares |= dict(zip((name, f"{name}_opt"), model.spare, strict=True))
    return {name: spare for name, spare in spares.items() if any(jax.tree.leaves(spare))}


def remove_padding(now: TrainState, spare: Spare) -> TrainState:
    """Returns the state without mesh padding, so that it fits any mesh."""

    def cut(x: jax.Array, n: int) -> jax.Array:
        return placing.to_device(x)[: x.shape[0] - n] if n else x

    fields = {name: jax.tree.map(cut, getattr(now, name), rows) for name, rows in spare.items()}
    return dataclasses.replace(now, **fields)


def restore_padding(now: TrainState, spare: Spare, template: TrainState) -> TrainState:
    """Inverts `remove_padding`: adds `spare` rows of zeros to each array that had them, sharded as in `template`."""

    def add_padding(x: jax.Array, n: int, template: jax.Array) -> jax.Array:
        return jax.device_put(jnp.pad(x, [(0, n)] + [(0, 0)] * (x.ndim - 1)), template.sharding) if n else x

    fields = {n: jax.tree.map(add_padding, getattr(now, n), rows, getattr(template, n)) for n, rows in spare.items()}
    return dataclasses.replace(now, **fields)


def begin_state(
    policy: Params | None,
    policy_opt: Any,
    value: Params | None,
    value_opt: Any,
    *,
    kl_coef: float = 0.0,
    seed: int,
    value_norm: Sequence[float] | None = None,
) -> TrainState:
    """Makes the state before the first step; of shapes, if the models are. `value_norm` as in `TrainState`."""
    put = placing.shapes if placing.are_shapes((policy, value)) else placing.put
    replicated = sharding.replicated(placing.mesh_of((policy, value)))
    return TrainState(
        step=put(jnp.int32(0), replicated),
        policy=policy,
        policy_opt=policy_opt,
        value=value,
        value_opt=value_opt,
        kl_coef=put(jnp.float32(kl_coef), replicated),
        bad_steps=put(jnp.int32(0), replicated),
        key=put(jax.random.key(seed), replicated),
        value_norm=None if value_norm is None else put(jnp.asarray(value_norm, jnp.float32), replicated),
    )


def next_step(
    now: TrainState,
    kl: float,
    *,
    bad: bool,
    learned: bool,
    adapt_kl: Callable[[Array, Array], Array] | None = None,
    value_norm: Any = None,
) -> TrainState:
    """Returns the state after a step with KL `kl` in the reward and new statistics of returns.

    `bad`: an update was skipped, and its statistics may be non-finite. `adapt_kl` is (β, KL) -> the next β.

    A step without a token to learn from (`learned` is False) changes only its number.
    """
    step = scalar(int(now.step) + 1, now.step)
    if not learned:
        return dataclasses.replace(now, step=step)
    kl_coef = now.kl_coef
    if adapt_kl is not None and not bad:  # a non-finite KL would stay in the coefficient
        kl_coef = scalar(adapt_kl(now.kl_coef, np.asarray(kl, np.float32)), now.kl_coef)
    bad_steps = scalar((int(now.bad_steps) + 1) * bad, now.bad_steps)
    if now.value_norm is not None and not bad:
        now = dataclasses.replace(now, value_norm=scalar(value_norm, now.value_norm))
    return dataclasses.replace(now, step=step, kl_coef=kl_coef, bad_steps=bad_steps)


def scalar(x: Any, template: Array) -> Any:
    """Puts a host number or array in another array's dtype on its devices, without compiling."""
    assert isinstance(template, jax.Array)
    return placing.put(np.asarray(x, template.dtype), template.sharding)


def order(now: TrainState, stream: int, epoch: int, count: int, *, shuffle: bool, max_count: int = 0) -> np.ndarray:
    """Returns the order of the step's trajectories in one epoch of a model's update.

    `max_count` is the largest count of any step: one program draws so many, and each step takes its own of them.
    """
    if not shuffle:
        return np.arange(count)
    drawn = np.asarray(draw_order(now.key, now.step, np.int32(stream), np.int32(epoch), max(max_count, count)))
    return drawn[drawn < count]


@functools.partial(jax.jit, static_argnames="count")
def draw_order(key: Array, step: Array, stream: Array, epoch: Array, count: int) -> jax.Array:
    """Draws a permutation of `count` sequences, other for each step, stream and epoch."""
    return jax.random.permutation(streams.fold(key, step, stream, epoch), count)
