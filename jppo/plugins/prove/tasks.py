"""Makes the data and the starting model of a task of docs/learning.md: python -m jppo.plugins.prove.tasks TASK FOLDER

`jppo.prove` starts it, with a model of stories for `rlhf`. The tasks' settings are in configs/learning.py.
"""

import json
import pathlib
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jppo import evaluate, reward_model, settings, sft
from jppo.data import pairs
from jppo.errors import UserError
from jppo.examples import arithmetic, bisection, chain, stories

READY = "ready"  # a file that is written last
TEST = 256  # held-out prompts
WORD = "play"  # that a story of `rlhf` should mention
IMITATION_STEPS, PAIR_STEPS, SAMPLES = 400, 250, 32  # of fine-tuning, of the reward model; stories per opening
# 110,000 parameters, for chain and bisection
SMALL = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 48}
SMALL |= {"max_position_embeddings": 128}


def prepare(task: str, folder: pathlib.Path, model: pathlib.Path | None, *, heads: int = 4) -> None:
    """Makes data and starting model in `folder`; `model` is of stories, for `rlhf`; `heads` for chain and bisection."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if task == "quickstart":  # as `make quickstart` makes them
        arithmetic.write(folder / "data", arithmetic.make(seed=1, test=1000, sloppy=0.65, demonstrations=8))
        _imitate(settings.recipe("quickstart_sft", str(folder)), IMITATION_STEPS)
    elif task == "chain":
        sets, longest = chain.make(seed=1, test=TEST), (5, 3 * chain.STEPS)
        _start(folder, sets, chain.CHARACTERS, longest=longest, steps=2 * IMITATION_STEPS, heads=heads)
    elif task == "bisection":
        sets, longest = bisection.make(seed=1, test=TEST), (1, 3 * bisection.GUESSES)
        _start(folder, sets, bisection.CHARACTERS, longest=longest, steps=IMITATION_STEPS, heads=heads)
    elif model is not None:
        _prepare_stories(folder, model)
    (folder / READY).touch()


def is_ready(task: str, folder: pathlib.Path, model: pathlib.Path | None) -> bool:
    """Whether `prepare` has finished; raises a UserError for a missing model of stories, or another one than before."""
    if task == "rlhf" and (model is None or not (model / "config.json").is_file()):
        raise UserError(f"--stories_model={model} must be the directory of a TinyStories Llama for the task rlhf")
    ready = (folder / READY).exists()
    if ready and task == "rlhf" and model is not None and not (folder / "sft" / "hf").samefile(model):
        raise UserError(f"--stories_model={model}: {folder} has another one; use that, or another --out")
    return ready


def _prepare_stories(folder: pathlib.Path, model: pathlib.Path) -> None:
    """Openings of stories, pairs of their continuations by the rule `mentions`, and a reward model of the pairs."""
    stories.main([f"--out={folder / 'data'}", f"--word={WORD}"])
    evaluate.main(
        [
            f"--model={model}", f"--data={folder / 'data/train.jsonl'}", f"--n={SAMPLES}", "--temperature=1.0",
            "--max_prompt_length=32", "--max_response_length=32", "--engine=inprocess", f"--out={folder / 'scored'}",
        ]
    )  # fmt: skip
    pairs.main([f"--samples={folder / 'scored/samples/test.jsonl'}", f"--out={folder / 'pairs'}"])
    c = settings.recipe("tinystories_reward_model", str(folder))
    c.model.path, c.data.max_response_length, c.data.row_lengths = str(model), 32, 1
    c.trainer.total_training_steps, c.trainer.logger = PAIR_STEPS, "jsonl"
    settings.check(c)
    reward_model.train(c)
    (folder / "sft").mkdir()
    (folder / "sft" / "hf").symlink_to(model.resolve())


def _start(
    folder: pathlib.Path, sets: Mapping[str, Any], characters: str, *, longest: tuple[int, int], steps: int, heads: int
) -> None:
    """Writes the rows of each set and fine-tunes a small model on `sft`."""
    arithmetic.write(folder / "data", sets, characters)
    model = arithmetic.MODEL | SMALL | {"num_attention_heads": heads}
    (folder / "data/model/config.json").write_text(json.dumps(model))
    c = settings.recipe("quickstart_sft", str(folder))
    c.data.max_prompt_length, c.data.max_response_length = longest
    c.data.train_batch_size = 64
    _imitate(c, steps)


def _imitate(c: ConfigDict, steps: int) -> None:
    c.trainer.total_training_steps, c.trainer.logger = steps, "jsonl"
    settings.check(c)
    sft.train(c)


@settings.exit_on_user_error
def main() -> None:
    """The worker."""
    task, folder, *model = sys.argv[1:]
    prepare(task, pathlib.Path(folder), pathlib.Path(model[0]) if model else None)


if __name__ == "__main__":
    main()
