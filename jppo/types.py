"""The data types that flow through jppo, and the legend of their shapes. Imports nothing of jppo.

Letters used in every shape comment of the project:

    N prompts of a step           R rows                V vocabulary        H query heads
    G samples of a prompt         T positions in a row  D width (hidden)    K key/value heads
    B = N * G trajectories        L layers; in [B, L]   F width of the MLP  A width of one head
                                    tokens of a response

The alignment rule: entry t of every [R, T] array is about emitting `targets[:, t]` after reading
`inputs[:, :t + 1]`: its log-probability, mask and reward, and the value of the state that it left. The shift
by one is made once, in `learner/packing.py`; no later line slices by one. Column k of every [B, L] array is about
emitting the k-th token of the response, which begins with the first token that was sampled.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

Params = Any  # a pytree of arrays: the `params` collection of a flax module
Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One question, tokenised, as it leaves `data/`."""

    uid: str  # the same for all samples of one prompt; unique within a file set
    data_source: str  # names the grader
    messages: str | list[dict[str, str]]  # text or chat messages, with the system prompt of the settings
    ids: np.ndarray  # [P] i32, after the chat template
    ground_truth: str
    extra: dict[str, Any]  # the row's further columns


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to sample: everything that an engine may be asked for, each field always sent."""

    temperature: float  # 0.0 is greedy
    top_p: float  # 1.0 is off
    top_k: int  # -1 is off
    min_p: float  # of the likeliest token's probability; 0.0 is off
    n: int  # samples of each prompt
    max_tokens: int  # longest response, its end token included
    stop: tuple[str, ...]  # texts that end a response and stay in it
    ignore_eos: bool  # end tokens end no response
    seed: int  # sample j of prompt i draws from a seed made of (seed, i, j)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What went on between the turns of a conversation. Made by `agent/`."""

    calls: int  # of tools
    call_errors: int  # of these: malformed, of no tool there is, or failed; the model was told each
    call_s: float  # seconds that all of them took
    score: float  # what environment or simulated user gave, added up
    fault: str | None  # why it failed: such a response has no reward


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One sampled response with its prompt; n tokens in all. Made by `rollout/`."""

    uid: str  # of its prompt
    tokens: np.ndarray  # [n] i32, prompt then response
    sampled: np.ndarray  # [n] bool, true where the policy chose the token; false for prompt and tool output
    logprob: np.ndarray  # [n] f32, the sampler's; valid where sampled, 0 elsewhere
    version: np.ndarray  # [n] i32, of the weights that sampled the token; -1 where not sampled
    text: str  # the decoded response, for graders and people; tool output in it too
    finish: (
        str  # 'stop' (an end token or a stop text was sampled), 'length', or 'abort'; of a conversation its last turn's
    )
    turns: int  # of the policy
    exchange: Exchange | None = None  # None: the policy spoke alone
    server: str = ""  # that sampled its end; '': the trainer's own engine


@dataclasses.dataclass(frozen=True)
class Reward:
    """What a grader said of one trajectory."""

    score: float  # NaN: there is none
    parts: dict[str, float]
    error: str | None  # why the grader failed: counted and shown
    answer: str | None = None  # what it compared, for majorities ('': it found none); None: it looks for no answer
    unusable: str | None = None  # why nothing can be learned from the sample; None: it is trained on


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed trajectories: the only layout the learner sees. Made by `learner/packing.py`."""

    inputs: Array  # [R, T] i32
    targets: Array  # [R, T] i32
    segment: Array  # [R, T] i32, 1.. for the trajectories of a row, 0 = empty; -1 = a prompt that all behind it share
    position: Array  # [R, T] i32, of the token in its trajectory
    mask: Array  # [R, T] bool, the target was chosen by the policy
    sequence: Array  # [R, T] i32, index of the trajectory in the step's batch; -1 = empty, or a shared prompt


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """A step's trajectories, one a row; made by `learner/batch.py`. Rows behind the last trajectory are padding.

    A field that nothing in the run asks for is None.
    """

    mask: Array  # [B, L] bool, the policy chose the token and it is learned from
    rollout_logprob: Array  # [B, L] f32, of the engine that sampled
    first: Array  # [B] i32, the entry of the trajectory that column 0 is
    score: Array  # [B] f32, NaN where there is none
    group: Array  # [B] i32, below B, equal for the samples of one prompt
    greedy: Array | None  # [B] f32, the score of the prompt's greedy response
    old_logprob: Array | None = None  # [B, L] f32, of the old policy: the trainer's before this step, or the engine's
    entropy: Array | None = None  # [B, L] f32, of the old policy
    ref_logprob: Array | None = None  # [B, L] f32, of the frozen reference
    exact_kl: Array | None = None  # [B, L] f32, of the old policy to the reference, over the whole vocabulary
    value: Array | None = None  # [B, L] f32
    weight: Array | None = None  # [B, L] f32, importance weights
    advantage: Array | None = None  # [B, L] f32
    returns: Array | None = None  # [B, L] f32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scored:
    """Rows with what the losses need of the batch, in the rows' layout. None: nothing in the run asks for it."""

    rows: Rows  # the mask is the batch's
    old_logprob: Array  # [R, T] f32
    ref_logprob: Array | None = None  # [R, T] f32
    value: Array | None = None  # [R, T] f32
    weight: Array | None = None  # [R, T] f32
    advantage: Array | None = None  # [R, T] f32
    returns: Array | None = None  # [R, T] f32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """What the means over a mini-batch are divided by, however it is cut."""

    tokens: Array  # [] f32, that are trained on
    sequences: Array  # [] f32, with such a token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that training changes; with the data cursor, all that a resume needs."""

    step: Array  # [] i32, PPO steps done; also the version of the policy's weights
    policy: Params
    policy_opt: Any
    value: Params | None  # None where the estimator needs no critic
    value_opt: Any
    kl_coef: Array  # [] f32
    bad_steps: Array  # [] i32, how many steps in a row had an update that was skipped
    key: Array  # jax.random key; the randomness of a step is fold_in(key, step)
