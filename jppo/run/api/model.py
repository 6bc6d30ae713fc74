"""The Python API: a learner and a rollout engine as one object, for your own training loop. See docs/your-own-loop.md.

    with jppo.open("path/to/model", engine="inprocess", data=dict(max_prompt_length=256, max_response_length=256)) as m:
        samples = m.sample(["2+2="], n=8)                            the engine's, with log-probs
        batch = m.batch(samples)                                     [N, L], a column for each token of a response
        batch = batch.replace(old_logprob=m.logprobs(batch), advantage=...)
        m.forward_backward(batch, "ppo")                             adds to the gradient
        m.optim_step()
        m.publish()                                                  ends the step: the engine has the new weights
        m.save("runs/mine")

It runs the passes, packing, meshes and checks of `jppo.train`, whose step is made of the same functions of
`learner/ppo.py`. `another` gives a further set of trained weights on the same programs, base and engine. `examples`
takes tokens, targets and weights of any source in place of samples.
"""

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from jppo.data.tokenizer import check_stop_texts, end_token_ids
from jppo.errors import UserError, expanded
from jppo.learner import make, ppo, sharding
from jppo.learner.auto_packing import with_packing
from jppo.learner.batch import Micro
from jppo.learner.make import open_mesh
from jppo.learner.ppo import Learner, ModelConfigs
from jppo.learner.state import scalar
from jppo.models import hf_write, placing
from jppo.rollout import make as rollout
from jppo.run.api.engine import Engine, Snapshot
from jppo.run.api.inputs import PromptLike, make_prompts, make_settings, reads_reference, require_sampling
from jppo.run.api.losses import NO_REFERENCE, Losses
from jppo.run.api.responses import Responses, entry_targets, make_responses, make_trajectory
from jppo.run.api.weights import TrainedWeights, load_state, save_state
from jppo.run.inputs import require_publishable
from jppo.run.make import begin_further_state, make_loop_learner, read_models, require_models_fit
from jppo.run.tokenizer import read_tokenizer
from jppo.samples.make import step_sampling
from jppo.settings import Loop, changed
from jppo.types import TrainState, Trajectory


class Gradient(NamedTuple):
    """The result of `forward_backward`, the pair `metrics, logprob`."""

    metrics: dict[str, float]  # as jppo.train names them; `actor/loss` or `critic/vf_loss` for a function
    logprob: np.ndarray | None  # [N, L] f32, of the policy; None from a critic and from the loss of the settings


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of `jppo.open`'s model that further sets of trained weights, from `another`, share."""

    c: Loop
    inputs: ModelConfigs
    learner: Learner
    losses: Losses
    engine: Engine
    tokenizer: Any


class Model:
    """A policy with its optimizer, perhaps a critic, and the engine that samples from it."""

    def __init__(self, parts: Parts, begin: TrainState):
        """`begin` are the weights at the start."""
        c, learner, steps = parts.c, parts.learner, max(parts.inputs.total_steps, 0)
        self._parts, self._now = parts, dataclasses.replace(begin, policy=None, value=None)
        self._close: contextlib.ExitStack | None = None  # ends engine and files; None where another model owns them
        self.policy = TrainedWeights(learner.actor, begin.policy, begin.policy_opt, c.actor, steps)
        self.critic: TrainedWeights | None = None
        if learner.critic is not None:
            self.critic = TrainedWeights(learner.critic, begin.value, begin.value_opt, c.critic, steps)
        self._sampled = 0  # calls of `sample` in this step
        self._closed = False

    @property
    def step(self) -> int:
        """Returns the steps that `publish` has ended."""
        return int(self._now.step)

    @property
    def _trained(self) -> list[TrainedWeights]:
        """Returns the weights of the policy and, if there is one, the critic."""
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    @property
    def _stepped(self) -> bool:
        """Whether an optimizer step was taken in this step."""
        return any(one.stepped for one in self._trained)

    @property
    def settings(self) -> Loop:
        """Returns all settings."""
        return self._parts.c

    @property
    def vocab_size(self) -> int:
        """Returns the number of tokens that the model knows."""
        return self._parts.inputs.policy.vocab_size

    @property
    def tokenizer(self) -> Any:
        """Returns the model's tokenizer."""
        return self._parts.tokenizer

    @property
    def state(self) -> TrainState:
        """Returns the training state, as a checkpoint has it."""
        fields = dict(policy=self.policy.params, policy_opt=self.policy.opt)
        if self.critic is not None:
            fields |= dict(value=self.critic.params, value_opt=self.critic.opt)
        return dataclasses.replace(self._now, **fields)

    def sample(
        self, prompts: Sequence[PromptLike], *, n: int | None = None, weights: Snapshot | None = None, **sampling: Any
    ) -> list[Trajectory]:
        """Samples `n` responses to each prompt, consecutive ones, with the published weights.

        A prompt is a text, chat messages, or token ids. `sampling` replaces fields of `types.Sampling`, such as
        temperature and max_tokens; the seed is derived from trainer.seed, the step, and the number of earlier calls in
        it. `weights` samples from a result of `keep`.
        """
        self._require_open()
        c, engine = self._parts.c, self._parts.engine
        tokenised = make_prompts(c, self._parts.tokenizer, prompts, self.vocab_size)
        sampling |= {} if n is None else {"n": n}
        require_sampling(sampling, limits={}, vocabulary=self.vocab_size)
        sampling = {name: value.item() if isinstance(value, np.generic) else value for name, value in sampling.items()}
        options = dataclasses.replace(step_sampling(c, self.step, self._sampled), **sampling)
        if weights is not None and engine.weights_owner is not weights:
            engine.publish(weights, weights.state)
        if weights is None and engine.weights_owner is not self:
            raise UserError(
                "the engine has other weights than this model's: it was loaded, or another set was published; call"
                " publish() first"
            )
        self._sampled += 1
        return engine.generate(tokenised, options)

    def batch(self, samples: Sequence[Trajectory]) -> Responses:
        """Makes the batch of sampled responses, with `mask` and `rollout_logprob`."""
        self._require_open()
        return self._make_batch(samples)

    def examples(self, inputs: Sequence[Any], targets: Sequence[Any] | None = None, **fields: Any) -> Responses:
        """Makes a batch of given tokens: entry t of an example is about targets[t] after reading inputs[: t + 1].

        Without `targets`, each token's is the next one, and the last token only a target. `fields` are arrays as for
        `Responses.replace`, by entry: weight, advantage, old_logprob. Every target is trained on, times its weight,
        unless `mask` says otherwise.
        """
        self._require_open()
        if targets is None:
            targets, inputs = [np.asarray(x)[1:] for x in inputs], [np.asarray(x)[:-1] for x in inputs]
        if len(inputs) != len(targets):
            raise UserError(f"{len(inputs)} inputs and {len(targets)} targets; give as many")
        trajectories = [
            make_trajectory(*pair, i, self.vocab_size) for i, pair in enumerate(zip(inputs, targets, strict=True))
        ]
        batch = dataclasses.replace(self._make_batch(trajectories), targets=entry_targets(trajectories, targets))
        return batch.replace(**fields)

    def _make_batch(self, samples: Sequence[Trajectory]) -> Responses:
        """Makes the batch [N, L] of sequences; raises UserError for one that is longer than the model's rows."""
        c = self._parts.c
        if not samples:
            raise UserError("0 samples; a batch has one at least")
        longest = min(c.data.longest_row, self._parts.learner.plan.lengths[-1] + 1)
        for t in samples:
            if len(t.tokens) > longest:
                raise UserError(
                    f"a sequence of {len(t.tokens)} tokens; at most {longest} fit, data.max_prompt_length +"
                    " max_response_length: open the model with larger ones"
                )
        columns = max(len(t.tokens) - max(1, int(np.argmax(t.sampled))) for t in samples)
        configured: int = c.data.max_response_length
        return make_responses(samples, configured if columns <= configured else longest - 1)

    def logprobs(self, batch: Responses, *, weights: Snapshot | None = None) -> np.ndarray:
        """Returns the policy's log π of the trained tokens at rollout.temperature, [N, L] f32, 0 elsewhere.

        `weights` scores with a result of `keep`. Raises Mismatch where the log-probs differ too far from the engine's
        for samples of the current weights.
        """
        self._require_open()
        learner, micros = self._parts.learner, self._pack_micros(batch)
        model = self.policy.model if weights is None else learner.policy(weights.state)
        data = ppo.with_old_logprob(learner.passes, learner.recipe, batch.data, micros, model)
        logprobs = np.asarray(data["old_logprob"])
        if weights is None and self._parts.engine.weights_owner is self and not self._stepped:
            self._parts.engine.require_match(self._parts.c, batch, logprobs)
        return logprobs

    def reference_logprobs(self, batch: Responses) -> np.ndarray:
        """Returns the frozen reference's log π of the trained tokens, [N, L] f32; open the model with `ref`."""
        self._require_open()
        learner = self._parts.learner
        if learner.reference is None:
            raise UserError(NO_REFERENCE)
        arguments = (self._pack_micros(batch), self.policy.model, learner.reference)
        return np.asarray(ppo.with_reference(learner.passes, learner.recipe, batch.data, *arguments)["ref_logprob"])

    def values(self, batch: Responses) -> np.ndarray:
        """Returns the critic's value of the state before each token, [N, L] f32."""
        self._require_open()
        if self.critic is None:
            raise UserError("values() is of a critic, and this model has none; open it with critic=True")
        passes = self._parts.learner.passes
        return np.asarray(ppo.with_values(passes, batch.data, self._pack_micros(batch), self.critic.model)["value"])

    def _pack_micros(self, batch: Responses) -> list[Micro]:
        return batch.pack_micros(self._parts.learner.plan, self._parts.learner.mesh)

    def forward_backward(
        self,
        batch: Responses,
        loss: str | Callable[..., Any] | None = None,
        *,
        of: Responses | None = None,
        **options: Any,
    ) -> Gradient:
        """Adds the gradient of a loss over the batch to what `optim_step` will apply.

        `loss` is a name (vanilla or ppo, gspo, cispo, dro, ..., cross_entropy, importance_sampling; value for the
        critic), or a function as `losses.py` describes; None is the loss of the settings: actor.loss_mode with
        entropy and KL. Means are over the tokens or sequences of the batch, or of the batch `of`, whose part it is; so
        is all else that a loss needs of a whole batch. `options` replace settings of `actor`, by the rules between
        them: clip_ratio, loss_agg_mode='token-sum', .... A new function, name or option compiles a new program, so
        define functions once.
        """
        self._require_open()
        batch_loss = self._parts.losses.find(loss, options)
        read = {"the batch": batch} | ({} if of is None or batch_loss.compiled.before is None else {"`of`": of})
        for owner, name in ((owner, name) for owner in read for name in batch_loss.needs):
            if getattr(read[owner], name) is None:
                raise UserError(
                    f"loss={loss if isinstance(loss, str) else getattr(loss, '__name__', None)!r} reads {name}, which"
                    f" {owner} lacks; set it by batch.replace({name}=...)"
                )
        learner, trained = self._parts.learner, self.critic if batch_loss.of_critic else self.policy
        assert trained is not None
        mini = trained.pack_mini(
            batch_loss.compiled,
            batch,
            of,
            lambda responses: responses.pack_mini_batch(batch_loss.compiled.reads, learner.plan, learner.mesh),
            self._now,
        )
        further = () if batch_loss.of_critic else (learner.reference if batch_loss.reads_reference else None,)
        metrics, parts = trained.forward_backward(batch_loss.compiled, mini, *further)
        return Gradient(metrics, batch.logprob_of(mini, parts))

    def optim_step(
        self,
        *,
        lr: float | None = None,
        beta1: float | None = None,
        beta2: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        grad_clip: float | None = None,
    ) -> dict[str, float]:
        """Applies the accumulated gradients of policy and critic; returns norms, rates and skipped steps.

        Without arguments, by the settings of `actor` and `critic`. Each argument replaces its setting in this step,
        for both; grad_clip=0 does not clip. A non-finite gradient changes nothing and is reported as `skipped`.
        """
        self._require_open()
        hyperparameters = dict(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, grad_clip=grad_clip)
        with_gradient = [one for one in self._trained if one.accumulated]
        if not with_gradient:
            raise UserError("optim_step() without a gradient; call forward_backward(batch, loss) first")
        metrics = dict[str, float]()
        for one in with_gradient:
            metrics |= one.optim_step(self._now.step, hyperparameters)
        return metrics

    def discard(self) -> None:
        """Drops the accumulated gradients."""
        for one in self._trained:
            one.discard()

    def publish(self) -> int:
        """Ends the step and gives the engine, if any, the policy's weights; returns the number of steps.

        The schedule of the learning rate and the seeds of sampling follow the number of steps. Without an optimizer
        step since the last time, the number stays.
        """
        self._require_open()
        step = self.step + self._stepped
        self._now = dataclasses.replace(self._now, step=scalar(step, self._now.step))
        self._begin_step()
        self._parts.engine.publish(self, self.state)
        return step

    def _begin_step(self) -> None:
        """Counts samples and optimizer steps from 0."""
        self._sampled = 0
        for one in self._trained:
            one.stepped = 0

    def keep(self) -> Snapshot:
        """Returns a copy of the policy's weights to sample from later, by `sample(weights=...)`."""
        self._require_open()
        copied = jax.tree.map(lambda x: placing.to_device(x).copy(), self.policy.params)
        state = dataclasses.replace(self.state, policy=copied, policy_opt=None, value=None, value_opt=None)
        return Snapshot(copied, state)

    def another(self, *, seed: int | None = None) -> "Model":
        """Returns a further, new set of trained weights on the same programs, base and engine.

        With LoRA its adapters are new, and the base is the same in memory. `seed` draws them; None: trainer.seed.
        """
        self._require_open()
        c = self._parts.c
        seed = c.trainer.seed if seed is None else seed
        return Model(self._parts, begin_further_state(c, self._parts.inputs, self._parts.learner, seed))

    def export(self, folder: str | pathlib.Path, *, merge: bool = True) -> pathlib.Path:
        """Writes the policy as a model directory; with `merge` False, the adapters as peft's."""
        self._require_open()
        c, cfg, adapters = self._parts.c, self._parts.learner.cfg, self._parts.inputs.adapters
        if merge:
            return hf_write.save_model(folder, self.policy.model, cfg, source=c.model.path, dtype=c.model.param_dtype)
        if adapters is None:
            raise UserError("export(merge=False) writes adapters, and this model has none; leave merge out")
        return hf_write.save_adapter(folder, self.policy.params, cfg, adapters, base=c.model.path)

    def save(self, folder: str | pathlib.Path) -> pathlib.Path:
        """Writes a checkpoint to folder/checkpoints/STEP, which `load` and `python -m jppo.export` read."""
        self._require_open()
        if unapplied := [one.accumulated for one in self._trained if one.accumulated]:
            raise UserError(
                f"gradients of {sum(unapplied)} call(s) of forward_backward are accumulated, which a checkpoint does"
                " not hold; call optim_step() first, or discard()"
            )
        step = self.step + self._stepped  # weights that were stepped and not published are of the next step
        now = dataclasses.replace(self.state, step=scalar(step, self._now.step))
        return save_state(self._parts.c, self._parts.learner, expanded(folder), now)

    def load(self, folder: str | pathlib.Path, *, optimizer: bool = True) -> int:
        """Reads the last checkpoint of a folder, or one, also of jppo.train; returns its step. Then `publish`.

        Without `optimizer`, the optimizer's state starts fresh. Accumulated gradients are dropped.
        """
        self._require_open()
        self.discard()
        learner, path = self._parts.learner, expanded(folder)
        loaded = load_state(self._parts.c, self._parts.inputs, learner, path, self.state, optimizer=optimizer)
        self.policy.params, self.policy.opt = loaded.policy, loaded.policy_opt
        if self.critic is not None:
            self.critic.params, self.critic.opt = loaded.value, loaded.value_opt
        self._now = dataclasses.replace(loaded, policy=None, policy_opt=None, value=None, value_opt=None)
        self._begin_step()
        self._parts.engine.forget(self)
        return self.step

    def close(self) -> None:
        """Frees the model; the one that `jppo.open` returned also ends the engine. May be called twice."""
        self._closed = True
        self.discard()
        self._parts.engine.forget(self)
        if self._close is not None:
            self._close.close()

    def _require_open(self) -> None:
        if self._closed or self._parts.engine.closed:
            raise UserError("this model is closed; open it again by jppo.open")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_model(
    path: str,
    *,
    mesh: Mapping[str, int] | None = None,
    lora: int | Mapping[str, Any] | None = None,
    critic: bool | str | Mapping[str, Any] | None = None,
    engine: str | Mapping[str, Any] | None = None,
    **settings: Any,
) -> Model:
    """Opens a model; `jppo.open` documents the arguments."""
    c = make_settings(path, settings, mesh=mesh, lora=lora, critic=critic, engine=engine)
    rollout.share_gpu(c)
    reads = dict(with_critic=critic not in (None, False), with_reference=reads_reference(c, settings))
    inputs = dataclasses.replace(read_models(c, **reads), total_steps=c.trainer.total_training_steps)
    policy = inputs.policy
    require_publishable(c, policy)
    tokenizer = read_tokenizer(c, *inputs.configs)
    check_stop_texts(tokenizer, c.rollout.stop_texts)
    with contextlib.ExitStack() as stack:
        device_mesh = open_mesh(c)
        c = rollout.with_servers(c, device_mesh)
        if c.data.row_lengths == -1 and inputs.total_steps == -1 and sharding.platform(device_mesh) != "cpu":
            c = changed(c, {"data.row_lengths": 4})  # as for a long run
        require_models_fit(inputs, device_mesh)
        c, _ = with_packing(c, inputs, device_mesh)
        make.attention_kernel(c, policy, device_mesh)  # raises before a server starts
        started = None
        if engine is not None:
            logs = c.trainer.run_dir
            if not logs:
                logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="jppo-", ignore_cleanup_errors=True))
            started = rollout.open_engine(c, pathlib.Path(logs))
            stack.callback(started.close)
        learner, begin = make_loop_learner(c, inputs, device_mesh)
        losses = Losses(c, inputs, device_mesh, learner.passes)
        end_ids = end_token_ids(c.model.path, tokenizer)
        shared = Engine(c, learner, started, inputs.adapters, tokenizer, end_ids)
        stack.callback(shared.close)
        model = Model(Parts(c, inputs, learner, losses, shared, tokenizer), begin)
        model.publish()
        model._close = stack.pop_all()
        return model
