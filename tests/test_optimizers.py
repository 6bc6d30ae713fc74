"""Each optimizer, a user-defined one too, trains and resumes to the bit; one that cannot be made is one line."""

import json
import pathlib
import re

import pytest

from examples import arithmetic
from jppo import reward_model, settings, sft
from jppo.errors import UserError
from jppo.learner import catalogue
from jppo.run.inputs import read_inputs
from jppo.settings import configfile
from tests.make import changed, one_line, typed, untimed, weights, write_lines

STEPS, SAVED = 8, 4
RATES = {"adamw": 1e-2, "muon": 1e-2, "adafactor": 1e-2, "lion": 3e-3, "sgd": 3e-1, "custom": 1e-2}
CUSTOM = """
import optax


def chain(section, learning_rate, matrices):
    return optax.chain(
        optax.scale_by_rms(0.9),
        optax.add_decayed_weights(section.weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def nothing(section, learning_rate, matrices):
    return None


def broken(section, learning_rate, matrices):
    return learning_rate.no_such_attribute


def misnamed(section, learning_rate, matrices):
    return optax.adam(learning_rate, *section.beta)

"""
NARROW = {"model.param_dtype": "bfloat16", "optim.moments_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model, sums to learn, and a file of user-defined optimizers."""
    folder = tmp_path_factory.mktemp("optimizers")
    sums = [(f"{a}+{b}=", str(a + b)) for a in range(1, 8) for b in range(1, 8)]
    write_lines(folder / "rows.jsonl", [{"prompt": p, "response": r} for p, r in sums])
    arithmetic.write_model(folder / "model")
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": None}
    (folder / "model/config.json").write_text(json.dumps(arithmetic.MODEL | shape))
    (folder / "mine.py").write_text(CUSTOM)
    return folder


def config(folder, run, **changes):
    c = settings.sft_default()
    c.model.path, c.model.init = str(folder / "model"), "random"
    c.data.train_files, c.data.train_batch_size, c.data.row_lengths = str(folder / "rows.jsonl"), 16, 1
    c.data.max_prompt_length, c.data.max_response_length = 6, 4
    c.trainer.run_dir, c.trainer.logger, c.trainer.save_freq = str(folder / run), "console,jsonl", SAVED
    c.trainer.total_training_steps, c.trainer.compile_cache = STEPS, ""
    return changed(c, changes)


def trained(c):
    """Metrics but for the time they took, and the model; of each folder once."""
    if not (pathlib.Path(c.trainer.run_dir) / "hf").exists():
        sft.train(c)
    return untimed(c.trainer.run_dir), weights(c.trainer.run_dir)


def resumed(folder, run, **changes):
    """The same from a checkpoint in the middle, in another folder."""
    middle = str(folder / run / f"checkpoints/{SAVED}")
    return trained(config(folder, f"{run}-again", **changes | {"trainer.resume_mode": middle}))


# test_supervised.py resumes runs with adamw; tests/learner/test_optim.py compares each with optax's.
@pytest.mark.parametrize(
    "name", [name if name in ("muon", "custom") else pytest.param(name, marks=pytest.mark.slow) for name in RATES]
)
def test_an_optimizer_trains_and_resumes_to_the_bit(folder, name):
    spec = f"{folder}/mine.py:chain" if name == "custom" else name
    changes = {"optim.optimizer": spec, "optim.lr": RATES[name]}
    metrics, model = trained(config(folder, name, **changes))
    losses = [line["sft/loss"] for line in metrics]
    assert losses[-1] < 0.9 * losses[0], losses
    again, same = resumed(folder, name, **changes)
    assert again == metrics[SAVED:] and same == model


def test_the_table_has_every_optimizer():
    assert set(RATES) == {*catalogue.OPTIMIZERS, "custom"}


def test_a_checkpoint_of_another_optimizer_is_refused(folder):
    trained(config(folder, "of-adamw"))
    with pytest.raises(
        UserError, match=r"optim\.optimizer='lion' was 'adamw' when the checkpoint was written.*old value"
    ):
        resumed(folder, "of-adamw", **{"optim.optimizer": "lion"})


REFUSED = [
    ("adam", r"'adam' is not known; it is one of 'adamw', .*, or PATH\.py:NAME.*did you mean"),
    ("FOLDER/mine.py:nothing", r"returns NoneType; it must return a optax\.GradientTransformation"),
    ("FOLDER/mine.py:broken", r"raises AttributeError: .*no_such_attribute.*; correct it"),
    ("FOLDER/mine.py:misnamed", r"raises AttributeError: .* has no attribute 'beta'"),
]


@pytest.mark.parametrize("spec,said", REFUSED)
def test_an_optimizer_that_cannot_be_made_is_one_line_and_exit_code_2(folder, spec, said, capsys):
    @configfile.exit_on_user_error
    def command(_):
        sft.train(config(folder, "refused", **{"optim.optimizer": spec.replace("FOLDER", str(folder))}))

    line = one_line(capsys, command)
    assert re.match(rf"error: optim\.optimizer=.*{said}", line), line


@pytest.mark.parametrize("section", ["actor", "critic"])
def test_ppo_refuses_it_before_it_reads_a_model(folder, section):
    for spec, said in REFUSED[1:]:
        c = settings.default()
        c.model.path, c.data.train_files, c.data.val_files = "no/model", "no.jsonl", "no.jsonl"
        c[section].optimizer = spec.replace("FOLDER", str(folder))
        with pytest.raises(UserError, match=rf"{section}\.optimizer=.*{said}"):
            settings.check(c)
            read_inputs(typed(c))


@pytest.mark.parametrize("make", [settings.default, settings.sft_default, settings.reward_model_default])
def test_settings_that_an_optimizer_does_not_read_are_refused(make):
    c = make()
    c.model.path = c.data.train_files = "x"
    if "val_files" in c.data:
        c.data.val_files = "x"
    section = "actor" if "actor" in c else "optim"
    c[section].optimizer, c[section].betas = "adafactor", (0.9, 0.99)
    with pytest.raises(UserError, match=rf"{section}\.betas=\(0\.9, 0\.99\) is not read by .*; leave it at"):
        settings.check(c)


def test_a_reward_model_learns_by_it_too(folder, monkeypatch):
    """The section's optimizer is the one that the training loop is given."""
    write_lines(folder / "pairs.jsonl", [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 8)
    c = settings.reward_model_default()
    c.model.path, c.model.init = str(folder / "model"), "random"
    c.data.train_files = c.data.val_files = str(folder / "pairs.jsonl")
    c.data.train_batch_size, c.data.row_lengths, c.trainer.total_training_steps = 4, 1, 2
    c.data.max_prompt_length, c.data.max_response_length = 6, 4
    c.trainer.run_dir, c.trainer.logger, c.trainer.compile_cache = str(folder / "rm"), "jsonl", ""
    c.optim.optimizer = f"{folder}/mine.py:nothing"
    settings.check(c)
    with pytest.raises(UserError, match=r"optim\.optimizer=.*must return a optax\.GradientTransformation"):
        reward_model.train(c)
