"""The reads of an algorithm are recorded, whatever its functions are made of, and hold for the whole run."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jppo import settings
from jppo.errors import UserError
from jppo.learner import catalogue
from jppo.learner.algorithm import Algorithm, Term
from jppo.learner.views import EpisodeView, TokenView, view
from jppo.run.make import make_recipe
from jppo.settings import parts
from tests.make import typed

COMPARE = {"grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline", "opo"}
COMPARE |= {"gpg", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"}


def made(name):
    """One of jppo's own, by the settings."""
    c = settings.recipe("gsm8k")
    c.algorithm.adv_estimator, c.algorithm.gdpo_reward_keys, c.rollout.n = name, "style,rule", 2
    return parts.estimator(typed(c))


@pytest.mark.parametrize("name", catalogue.ESTIMATORS)
def test_what_jppos_own_read_is_what_their_papers_need(name):
    one = made(name)
    assert one.critic == (name == "gae") and one.greedy == (name == "remax")
    assert one.compares == (name in COMPARE)
    assert one.old_logits == name.endswith("token_baseline")
    assert one.scored == (name != "distill")
    assert one.parts == (("style", "rule") if name == "gdpo" else ())
    assert not one.by_turn


def test_a_read_in_a_closure_a_partial_or_a_branch_of_python_is_recorded():
    def half(view, *, by):
        return view.value / by

    def advantage(view):
        later = functools.partial(half, by=2.0)
        return jnp.where(view.mask, later(view), 0.0) if view.reward.ndim == 2 else view.entropy

    one = Algorithm(advantage)
    assert one.reads == ("reward", "mask", "value") and one.critic and not one.old_logits


def test_a_read_that_was_not_recorded_raises():
    """Else a run could compare samples, or read values, whose need no rule has seen."""
    later = []
    one = Algorithm(lambda own: own.group[:, None] + own.reward if later else own.reward)
    assert one.reads == ("reward",) and not one.compares
    arrays = {"reward": np.ones((1, 2), np.float32), "group": np.zeros(1, np.int32)}
    np.testing.assert_array_equal(one.advantage(view(TokenView, one.reads, arrays)), arrays["reward"])
    later.append(1)
    with pytest.raises(KeyError, match="group"):
        one.advantage(view(TokenView, one.reads, arrays))


@pytest.mark.parametrize(
    "wrong",
    [
        Algorithm(lambda view: view.reward.sum(1)),
        Algorithm(lambda view: (view.reward, view.group)),
        Algorithm(outcome=lambda view: view.score.mean()),
    ],
)
def test_results_of_another_shape_are_refused_before_anything_runs(wrong):
    with pytest.raises(ValueError, match=r"reads the outcome|an outcome is"):
        wrong.reads  # noqa: B018


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Algorithm)])
def test_what_is_left_out_is_the_bases_and_nothing_else(field):
    """Whatever fields an Algorithm has: each alone, over a base that has them all."""

    def other(*_):
        return None

    some = {name.name: functools.partial(other, name.name) for name in dataclasses.fields(Algorithm)}
    base = Algorithm(**some | {"statistics": {"base": other}, "terms": ("base",), "more_terms": ()})
    own = Algorithm(
        **{field: {"statistics": {"own": other}, "terms": ("own",), "more_terms": ("own",)}.get(field, other)}
    )
    merged = own.over(base)
    assert merged.statistics == base.statistics | own.statistics
    assert merged.terms == (own.terms or base.terms) + own.more_terms and merged.more_terms == ()
    given = {"outcome": {"outcome", "advantage", "transforms"}, "advantage": {"advantage", "transforms"}}
    for name in vars(base).keys() - {"statistics", "terms", "more_terms"}:
        from_own = name in given.get(field, {field})
        assert getattr(merged, name) is getattr(own if from_own else base, name)
    assert vars(Algorithm().over(base)) == vars(base)


def test_an_estimate_of_its_own_has_transforms_of_its_own():
    """Else gae's whitening would change it."""
    base = made("gae")
    assert Algorithm(outcome=lambda view: view.score).over(base).transforms == ()
    assert Algorithm(lambda view: view.reward).over(base).transforms == ()
    kept = Algorithm(transforms=()).over(base)
    assert kept.critic and kept.transforms == () and Algorithm().over(base).transforms == base.transforms


def test_an_outcome_that_no_advantage_reads_is_not_computed():
    over_grpo = Algorithm(lambda view: view.reward).over(made("grpo"))
    assert over_grpo.reads == ("reward",) and not over_grpo.compares
    read = Algorithm(lambda view: jnp.where(view.mask, view.outcome[:, None], 0)).over(made("grpo"))
    assert read.compares


def test_columns_are_read_as_parts_are_and_need_their_function():
    def outcome(view):
        return view.score - view.column("v")

    def advantage(view):
        return jnp.where(view.mask, (view.outcome * view.column("w"))[:, None], 0.0)

    one = Algorithm(advantage, outcome, columns=lambda memory, places: {})
    assert one.column_names == ("w", "v") and one.parts == () and one.remembers
    with pytest.raises(ValueError, match="reads a column of its memory, and has no function `columns`"):
        Algorithm(advantage, outcome).reads  # noqa: B018


def test_an_outcome_alone_is_spread_over_the_trained_tokens():
    one = Algorithm(outcome=lambda view: view.score - view.part("format"))
    arrays = {"score": jnp.array([3.0, 5.0]), "part of the reward: format": jnp.array([1.0, 1.0])}
    outcome = one.outcome(EpisodeView(arrays.__getitem__))
    mask = np.bool_([[1, 0, 1], [1, 1, 0]])
    known = {"outcome": outcome, "mask": mask}
    np.testing.assert_array_equal(one.advantage(TokenView(known.__getitem__)), [[2, 0, 2], [4, 4, 0]])
    assert one.parts == ("format",) and one.scored and not one.compares


@pytest.mark.parametrize("name", catalogue.POLICY_LOSSES)
def test_what_jppos_own_losses_read_is_what_their_papers_need(name):
    c = settings.recipe("gsm8k")
    c.actor.loss_mode, c.actor.dro_beta = name, 0.1
    one = parts.policy_loss(typed(c))
    assert one.ratio == (name != "gpg")
    assert one.aggregation == ("seq-mean-token-mean" if name in ("geo_mean", "sapo") else None)
    selects = name in ("clip_cov", "kl_cov")
    assert ("before" in one.loss_reads) == ("logprob" in one.before_reads) == selects
    assert {"logprob", "advantage"} <= {*one.loss_reads}


@pytest.mark.parametrize("name", ["geo_mean", "vanilla"])
def test_entropy_and_kl_are_averaged_like_the_policy_loss(name):
    c = settings.recipe("gsm8k")
    c.actor.loss_mode, c.actor.entropy_coeff = name, 0.1
    recipe = make_recipe(typed(c))
    mask, segment = np.bool_([[1, 1, 1, 1]]), np.int32([[1, 1, 1, 2]])
    entropy = recipe.algorithm.terms[1]
    weights = recipe.mean(mask, segment, entropy.aggregation, tokens=np.float32(4), sequences=np.float32(2))
    by_sequence = [1 / 6, 1 / 6, 1 / 6, 1 / 2]
    np.testing.assert_allclose(weights[0], by_sequence if name == "geo_mean" else [0.25] * 4, rtol=1e-6)


def test_a_model_without_experts_has_no_terms_of_routers():
    kept = Term(lambda view: view.logprob, "mine/kept")
    terms = kept, Term(lambda view: view.router.z.sum() / view.tokens), Term(lambda view: view.load.sum())
    one = Algorithm(terms=terms)
    assert one.without_routers().terms == (kept,) and "load" in one.loss_reads
    assert Algorithm(terms=(kept,)).without_routers().loss_reads == ("logprob",)


def test_terms_read_statistics_of_the_logits_and_what_stands_before():
    def squared(logits, targets, vocabulary):
        return vocabulary.logsumexp(logits) ** 2

    terms = (
        Term(lambda view: view.statistic("z") * view.before, "mine/z"),
        Term(lambda view: (view.logprob, {"mine/entropy": view.entropy})),
    )
    one = Algorithm(terms=terms, statistics={"z": squared}, before=lambda view: view.mask & (view.advantage > 0))
    assert one.loss_reads == ("statistic of the logits: z", "before", "logprob", "entropy")
    assert one.before_reads == ("mask", "advantage") and one.statistics_of(one.loss_reads) == [("z", squared)]


def of_logits(statistic):
    return Algorithm(terms=(Term(lambda view: view.statistic("z")),), statistics={"z": statistic})


@pytest.mark.parametrize("fields", [dict(coefficient="0.1"), dict(coefficient=True), dict(aggregation="tokensum")])
def test_a_term_has_a_number_and_a_known_aggregation(fields):
    with pytest.raises(ValueError, match=f"a Term with {next(iter(fields))}="):
        Term(lambda view: view.logprob, **fields)


def test_more_terms_are_added_to_those_of_the_settings_once(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from jppo.learner.algorithm import Algorithm, Term\n"
        "def more(metric: str = 'mine/logprob'):\n"
        "    return Algorithm(more_terms=(Term(lambda view: -view.logprob, metric, 0.1),))\n"
    )
    c = settings.recipe("gsm8k")
    c.algorithm.extension, c.actor.loss_mode = f"{tmp_path}/mine.py:more", "gspo"
    found = make_recipe(typed(c)).algorithm
    assert [term.metric for term in found.terms[:2]] == ["actor/pg_loss", "mine/logprob"] and not found.more_terms
    for taken in ("actor/grad_norm", "reward_mean", "rollout/mine"):
        c.algorithm.options.metric = taken
        with pytest.raises(UserError, match=f"a term has the metric '{taken}'; name it as in mine/"):
            parts.policy_loss(typed(c))
    c.algorithm.options.metric = "critic/vf_loss"
    with pytest.raises(UserError, match=r"mine.py:more'.* two terms have one metric: actor/pg_loss, .*critic/vf_loss"):
        make_recipe(typed(c))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (Algorithm(terms=(Term(lambda view: view.statistic("z")),)), "reads the statistic 'z', and has none"),
        (Algorithm(terms=(Term(lambda view: view.before),)), "reads `before`, and the algorithm has none"),
        (of_logits(lambda logits, targets, vocabulary: logits), r"statistic 'z' returns float32\(2, 3\) of logits"),
        (of_logits(lambda logits, targets, vocabulary: logits.argmax(1)), r"must return \[C\] f32"),
        (of_logits(lambda logits, targets, vocabulary: logits.sum()), r"must return \[C\] f32"),
        (Algorithm(terms=(Term(lambda view: view.logprob.sum(1)),)), r"a number for each token, or one number"),
        (Algorithm(terms=(Term(lambda view: view.before),), before=lambda view: view.mask.sum()), r"returns \[B, L\]"),
    ],
)
def test_terms_that_cannot_be_are_refused_before_anything_runs(wrong, said):
    with pytest.raises(ValueError, match=said):
        wrong.loss_reads  # noqa: B018


def test_each_term_has_a_metric_of_its_own():
    with pytest.raises(ValueError, match="two terms have one metric: a, a"):
        Algorithm(terms=(Term(lambda view: view.logprob, "a"),) * 2).metrics  # noqa: B018
    one = Algorithm(
        terms=(Term(lambda view: view.logprob, "mine/loss"),), value_terms=(Term(lambda view: view.value, "mine/loss"),)
    )
    with pytest.raises(ValueError, match="two terms have one metric: mine/loss, mine/loss"):
        one.metrics  # noqa: B018


def test_a_read_of_given_responses_needs_a_function_that_gives_them():
    one = Algorithm(outcome=lambda view: view.score * view.given)
    with pytest.raises(ValueError, match="reads which responses are given, and its field `given` is None"):
        one.reads  # noqa: B018
    assert "given" in Algorithm(one.advantage, one.outcome, given=lambda prompt: []).reads
