"""PPO for a language model in one file: jax, optax and numpy, nothing else. python examples/nano_ppo.py

A small transformer learns to add two two-digit numbers. It first imitates a teacher who usually forgets the carry, so
that its most likely answer is right for 44% of the sums. PPO then sees only whether an answer is right, and reinforces
the right ones that it happens to sample. The last line has the share of right answers to sums that it has never seen:
0.924 after 80 steps, 0.447 before.

Read from the bottom: `main`, one step in `ppo_step`, then each block with the equation that it is.

    Schulman et al. 2017, Proximal policy optimization algorithms, arXiv:1707.06347
    Schulman et al. 2015, High-dimensional continuous control using generalized advantage estimation, arXiv:1506.02438
    Ouyang et al. 2022, Training language models to follow instructions with human feedback, arXiv:2203.02155

Arrays: B responses, T positions of prompt and response, P of the prompt, V tokens, D width, H heads.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

CHARACTERS = "0123456789+="  # token i + 2 is character i; token 0 fills, token 1 ends
FILL, END, VOCABULARY = 0, 1, 16
PROMPT, RESPONSE = 6, 4  # "47+85=" and up to "132" with its end

WIDTH, LAYERS, HEADS = 128, 3, 4
GAMMA, LAMBDA = 1.0, 0.95  # discount, and the λ of GAE
CLIP, CLIP_VALUE = 0.2, 0.5  # ε of the policy's ratio, and of the value's change
KL_COEF = 0.001  # β: reward lost for each nat away from the starting model
PROMPTS, MINI_BATCH = 512, 128  # of a step; four optimizer steps each


# The task.


def problems(seed):
    """Returns all pairs of two-digit numbers without zeros, [6561, 2], in a random order."""
    numbers = np.array([10 * tens + units for tens in range(1, 10) for units in range(1, 10)])
    pairs = np.stack(np.meshgrid(numbers, numbers), -1).reshape(-1, 2)
    return np.random.default_rng(seed).permutation(pairs)


def encode(text, length):
    """Returns the tokens of a text, filled up behind."""
    tokens = [CHARACTERS.index(character) + 2 for character in text]
    return np.array(tokens + [END] * (length > len(tokens)) + [FILL] * (length - len(tokens) - 1), np.int32)[:length]


def prompts_of(pairs):
    """Returns the prompts, [B, P]."""
    return np.stack([encode(f"{a}+{b}=", PROMPT) for a, b in pairs])


def answers_of(sums):
    """Returns the answers as responses, [B, T - P]."""
    return np.stack([encode(str(total), RESPONSE) for total in sums])


def sloppy(pairs, rng):
    """The teacher's sums, [B]: without the carry from the units, nine times in ten."""
    a, b = pairs.T
    carry = (a % 10 + b % 10 >= 10) & (rng.random(len(pairs)) < 0.9)
    return a + b - 10 * carry


# The model: a decoder with RMSNorm, rotary positions and SwiGLU. Policy and critic have the same trunk, each its own.


def init(key, head):
    """Returns random parameters; `head` is "tokens" for a policy, "value" for a critic, whose first values are 0."""
    keys = iter(jax.random.split(key, 7 * LAYERS + 1))

    def matrix(rows, columns):
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    layers = [
        {
            "norm1": jnp.ones(WIDTH), "qkv": matrix(WIDTH, 3 * WIDTH), "out": matrix(WIDTH, WIDTH),
            "norm2": jnp.ones(WIDTH), "gate": matrix(WIDTH, 4 * WIDTH), "up": matrix(WIDTH, 4 * WIDTH),
            "down": matrix(4 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ]  # fmt: skip
    embedding = jax.random.normal(next(keys), (VOCABULARY, WIDTH)) * WIDTH**-0.5
    params = {"embedding": embedding, "layers": layers, "norm": jnp.ones(WIDTH)}
    return params | ({"head": jnp.zeros((WIDTH, 1))} if head == "value" else {})


def norm(x, scale):
    """RMSNorm: x / √(mean(x²) + ε), scaled."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


def rotate(x):
    """Rotary positions: pair i of a head's entries turns by position · 10000^(-2i/A); x is [B, T, H, A]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def hidden(params, tokens):
    """Returns the last layer's states, [B, T, D]; a position sees itself and those before it."""
    x = params["embedding"][tokens]
    rows, length, _ = x.shape
    causal = jnp.tril(jnp.ones((length, length), bool))
    for layer in params["layers"]:
        q, k, v = jnp.split(norm(x, layer["norm1"]) @ layer["qkv"], 3, -1)
        q, k, v = (y.reshape(rows, length, HEADS, -1) for y in (q, k, v))
        scores = jnp.einsum("bqha,bkha->bhqk", rotate(q), rotate(k)) * (WIDTH // HEADS) ** -0.5
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), -1)
        x = x + jnp.einsum("bhqk,bkha->bqha", weights, v).reshape(rows, length, WIDTH) @ layer["out"]
        y = norm(x, layer["norm2"])
        x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
    return norm(x, params["norm"])


def logits_of(policy, tokens):
    """Returns the logits of the next token at each position, [B, T, V]."""
    return hidden(policy, tokens) @ policy["embedding"].T


def log_probs(policy, tokens):
    """log π(token t | tokens before t) at each position of the response, [B, T - P]."""
    logits = logits_of(policy, tokens)[:, PROMPT - 1 : -1]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, PROMPT:, None], -1)[..., 0]


def values_of(critic, tokens):
    """V(tokens before t): the return that the critic expects before each token of the response, [B, T - P]."""
    return (hidden(critic, tokens) @ critic["head"])[:, PROMPT - 1 : -1, 0]


@jax.jit
def sample(policy, prompts, key):
    """Draws responses from the policy; returns prompt and response, [B, T], and the mask of drawn tokens, [B, T - P].

    A response ends with END, which is its last drawn token.
    """
    tokens = jnp.concatenate([prompts, jnp.full((len(prompts), RESPONSE), FILL)], 1)

    def draw(t, now):
        tokens, mask, ended = now
        logits = logits_of(policy, tokens)[:, PROMPT + t - 1]
        drawn = jnp.where(ended, FILL, jax.random.categorical(jax.random.fold_in(key, t), logits))
        return tokens.at[:, PROMPT + t].set(drawn), mask.at[:, t].set(~ended), ended | (drawn == END)

    nobody = jnp.zeros(len(prompts), bool)
    tokens, mask, _ = jax.lax.fori_loop(0, RESPONSE, draw, (tokens, jnp.zeros((len(prompts), RESPONSE), bool), nobody))
    return tokens, mask


# The mathematics of PPO. All arrays are [B, T - P]; what the mask leaves out does not count.


def gae(rewards, values, mask, gamma=GAMMA, lam=LAMBDA):
    """Generalised advantage estimation, from the last token to the first. Returns advantages and returns.

    δ_t = r_t + γ V_{t+1} - V_t,     A_t = δ_t + γ λ A_{t+1},     R_t = A_t + V_t
    """

    def step(after, now):
        advantage_after, value_after = after
        reward, value, there = now
        delta = reward + gamma * value_after - value
        advantage = delta + gamma * lam * advantage_after
        after = jnp.where(there, advantage, advantage_after), jnp.where(there, value, value_after)
        return after, jnp.where(there, advantage, 0.0)

    nothing = jnp.zeros(len(rewards))
    _, advantages = jax.lax.scan(step, (nothing, nothing), (rewards.T, values.T, mask.T), reverse=True)
    return advantages.T, jnp.where(mask, advantages.T + values, 0.0)


def mean(x, mask):
    """The mean over all kept tokens."""
    return jnp.where(mask, x, 0.0).sum() / mask.sum()


def variance(x, mask):
    """The unbiased variance of all kept tokens."""
    return jnp.where(mask, jnp.square(x - mean(x, mask)), 0.0).sum() / (mask.sum() - 1)


def whiten(x, mask):
    """(x - mean) / standard deviation, of all kept tokens together: the scale of the rewards no longer matters."""
    return jnp.where(mask, (x - mean(x, mask)) * jax.lax.rsqrt(variance(x, mask) + 1e-8), 0.0)


def token_rewards(score, logp, ref_logp, mask, kl_coef=KL_COEF):
    """r_t = -β (log π_old(t) - log π_ref(t)), and the score of the response [B] at its last token."""
    last = mask & (jnp.cumsum(mask, 1) == mask.sum(1, keepdims=True))
    return jnp.where(mask, -kl_coef * (logp - ref_logp), 0.0) + jnp.where(last, score[:, None], 0.0)


def policy_loss(logp, old_logp, advantages, mask, clip=CLIP):
    """The clipped surrogate, without a dual clip: no reason to move the ratio ρ further than 1 ± ε in a step.

    L = mean of max(-A ρ, -A clip(ρ, 1 - ε, 1 + ε)),     ρ = π / π_old
    """
    ratio = jnp.exp(jnp.where(mask, logp - old_logp, 0.0))
    return mean(jnp.maximum(-advantages * ratio, -advantages * jnp.clip(ratio, 1 - clip, 1 + clip)), mask)


def value_loss(values, old_values, returns, mask, clip=CLIP_VALUE):
    """Half the larger squared error, of the value or of the value clipped around the old one.

    L = mean of ½ max((V - R)², (clip(V, V_old - c, V_old + c) - R)²)
    """
    near = jnp.clip(values, old_values - clip, old_values + clip)
    return mean(0.5 * jnp.maximum(jnp.square(values - returns), jnp.square(near - returns)), mask)


# Training.


@jax.jit
def score_batch(policy, critic, reference, tokens, mask, score):
    """Returns the constants of a step's updates: old log-probs, old values, advantages, returns."""
    old_logp, ref_logp, old_values = log_probs(policy, tokens), log_probs(reference, tokens), values_of(critic, tokens)
    rewards = token_rewards(score, old_logp, ref_logp, mask)
    advantages, returns = gae(rewards, old_values, mask)
    constants = dict(old_logp=old_logp, old_values=old_values, advantages=whiten(advantages, mask), returns=returns)
    explained = 1 - variance(returns - old_values, mask) / variance(returns, mask)
    return constants, dict(kl=mean(old_logp - ref_logp, mask), explained=explained)


@functools.partial(jax.jit, static_argnames=("optimizer", "loss"), donate_argnums=(0, 1))
def update(params, state, batch, *, optimizer, loss):
    """One optimizer step down the gradient of `loss(params, batch)`."""
    loss_value, gradient = jax.value_and_grad(loss)(params, batch)
    changes, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, changes), state, loss_value


def actor_objective(policy, batch):
    """The policy's loss on a mini-batch."""
    logp = log_probs(policy, batch["tokens"])
    return policy_loss(logp, batch["old_logp"], batch["advantages"], batch["mask"])


def critic_objective(critic, batch):
    """The critic's loss on a mini-batch."""
    return value_loss(values_of(critic, batch["tokens"]), batch["old_values"], batch["returns"], batch["mask"])


def imitation(policy, batch):
    """Cross-entropy of the teacher's answers."""
    return -mean(log_probs(policy, batch["tokens"]), batch["mask"])


def right(tokens, answers):
    """1.0 for each response that is the answer to the last character, [B]: the reward."""
    return np.all(np.asarray(tokens)[:, PROMPT:] == answers, 1).astype(np.float32)


def ppo_step(models, optimizers, pairs, key, rng):
    """Samples, grades, estimates advantages, updates policy and critic; returns the models and some numbers."""
    policy, policy_state, critic, critic_state, reference = models
    tokens, mask = sample(policy, prompts_of(pairs), key)
    score = right(tokens, answers_of(pairs.sum(1)))
    fixed, numbers = score_batch(policy, critic, reference, tokens, mask, score)
    batch = fixed | {"tokens": tokens, "mask": mask}
    for rows in rng.permutation(len(pairs)).reshape(-1, MINI_BATCH):
        mini = {name: x[rows] for name, x in batch.items()}
        policy, policy_state, _ = update(policy, policy_state, mini, optimizer=optimizers[0], loss=actor_objective)
        critic, critic_state, _ = update(critic, critic_state, mini, optimizer=optimizers[1], loss=critic_objective)
    return (policy, policy_state, critic, critic_state, reference), {"reward": score.mean()} | numbers


def accuracy(policy, pairs):
    """The share of right answers where each token is the most likely one."""
    tokens = jnp.concatenate([prompts_of(pairs), jnp.full((len(pairs), RESPONSE), FILL)], 1)
    for t in range(PROMPT, PROMPT + RESPONSE):
        ended = jnp.any(tokens[:, PROMPT:t] == END, 1)
        likeliest = jnp.argmax(logits_of(policy, tokens)[:, t - 1], -1)
        tokens = tokens.at[:, t].set(jnp.where(ended, FILL, likeliest))
    return float(right(tokens, answers_of(pairs.sum(1))).mean())


def adam(peak, steps):
    """Adam with clipped gradients, a warm-up and a cosine decay."""
    rate = optax.warmup_cosine_decay_schedule(0, peak, min(20, steps // 2), steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))


def main(argv=None):
    """Imitates the teacher, then runs PPO."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--imitation_steps", type=int, default=400)
    parser.add_argument("--ppo_steps", type=int, default=80)
    args = parser.parse_args(argv)
    began, rng, key = time.time(), np.random.default_rng(args.seed), jax.random.key(args.seed)
    pairs = problems(args.seed)
    train, test = pairs[:-1000], pairs[-1000:]

    policy, optimizer = init(jax.random.fold_in(key, 1), "tokens"), adam(3e-3, args.imitation_steps)
    state = optimizer.init(policy)
    for step in range(args.imitation_steps):
        some = train[rng.integers(len(train), size=256)]
        answers = answers_of(sloppy(some, rng))
        batch = {"tokens": np.concatenate([prompts_of(some), answers], 1), "mask": answers != FILL}
        policy, state, loss = update(policy, state, batch, optimizer=optimizer, loss=imitation)
        if step % 100 == 99:
            print(f"imitation {step + 1}: loss {loss:.3f}", flush=True)
    print(f"right before PPO: {accuracy(policy, test):.3f}", flush=True)

    updates = args.ppo_steps * PROMPTS // MINI_BATCH
    optimizers = adam(2e-4, updates), adam(3e-4, updates)
    critic, reference = init(jax.random.fold_in(key, 2), "value"), jax.tree.map(jnp.copy, policy)
    models = (policy, optimizers[0].init(policy), critic, optimizers[1].init(critic), reference)
    for step in range(args.ppo_steps):
        some = train[rng.choice(len(train), PROMPTS, replace=False)]
        models, numbers = ppo_step(models, optimizers, some, jax.random.fold_in(key, 100 + step), rng)
        if step % 10 == 9 or step == 0:
            told = "  ".join(f"{name} {float(x):.3f}" for name, x in numbers.items())
            print(f"step {step + 1}/{args.ppo_steps}  {told}  {time.time() - began:.0f} s", flush=True)
    print(f"right after PPO: {accuracy(models[0], test):.3f} of {len(test)} sums that it has never seen")


if __name__ == "__main__":
    main()
