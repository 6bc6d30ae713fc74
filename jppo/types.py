"""The data types of jppo, and the legend of their shapes. Imports nothing of jppo.

Letters used in every shape comment of the project:

    N entries, as the comment     R rows                V vocabulary        H query heads
      says, such as episodes      T positions in a row  D width (hidden)    K key/value heads
    B trajectories of a step      L layers; in [B, L]   F width of the MLP  A width of one head
      and padding                   and [N, L] tokens of a response

The alignment rule: entry t of every [R, T] array is about emitting `targets[:, t]` after reading `inputs[:, :t + 1]`.
It is that token's log-probability, mask or reward, or the value of the state before it. `learner/packing.py` makes
this shift by one for rows, and `learner/batch.py` reads and fills them by it; passes and losses never shift. Column k
of every [B, L] array is about emitting the k-th token of the response, which begins with the first sampled token.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np

OVERFLOW = -2  # in place of the kept tokens of a sample, where there are more than are returned

Params = Any  # a pytree of arrays: the `params` collection of a flax module
Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A tokenised question from `data/`."""

    uid: str  # the same for all samples of one prompt; unique within a file set
    data_source: str  # name of the grader; 'unknown' without one
    messages: str | list[dict[str, str]]  # text or chat messages, with the settings' system prompt
    ids: np.ndarray  # [P] i32, after the chat template
    ground_truth: str  # '' without one
    extra: dict[str, Any]  # the row's other columns


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters; each field is sent in every request."""

    temperature: float  # 0.0 is greedy
    top_p: float  # 1.0 is off
    top_k: int  # -1 is off
    min_p: float  # relative to the likeliest token's probability; 0.0 is off
    n: int  # samples of each prompt
    max_tokens: int  # maximum response length, its end token included
    stop: tuple[str, ...]  # texts that end a response, which includes them
    ignore_eos: bool  # end tokens do not end a response
    seed: int  # sample j of prompt i has a seed made of (seed, i, j)
    experts: bool = False  # answers have the experts of each token
    kept: int = 0  # answers have the tokens that top_p, top_k and min_p kept, up to so many; 0: none
    stop_ids: tuple[int, ...] = ()  # tokens that end a response besides the model's end tokens


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Tool and environment results of a conversation. Made by the plugin `agents`."""

    calls: int  # of tools
    call_errors: int  # calls that were malformed, to an unknown tool, or failed; the model saw each error
    call_s: float  # seconds in all calls
    score: float  # sum of the scores from an environment or simulated user
    fault: str | None  # the failure's reason: such a response has no reward
    earned: tuple[tuple[int, float], ...] = ()  # the scores, as in Reward: each at the last token of its turn
    tool_earned: tuple[tuple[int, float], ...] = ()  # the rewards from tools, in the same form
    program_s: float | None = None  # seconds of an agent program outside the engine; None: no program
    branches_left_out: int = 0  # of an agent's episode, beyond the limit
    refusal: str = ""  # why the last request that an agent's episode could not answer was refused


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """A sampled or given response with its prompt; n tokens in all. Made by `rollout/` and `samples/given.py`."""

    uid: str  # of its prompt
    tokens: np.ndarray  # [n] i32, prompt then response
    sampled: np.ndarray  # [n] bool, true where the policy chose the token, or was given it; false for prompt and tools
    logprob: np.ndarray  # [n] f32, the rollout engine's; valid where sampled, 0 elsewhere
    version: np.ndarray  # [n] i32, of the weights that sampled the token; -1 where none did
    text: str  # the decoded response, for graders and people; tool output in it too
    finish: (
        str  # 'stop' (an end token or a stop text was sampled), 'length', or 'abort'; of a conversation its last turn's
    )
    turns: int  # of the policy
    exchange: Exchange | None = None  # None: no tools or environment
    server: str = ""  # server of the last turn; '': the trainer's own engine
    branches: tuple["Trajectory", ...] = ()  # other ones of the same episode and reward
    experts: np.ndarray | None = None  # [n, L, active] i16, by which each token was read; -1: not known
    # [n, k] i32, the tokens of which each was sampled, then -1; first -1: the whole vocabulary, or not sampled;
    # first OVERFLOW: too many to be returned. None: not known
    kept: np.ndarray | None = None

    @property
    def given(self) -> bool:
        """Whether no weights sampled it: a demonstration, which the policy learns from as from its own response."""
        return bool((self.version[self.sampled] < 0).any())


def given_text(tokens: np.ndarray, sampled: np.ndarray, uid: str = "") -> Trajectory:
    """Returns tokens that no engine sampled in the layout of a response; `sampled` marks those to learn from."""
    empty = np.zeros(len(tokens), np.float32)
    return Trajectory(uid, tokens.astype(np.int32), sampled, empty, np.full(len(tokens), -1, np.int32), "", "stop", 1)


@dataclasses.dataclass(frozen=True)
class Reward:
    """A grader's result for one trajectory."""

    score: float  # NaN: none
    parts: dict[str, float]
    error: str | None  # the grader's failure, counted and shown
    answer: str | None = None  # the compared answer, for majorities ('': none found); None: not looked for
    unusable: str | None = None  # why the sample is not trained on; None: it is
    # (token, amount): parts of the score that are earned at this token of the response, which begins with the first
    # sampled one; the rest of the score is earned at the last token
    earned: tuple[tuple[int, float], ...] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed trajectories, the learner's only layout. Made by `learner/packing.py`."""

    inputs: Array  # [R, T] i32
    targets: Array  # [R, T] i32
    segment: Array  # [R, T] i32, 1.. for the trajectories of a row, 0 = empty; -1 = a prompt that later ones share
    position: Array  # [R, T] i32, of the token in its trajectory
    mask: Array  # [R, T] bool, the policy sampled the target
    sequence: Array  # [R, T] i32, index of the trajectory in the step's batch; -1 = empty, or a shared prompt
    experts: Array | None = None  # [R, T, L, active] i16, of the inputs in place of the routers' choice; -1 = none
    kept: Array | None = None  # [R, T, K] i32, of which the targets were sampled, as in Trajectory
    dropout: Array | None = None  # [R, T] u32, seeds of the adapters' dropout; None: no dropout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """A step's trajectories, one a row; made by `learner/batch.py`. Rows after the last trajectory are padding.

    Tokens stay in the trajectories, which are passed along and packed with it.

    `arrays` are those that the run needs besides, by name, f32 unless said otherwise:

        given [B] bool      the response was given, and not sampled
        greedy [B]          the score of the prompt's greedy response
        episode [B] i32     the first row of an agent's episode, which alone has its group
        earned              parts of the score that are earned at a token
        old_logprob         of the old policy: the trainer's before this step, or the engine's
        entropy             of the old policy
        routing_differs     share of replayed experts that the old policy would not choose
        ref_logprob         of the frozen reference
        exact_kl            old policy to reference, over the whole vocabulary
        value               the critic's output
        weight              importance weights
        reward              of the token, with its share of the KL
        advantage, returns  the second normalised as the values are
        positive            1 on the trained tokens of responses with a score above 0, else 0
        value_norm [3]      statistics that normalise values, with this step's returns

    and what an algorithm reads by a name of its own, under the name of that read: parts of the reward and columns of a
    memory [B], statistics of the old policy's logits [B, L].
    """

    mask: Array  # [B, L] bool, the token is of the policy, or given, and it is trained on
    rollout_logprob: Array  # [B, L] f32, the rollout engine's; 0 for given responses
    first: Array  # [B] i32, the trajectory's entry at column 0
    score: Array  # [B] f32, NaN if there is none
    group: Array  # [B] i32, below B, equal for the samples of one prompt
    length: Array  # [B] f32, tokens of the response that the policy sampled, trained on or not
    arrays: dict[str, Array] = dataclasses.field(default_factory=dict)  # [B, L] f32 but for those above

    def __getitem__(self, name: str) -> Array:
        """Returns one of the arrays."""
        return self.arrays[name]

    def get(self, name: str) -> Array | None:
        return self.arrays.get(name)

    def with_arrays(self, **arrays: Array | None) -> "Batch":
        """Returns the batch with more or other arrays; those that are None are left out."""
        updated = {name: x for name, x in ({**self.arrays} | arrays).items() if x is not None}
        return dataclasses.replace(self, arrays=updated)

    @property
    def sampled(self) -> Array:
        """The trained tokens that the policy sampled, [B, L] bool."""
        return self.mask & ~self["given"][:, None] if "given" in self.arrays else self.mask


@dataclasses.dataclass(frozen=True)
class StepData:
    """A step before the update of its weights, for an algorithm's host functions. Its arrays are read-only.

    It has all N episodes that the step sampled, n in turn of each draw of a prompt, which a step may draw twice. Row
    `rows[i]` of the batch is of the episode i; further branches of agents' episodes are the rows r with
    batch["episode"][r] != r.
    """

    number: int  # of the step, from 1, as in metrics.jsonl
    folder: pathlib.Path  # of the run
    prompts: list[Prompt]  # [N]
    places: np.ndarray  # [N] i64, of the prompts in the data, from 0
    trajectories: list[Trajectory]  # [N], each with its branches
    rewards: list[Reward]  # [N], as graded; not usable where `unusable` says why
    rows: np.ndarray  # [N] i32, of the batch; -1: dynamic sampling has dropped the episode
    batch: Batch  # [B, L], with advantages; rows after the last sequence are padding, whose mask is false


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scored:
    """Rows with the arrays that a loss reads, in the rows' layout."""

    rows: Rows  # the mask is the batch's
    arrays: dict[str, Array]  # [R, T], by the names of the batch, and `before`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """The denominators of the means over a mini-batch, however it is cut."""

    tokens: Array  # [] f32, trained on
    sequences: Array  # [] f32, with such a token
    load: Array | None = None  # [layers, E] f32, tokens of each expert, for the load-balancing loss


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a training; with the data cursor, all that a resume needs."""

    step: Array  # [] i32, steps done; also the version of the policy's weights
    policy: Params  # None in the training of a reward model
    policy_opt: Any
    value: Params | None  # None if the method needs no critic
    value_opt: Any
    kl_coef: Array  # [] f32
    bad_steps: Array  # [] i32, consecutive steps with a skipped update
    key: Array  # jax.random key of the run; `learner/streams.py` folds numbers into it
    value_norm: Array | None = None  # [3] f32, weight, mean, variance of past returns; None: values are not normalised
