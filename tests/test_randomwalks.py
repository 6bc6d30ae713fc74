"""examples/randomwalks.py by hand, by a search and by trlX's figures; benchmarks/randomwalks.py: tables, a tiny run."""

import collections
import itertools
import json
import math
import statistics

import numpy as np
import pytest

from examples import randomwalks
from tests import make


def graph(*steps):
    """Edges such as `ba`, from b to a."""
    edges = np.zeros((21, 21), bool)
    for start, end in steps:
        edges[ord(start) - ord("a"), ord(end) - ord("a")] = True
    return edges


# c and d reach the goal a over b; d also by c; from e there is no way, from p one of 14 nodes.
# The way over u would be open to a letter that is no node, if it counted from the end.
EDGES = graph("ua", "cu", "ba", "cb", "bc", "dc", "db", "ee", "fd", *map("".join, itertools.pairwise("ponmlkjihgf")))


def test_shortest_walks_by_hand():
    shortest = dict(zip("abcdefghijkp", randomwalks.shortest_lengths(EDGES)[[*range(11), 15]].tolist(), strict=True))
    assert shortest == dict(a=1, b=2, c=3, d=3, e=10, f=4, g=5, h=6, i=7, j=8, k=9, p=10)


@pytest.mark.parametrize(
    "walk, score",
    [
        ("ba", 1.0),
        ("cba", 1.0),
        ("dba", 1.0),
        ("dcba", 6 / 7),
        ("cbcba", 5 / 7),
        ("cbcbcbcba", 1 / 7),
        ("bcbcbcbcba", 0.0),  # ten nodes
        ("bcbcbcbcbcba", 0.0),  # twelve
        ("cbaxyz", 1.0),  # what follows the goal does not count
        ("cbab", 1.0),
        ("cb", 0.0),  # not at the goal
        ("c", 0.0),
        ("ca", 0.0),  # no edge
        ("dabca", 0.0),  # no edge, to the goal at that
        ("cBa", 0.0),  # no node
        ("c b a", 0.0),
        ("cva", 0.0),
        ("ea", 0.0),
        ("kjihgfdba", 1.0),
        ("", 0.0),
    ],
)
def test_optimality_by_hand(walk, score):
    assert randomwalks.optimality(walk, EDGES, randomwalks.shortest_lengths(EDGES)) == pytest.approx(score)


def search(start):
    """The nodes of a shortest walk from a node to the goal, by a breadth-first search over walks."""
    queue, seen = collections.deque([[start]]), {start}
    while queue:
        walk = queue.popleft()
        if walk[-1] == 0:
            return walk
        for node in np.flatnonzero(randomwalks.EDGES[walk[-1]]).tolist():
            if node not in seen:
                seen.add(node)
                queue.append([*walk, node])
    return None


def test_a_shortest_walk_scores_one_and_a_detour_less():
    for start in range(1, 21):
        walk = "".join(randomwalks.LETTERS[node] for node in search(start))
        assert randomwalks.SHORTEST[start] == len(walk)
        assert randomwalks.compute_score("randomwalks", walk[1:], walk[0]) == 1.0
    scores = [randomwalks.compute_score("randomwalks", walk[1:], walk[0]) for walk in randomwalks.RANDOM_WALKS]
    for walk, score in zip(randomwalks.RANDOM_WALKS, scores, strict=True):
        best = len(search(ord(walk[0]) - ord("a")))
        assert score == pytest.approx((10 - len(walk)) / (10 - best) if walk.endswith("a") else 0.0)
    assert statistics.mean(scores) == pytest.approx(0.35150952599542686, abs=1e-6)  # by trlX's code for these walks


def test_the_graph_and_the_walks_are_those_of_trlx():
    edges, walks = randomwalks.make_walks(1000)
    assert walks[:3] == ["sda", "fda", "ebjnbdtkna"] and len(walks) == 1000  # printed by trlX's code
    assert max(map(len, walks)) == 10 and {walk[0] for walk in walks} == set("bcdefghijklmnopqrstu")
    assert not edges.diagonal().any() and edges.any(axis=1).all()
    for walk in walks:
        assert "a" not in walk[:-1] and (walk.endswith("a") or len(walk) == 10)
        assert all(edges[ord(a) - ord("a"), ord(b) - ord("a")] for a, b in itertools.pairwise(walk))


def test_the_files(tmp_path, capsys):
    randomwalks.main([f"--out={tmp_path}"])
    train, test, sft = (make.read_lines(tmp_path / f"{name}.jsonl") for name in ("train", "test", "sft"))
    assert [row["prompt"] for row in test] == list("bcdefghijklmnopqrstu") and train == test * 64
    assert [row["prompt"] + row["response"] for row in sft] == randomwalks.RANDOM_WALKS


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(make.ROOT / "benchmarks")
        yield make.script("benchmarks/randomwalks.py")


def test_both_trainers_get_the_same_numbers(benchmark, tmp_path):
    benchmark.write_inputs(tmp_path / "data")
    (tmp_path / "sft").mkdir()
    (tmp_path / "data/model").rename(tmp_path / "sft/hf")
    ppo, grpo = (benchmark.make_config(name, 3, 7, tmp_path) for name in ("PPO", "GRPO"))
    theirs = benchmark.work_of(3, 7, tmp_path)
    for c in (ppo, grpo):
        assert c.data.train_batch_size * c.rollout.n == theirs["responses"] == 128
        assert (c.trainer.seed, c.trainer.total_training_steps) == (theirs["seed"], theirs["steps"]) == (3, 7)
        assert c.actor.lr == theirs["lr"] == 3e-4 and c.actor.betas == theirs["betas"]
        assert c.actor.ppo_epochs == theirs["epochs"] == 4 and c.actor.ppo_mini_batch_size == theirs["mini_batch"]
        assert c.data.max_response_length == theirs["max_tokens"] == 9 and c.rollout.temperature == 1.0
        assert not c.algorithm.use_kl_in_reward and not c.actor.use_kl_loss and c.actor.entropy_coeff == 0.0
        assert (c.model.path, c.data.train_files) == (theirs["model"], theirs["train_files"])
        assert c.actor.lr_scheduler_type == "constant" and c.actor.loss_agg_mode == "token-mean"
    config = json.loads((tmp_path / "sft/hf/config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["hidden_size"]) == ("llama", 6, 144)
    assert (ppo.critic.lr, ppo.critic.betas, ppo.critic.cliprange_value) == (3e-4, theirs["betas"], 0.2)
    assert (ppo.algorithm.lam, ppo.algorithm.gamma) == (theirs["lam"], 1.0)


def row(name, seed, scores, seconds, **changes):
    about = {"contestant": name, "seed": seed, "steps": len(scores), "start": 1, "load_average": 2.0}
    return about | {"scores": scores, "seconds": seconds} | changes


def test_tables(benchmark):
    rows = [
        row("PPO", 1, [0.3, 0.9, 0.8, 0.8, 0.8, 0.8], [9, 1, 2, 3, 4, 5]),
        row("PPO", 2, [0.5, 0.8, 0.8, 0.8, 0.8, 0.95], [9, 2, 2, 2, 2, 2]),
        row("GRPO", 1, [0.3] * 6, [9, 1, 1, 1, 1, 1]),
        row("GRPO", 1, [1.0] * 6, [9, 1, 1, 1, 1, 1], start=2),  # another starting model
        row("TRL", 1, [0.3, 0.3, 0.3, 0.3, 0.3, 0.9], [9, 4, 4, 4, 4, 8]),
    ]
    text = benchmark.table(rows)
    # Student's quantile of one degree of freedom is 12.706205; half a difference times it is the half width.
    assert f"| jppo's PPO | 2 | 0.400 ± {12.706205 * 0.1:.3f} | 0.825 ± {12.706205 * 0.005:.3f} |" in text
    assert f"| {(2 + 6) * 64} ± {12.706205 * 256:,.0f} | 2.500 ± {12.706205 * 0.5:.3f} | 2.0 |" in text
    assert "| jppo's GRPO | 1 | 0.300 | 0.300 | none (0 of 1) | 1.000 | 2.0 |" in text
    assert "| TRL's PPO | 1 | 0.300 | 0.420 | 768 | 4.000 | 2.0 |" in text
    assert math.isnan(benchmark.samples_to([0.89] * 9)) and benchmark.samples_to([0.1, 0.9, 0.1]) == 256


@pytest.mark.slow
def test_a_tiny_run(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "IMITATION_STEPS", 2)
    given = [f"--work={tmp_path / 'work'}", f"--out={tmp_path / 'out'}", "--contestants=PPO,GRPO", "--steps=2"]
    benchmark.main([*given, "--seeds=1"])
    (path,) = (tmp_path / "out").glob("*-randomwalks.jsonl")
    first = path.read_text()
    ppo, grpo = map(json.loads, first.splitlines())
    assert (ppo["contestant"], grpo["contestant"]) == ("PPO", "GRPO") and len(ppo["scores"]) == 2 == len(grpo["scores"])
    assert all(0.0 <= score <= 1.0 for score in ppo["scores"] + grpo["scores"])
    assert "| jppo's PPO | 1 |" in capsys.readouterr().out
    benchmark.main([*given, "--seeds=1"])  # nothing is missing
    assert path.read_text() == first
    assert "does not exist" in make.one_line(capsys, benchmark.main, *given[:2], f"--python={tmp_path / 'none'}")
