"""The transformer decoder: tokens to hidden states, one module for all families. Its heads are in `heads.py`.

The layers' parameters are stacked, [L, ...], whether the layers are scanned or unrolled: `params.py`
has the table of them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jppo.models import attention, kernels, lora, router
from jppo.models.attention import Attend, make_plain
from jppo.models.cache import (
    AttendCached,
    Cache,
    LayerCache,
    State,
    ToCache,
    empty_cache,
    make_layer_cache,
    make_to_cache,
    write_token,
)
from jppo.models.config import AttentionKind, Gemma4, Group, LayerModules, ModelConfig, Stack
from jppo.models.modules import (
    ACTIVATIONS,
    MLP,
    Block,
    Embed,
    Lookup,
    PerLayer,
    RMSNorm,
    look_up,
    scale_in_f32,
    split_by_stack,
)
from jppo.models.params import Head
from jppo.models.rotary import LayerPositions, Positions, add_angles, rotate
from jppo.models.router import Replayed
from jppo.models.sequence_parallel import EXCHANGED, WHOLE, Split
from jppo.types import Params

_COLLECTIONS = (lora.COLLECTION, router.SUMS, router.CHOICES)  # of a layer, next to its parameters
Remat = Literal["none", "dots", "attention", "full"]  # the outputs of a layer that are saved for its backward pass


def _save_named(*names: str) -> Callable[..., Any]:
    """Makes the policy that saves named outputs and the output of cuDNN's attention, which cannot have a name."""
    save_names = jax.checkpoint_policies.save_only_these_names(*names)
    return lambda primitive, *args, **settings: primitive.name == _CUDNN or save_names(primitive, *args, **settings)


_CUDNN = "dot_product_attention_fwd_wrapper"
POLICIES = {
    # Saves the products with weights, in the activations' dtype, and attention; recomputes the rest.
    "dots": _save_named(kernels.NAME, attention.NAME),
    "attention": _save_named(attention.NAME),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def identity(x: jax.Array) -> jax.Array:
    return x


class Attention(Block):
    """Grouped-query attention with rotary positions; of rows, of prompts for a cache, or of a token to its cache."""

    attend: Attend
    to_cache: ToCache | None
    modules: LayerModules

    @nn.compact
    def __call__(
        self, x: jax.Array, positions: LayerPositions, cache: LayerCache | None
    ) -> tuple[jax.Array, LayerCache | None]:
        """Computes attention of x [R, T, D]; returns it with the next cache, or with keys and values to share."""
        cfg, modules = self.cfg, self.modules
        D, H, (K, A), bias = cfg.hidden_size, cfg.num_heads, cfg.heads_of(modules), cfg.qkv_bias
        if cfg.fused:
            q, k, v = jnp.split(self.project("qkv", "rtd,dha->rtha", D, H + 2 * K, A)(x), (H, H + K), axis=2)
        else:
            if modules.keyed:
                k = v = self.project("k", "rtd,dka->rtka", D, K, A, bias=bias)(x)
            if modules.valued:
                v = self.project("v", "rtd,dka->rtka", D, K, A, bias=bias)(x)
            if cfg.gated:
                q_and_gate = self.project("q", "rtd,dhga->rthga", D, H, 2, A, bias=bias)(x)
                q, gate = q_and_gate[:, :, :, 0], q_and_gate[:, :, :, 1]
            else:
                q = self.project("q", "rtd,dha->rtha", D, H, A, bias=bias)(x)
        if cfg.qk_norm is not None:
            axes = 1 if cfg.qk_norm == "head" else 2
            q = self.norm("q_norm", axes=axes)(q)
            if modules.keyed:
                k = self.norm("k_norm", axes=axes)(k)
        if cfg.gemma4 is not None and modules.keyed:
            v = RMSNorm(cfg, self.param_dtype, scaled=False)(v)
        sinks = self.weight("sinks", nn.initializers.normal(cfg.initializer_range), H) if cfg.sinks else None
        q = rotate(q, positions.cos, positions.sin)
        if modules.keyed:
            k = rotate(k, positions.cos, positions.sin)
        elif positions.slot is None:
            k, v = positions.shared
        if positions.slot is None:
            assert positions.segment is not None
            output = self.attend(q, k, v, positions.segment, positions.kind, sinks)  # [R, T, H, A]
            if modules.keys == "kept" or cache is not None:
                cache = make_layer_cache(k, v)
        else:
            assert cache is not None and self.to_cache is not None
            cache = write_token(cache, k, v, positions.slot) if modules.keyed else cache
            assert cache.v is not None
            output = self.to_cache(q, cache.k, cache.v, positions, sinks)
        if cfg.gated:
            output *= jax.nn.sigmoid(gate)
        return self.project("o", "rtha,had->rtd", H, A, D, bias=cfg.o_bias)(output), cache


class Layer(Block):
    """A block: x + attention(norm(x)), or a recurrence; then x + mlp(norm(x)), or experts. The body of a scan.

    The norms may be on the outputs instead, or on both.
    """

    constrain: Callable[[jax.Array], jax.Array]
    attend: Attend
    to_cache: ToCache | None  # None: without a cache, or for its prompts alone
    mesh: Mesh | None
    split: Split
    modules: LayerModules

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        kind: jax.Array | int,
        positions: Positions,
        replayed: Replayed = None,
        layer_embedding: jax.Array | None = None,
        cache: State | None = None,
    ) -> tuple[jax.Array, State | None]:
        """Computes the layer's output [R, T, D] and its next cache, if there is one."""
        cfg, modules = self.cfg, self.modules

        def norm(name: str, y: jax.Array, enabled: bool = True) -> jax.Array:
            return self.norm(name)(y) if enabled else y

        mixer: Any
        if modules.mixer == "delta":
            from jppo.models.delta import DeltaNet

            mixer = DeltaNet(cfg, self.param_dtype, name="delta")
        elif cfg.latent is not None:
            from jppo.models.delta import LatentAttention

            mixer = LatentAttention(cfg, self.param_dtype, self.attend, self.to_cache, name="attn")
        else:
            mixer = Attention(cfg, self.param_dtype, self.attend, self.to_cache, modules, name="attn")
        y, cache = mixer(norm("attn_norm", x, cfg.pre_norms), positions.for_layer(kind, modules.kind), cache)
        x = x + scale_in_f32(norm("attn_post_norm", y, cfg.post_norms), cfg.residual_scale)
        y = norm("mlp_norm", x, cfg.pre_norms)
        if modules.dense:
            y = MLP(cfg, self.param_dtype, cfg.mlp_width(modules), name="mlp")(y)
        if modules.sparse:
            from jppo.models.experts import Mixture

            mixture = Mixture(cfg, self.param_dtype, self.mesh, self.split, name="experts")
            if modules.beside:
                experts_output = mixture(norm("experts_norm", x), replayed, positions.counted, x)
                y = norm("mlp_own_norm", y) + norm("experts_post_norm", experts_output)
            else:
                y = mixture(y, replayed, positions.counted)
        x = x + scale_in_f32(norm("mlp_post_norm", y, cfg.post_norms), cfg.residual_scale)
        if cfg.gemma4 is not None:
            x = self._add_layer_embedding(cfg.gemma4, x, layer_embedding)
        return self.constrain(x), cache

    def _add_layer_embedding(self, spec: Gemma4, x: jax.Array, layer_embedding: jax.Array | None) -> jax.Array:
        """Adds the layer's own embedding of the token, gated by the state, and multiplies by the layer's factor."""
        D, P = self.cfg.hidden_size, spec.per_layer
        if layer_embedding is not None:
            gate = ACTIVATIONS[self.cfg.activation](self.project("per_layer_gate", "rtd,dp->rtp", D, P)(x))
            y = self.project("per_layer_out", "rtp,pd->rtd", P, D)(gate * layer_embedding)
            x = x + self.norm("per_layer_norm")(y)
        factor = self.weight("scalar", nn.initializers.ones, 1)
        return x * jax.lax.stop_gradient(factor).astype(x.dtype)[None, None]


class Period(nn.Module):
    """A layer of each stack of a group. The body of the scan over a group of several."""

    group: Group
    make: Callable[[Stack], Layer]

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        kinds: jax.Array,
        positions: Positions,
        replayed: tuple[Replayed, ...],
        layer_embeddings: tuple[jax.Array | None, ...],
    ) -> tuple[jax.Array, None]:
        for i, stack in enumerate(self.group):
            x, _ = self.make(stack)(x, kinds[i], positions, replayed[i], layer_embeddings[i])
        return x, None


class Decoder(nn.Module):
    """A decoder: `apply({'params': params}, tokens, segment, position)` is the state after the last norm, [R, T, D].

    With a collection `lora` next to `params` (`lora.py`) its adapters are part of the model. With a mutable collection
    `router` the layers leave their sums over `counted` tokens there (`router.py`).
    """

    cfg: ModelConfig
    dtype: Any = jnp.float32  # of the activations and of the products
    param_dtype: Any = jnp.float32
    scan_layers: bool = True  # False unrolls: slower to compile, faster on CPU
    remat: Remat = "none"  # saved for the backward pass of a layer: all, products and attention, attention, nothing
    constrain: Callable[[jax.Array], jax.Array] = identity  # on activations [R, T, D]: their sharding
    attend: Attend | None = None  # None: by XLA alone
    lookup: Lookup = look_up  # of token embeddings
    mesh: Mesh | None = None  # None: one device
    split: Split = EXCHANGED  # of the rows over the mesh

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        segment: jax.Array,
        position: jax.Array,
        counted: jax.Array | None = None,
        replayed: Replayed = None,
    ) -> jax.Array:
        """Computes the hidden states [R, T, D] of tokens [R, T]; `replayed` experts replace the routers' choices."""
        chex.assert_rank([tokens, segment, position], 2)
        chex.assert_equal_shape([tokens, segment, position])
        cfg = self.cfg
        embed = Embed(cfg, self.param_dtype, self.dtype, self.lookup, cfg.hidden_size, name="embed")
        x = self.constrain(scale_embeddings(embed(tokens), cfg, self.dtype))
        embeddings = None
        if cfg.gemma4 is not None and cfg.gemma4.per_layer:
            embeddings = PerLayer(cfg, self.param_dtype, self.lookup, name="per_layer")(tokens, x)
        layer: Any = Layer
        if self.remat != "none":
            # In a real loop XLA cannot merge the recomputation with the first computation; unrolled it could.
            layer = nn.remat(layer, policy=POLICIES[self.remat], prevent_cse=not self.scan_layers)
        attend = make_plain(**attention_settings(cfg)) if self.attend is None else self.attend
        positions = dataclasses.replace(positions_by_kind(cfg, position, segment), counted=counted)

        def settings(stack: Stack) -> tuple[Any, ...]:
            return cfg, self.param_dtype, self.constrain, attend, None, self.mesh, self.split, stack.modules

        for group in cfg.groups:
            count = group[0].count
            scan = functools.partial(
                nn.scan,
                variable_axes={"params": 0, **dict.fromkeys(_COLLECTIONS, 0)},
                split_rngs={"params": True},
                in_axes=(0, nn.broadcast, 0, 0),
                length=count,
                unroll=1 if self.scan_layers else count,
            )
            kinds = jnp.asarray([cfg.layer_kinds[stack.layers] for stack in group], jnp.int32)
            replays, vectors = split_by_stack(replayed, group, of_sparse=True), split_by_stack(embeddings, group)
            if len(group) == 1:
                layers = scan(layer)(*settings(group[0]), name=group[0].path[0])
                x, shared_keys = layers(x, kinds[0], positions, replays[0], vectors[0])
                if shared_keys is not None:  # later layers of this kind share them
                    positions = positions.sharing(group[0].modules.kind, jax.tree.map(lambda x: x[0], shared_keys))
            else:
                periods = scan(Period)(
                    group, lambda stack: layer(*settings(stack), name=stack.path[1]), name=group[0].path[0]
                )
                x, _ = periods(x, kinds.T, positions, replays, vectors)
        return self.constrain(RMSNorm(cfg, self.param_dtype, name="norm")(x))


def attention_settings(cfg: ModelConfig) -> dict[str, Any]:
    """Returns the arguments of attention that a model sets: scale, soft cap and windows."""
    windows = tuple(kind.window for kind in cfg.kinds)
    return dict(scale=cfg.query_scale, softcap=cfg.attn_softcap, windows=windows)


def positions_by_kind(cfg: ModelConfig, position: jax.Array, segment: jax.Array | None) -> Positions:
    """Returns the tokens' positions, with the rotary angles of every kind of layer."""

    def rotary_dim(kind: AttentionKind) -> int:
        if kind.heads is not None:
            return kind.heads.head_dim
        return cfg.head_dim if cfg.latent is None else cfg.latent.rotary_dim

    return add_angles([(kind.rotary, rotary_dim(kind)) for kind in cfg.kinds], position, segment)


def scale_embeddings(embeddings: jax.Array, cfg: ModelConfig, dtype: Any) -> jax.Array:
    """Casts looked-up embeddings [R, T, D] and scales them, as inputs of the first layer."""
    x = embeddings.astype(dtype)
    return x if cfg.embed_scale == 1.0 else x * jnp.asarray(cfg.embed_scale, dtype)  # rounded, as by transformers


def split_layers(variables: Params, cfg: ModelConfig) -> Params:
    """Splits the stacked parameters into a tuple of layers: once before a loop of `forward_token`."""
    layers_by_index: dict[int, Params] = {}
    for stack in cfg.stacks:
        parts = {name: lora.find_part(part, stack.path) for name, part in variables.items()}
        layers = {name: part for name, part in parts.items() if part is not None}
        for i in range(stack.count):
            layers_by_index[stack.first + i * stack.step] = jax.tree.map(lambda x, i=i: x[i], layers)
    return {
        "layers": tuple(layers_by_index[i] for i in range(cfg.num_layers)),
        **{name: variables["params"][name] for name in ("embed", "norm", "per_layer") if name in variables["params"]},
    }


def forward_prompts(
    split: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    segment: jax.Array,
    *,
    dtype: Any,
    attend: Attend,
    constrain: Callable[[jax.Array], jax.Array] = identity,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, Cache, jax.Array | None]:
    """Runs prompts [N, P]; returns their states [N, P, D], their cache, whose entry p is position p, and experts.

    `segment` [N, P] is 0 for padding, which follows a prompt.
    """
    chex.assert_equal_shape([tokens, segment])
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    positions = positions_by_kind(cfg, position, segment)
    cache = empty_cache(cfg, rows=tokens.shape[0], length=0, dtype=dtype)
    forward = functools.partial(_forward_split, split, cfg, dtype=dtype, constrain=constrain, mesh=mesh)
    return forward(tokens, positions, cache, attend=attend, to_cache=None)


def forward_token(
    split: Params,
    cfg: ModelConfig,
    token: jax.Array,
    position: jax.Array,
    cache: Cache,
    slot: jax.Array,
    *,
    dtype: Any,
    attend: AttendCached,
    constrain: Callable[[jax.Array], jax.Array] = identity,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, Cache, jax.Array | None]:
    """Runs each row's newest token [R], at `position` [R], into `slot` of the cache.

    Returns its states [R, 1, D], the next cache, and experts.
    """
    chex.assert_rank([token, position, slot], [1, 1, 0])
    positions = dataclasses.replace(positions_by_kind(cfg, position[:, None], None), slot=slot)
    forward = functools.partial(_forward_split, split, cfg, dtype=dtype, constrain=constrain, mesh=mesh)
    to_cache = make_to_cache(attend, attention_settings(cfg)["windows"])
    return forward(token[:, None], positions, cache, attend=_no_rows, to_cache=to_cache)


def _no_rows(*_: Any) -> jax.Array:
    raise AssertionError("a token attends to its cache")


def _forward_split(
    split: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    positions: Positions,
    cache: Cache,
    *,
    dtype: Any,
    attend: Attend,
    to_cache: ToCache | None,
    constrain: Callable[[jax.Array], jax.Array],
    mesh: Mesh | None,
) -> tuple[jax.Array, Cache, jax.Array | None]:
    """Runs tokens [R, P] through the layers of `split_layers`, each with its cache."""
    x = constrain(scale_embeddings(split["embed"]["embedding"][tokens], cfg, dtype))
    layer_embeddings = [None] * cfg.num_layers
    if "per_layer" in split:
        embeddings: Any = PerLayer(cfg, dtype, look_up).apply({"params": split["per_layer"]}, tokens, x)
        layer_embeddings = list(jnp.moveaxis(embeddings, 2, 0))
    next_cache, chosen, shared = list[State | None](), list[jax.Array | None](), dict[int | None, State]()
    layers = zip(split["layers"], cfg.layer_kinds, cache, cfg.layer_modules, layer_embeddings, strict=True)
    for variables, kind, layer_cache, modules, embedding in layers:
        layer = Layer(cfg, dtype, constrain, attend, to_cache, mesh, WHOLE, modules)
        layer_cache = layer_cache if modules.keyed else shared[modules.kind]
        (x, state), updates = layer.apply(
            variables, x, kind, positions, None, embedding, layer_cache, mutable=[router.CHOICES]
        )
        next_cache.append(state if modules.keyed else None)
        if modules.keys == "kept":
            shared[modules.kind] = state
            positions = positions.sharing(modules.kind, state)
        chosen.append(router.layer_choice(updates))
    output: Any = RMSNorm(cfg, dtype).apply({"params": split["norm"]}, x)
    return output, tuple(next_cache), router.stacked_choices(chosen)


def init_params(cfg: ModelConfig, key: jax.Array, *, head: Head, param_dtype: Any) -> Params:
    """Initialises parameters: normal by `initializer_range`, norms 1, biases 0; pure, so jit may shard them."""
    empty = jnp.zeros((1, 1), jnp.int32)
    decoder = Decoder(cfg, param_dtype=param_dtype)
    trunk = decoder.init(jax.random.fold_in(key, 0), empty, empty, empty)["params"]
    return trunk | init_head(cfg, jax.random.fold_in(key, 1), head=head, param_dtype=param_dtype)


def init_head(cfg: ModelConfig, key: jax.Array, *, head: Head, param_dtype: Any) -> Params:
    """Initialises the head's parameters: `score` or `lm_head`, or nothing if it is tied.

    A score is zeros by default. Random ones make values of a size that depends on the scale of the model's last norm:
    noise in the advantages until the critic has unlearned it.
    """
    if head == "value":
        make = jax.nn.initializers.normal(cfg.value_head_std) if cfg.value_head_std else jax.nn.initializers.zeros
        return {"score": {"kernel": make(key, (cfg.hidden_size, cfg.value_bins), param_dtype)}}
    if cfg.tie_word_embeddings:
        return {}
    shape = (cfg.padded_vocab_size, cfg.hidden_size)
    return {"lm_head": {"kernel": cfg.initializer_range * jax.random.normal(key, shape, param_dtype)}}


def head_kernel(params: Params, cfg: ModelConfig) -> jax.Array:
    """Returns the matrix from hidden states to logits, [V, D]: the embedding table itself if the two are tied."""
    kernel: jax.Array = params["embed"]["embedding"] if cfg.tie_word_embeddings else params["lm_head"]["kernel"]
    return kernel
