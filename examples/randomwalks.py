"""Makes the task `randomwalks` of trlX: `python -m examples.randomwalks --out runs/randomwalks/data`

A walk is a text: each letter is a node of a directed graph with 21 nodes, and `kda` walks from k over d to the goal a.
A prompt is the first node, a response up to 9 more. Graph and walks are the ones that trlX makes with its seed 1000.

`compute_score` is the reward, by `reward.function`: the optimality of the walk, (10 - length) / (10 - shortest length),
both in nodes. A shortest walk to the goal scores 1. A walk that misses the goal or an edge scores 0.

Writes train.jsonl and test.jsonl (prompts), and sft.jsonl: 1,000 random walks, which a starting model imitates.
"""

import itertools
import pathlib
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from jppo.data.rows import write_sets
from jppo.settings import Parser, exit_on_user_error

NODES, LONGEST, WALKS, GOAL, SEED = 21, 10, 1000, 0, 1000
EDGE, COPIES = 0.1, 64  # probability of an edge, copies of a prompt in train.jsonl
LETTERS = string.ascii_lowercase[:NODES]


def make_walks(seed: int) -> tuple[np.ndarray, list[str]]:
    """Returns the edges, [from, to] bool, and random walks, which end at the goal or after `LONGEST` nodes."""
    rng = np.random.RandomState(seed)  # the generator of trlX
    edges = np.zeros((NODES, NODES), bool)
    while not edges.any(axis=1).all():
        edges = rng.random_sample((NODES, NODES)) > 1 - EDGE
        np.fill_diagonal(edges, False)
    walks = []
    for _ in range(WALKS):
        node = GOAL
        while node == GOAL:
            node = rng.randint(NODES)
        walk = [node]
        while walk[-1] != GOAL and len(walk) < LONGEST:
            walk.append(rng.choice(np.flatnonzero(edges[walk[-1]])))
        walks.append("".join(LETTERS[node] for node in walk))
    return edges, walks


def shortest_lengths(edges: np.ndarray) -> np.ndarray:
    """Returns the nodes of the shortest walk from each node to the goal; `LONGEST` if there is none that is shorter."""
    reached = np.arange(NODES) == GOAL
    lengths = np.where(reached, 1, LONGEST)
    for length in range(2, LONGEST):
        new = edges[:, reached].any(axis=1) & ~reached
        lengths[new] = length
        reached |= new
    return lengths


def optimality(walk: str, edges: np.ndarray, shortest: np.ndarray) -> float:
    """Returns the score of a walk up to its first goal, in [0, 1]."""
    nodes = [LETTERS.find(letter) for letter in walk]
    nodes = nodes[: nodes.index(GOAL) + 1] if GOAL in nodes else []
    room = LONGEST - shortest[nodes[0]] if nodes else 0
    if not room or -1 in nodes or not all(edges[step] for step in itertools.pairwise(nodes)):
        return 0.0
    return max(float(LONGEST - len(nodes)) / float(room), 0.0)


EDGES, RANDOM_WALKS = make_walks(SEED)
SHORTEST = shortest_lengths(EDGES)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Returns the optimality of the response as the rest of a walk from the node `ground_truth`."""
    return optimality(ground_truth + solution_str, EDGES, SHORTEST)


def make() -> dict[str, list[dict[str, str]]]:
    """Returns the rows of train, test and sft."""
    starts = sorted({walk[0] for walk in RANDOM_WALKS})
    test = [{"prompt": start, "ground_truth": start, "data_source": "randomwalks"} for start in starts]
    sft = [{"prompt": walk[0], "response": walk[1:]} for walk in RANDOM_WALKS]
    return {"train": test * COPIES, "test": test, "sft": sft}


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = Parser("examples.randomwalks", __doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory to write to")
    write_sets(parser.parse_args(argv).out, make())


if __name__ == "__main__":
    main()
