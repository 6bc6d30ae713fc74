"""Fits a critic on logged samples: jppo critic_fit RUN [RUN ...] --out DIR [--model DIR] [--config.critic.lr=1e-4]

    python -m jppo.critic_fit runs/gsm8k --out runs/critic
    python -m jppo.train --config=FILE --config.critic.path=runs/critic/hf

RUN is the folder of a training, or of jppo.evaluate. The settings are the first run's; --config.SECTION.NAME=VALUE
changes them. The command prints how much of the returns the critic explains on held-out prompts. It writes the critic
to DIR/hf, the table to DIR/explained.json and a picture of it to DIR/explained.svg.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

from ml_collections import ConfigDict

from jppo import settings
from jppo.errors import UserError, escaped, expanded
from jppo.export import require_free
from jppo.models import hf
from jppo.plugins.critic_fit import explained, logged
from jppo.plugins.critic_fit.fit import fit_critic
from jppo.run.tokenizer import read_tokenizer
from jppo.runlog import durable_files
from jppo.settings import Settings, parts, table


def config_of_run(run: pathlib.Path) -> ConfigDict:
    """Returns the settings in a run's config.json; those that jppo no longer has are left out."""
    saved = durable_files.read_json(run / "config.json")
    if table.kind_of(saved) is not Settings:
        raise UserError(f"{run}/config.json has no settings of jppo.train; name the folder of a training with samples")
    config = settings.default()
    known = settings.by_name(config)
    config.update_from_flattened_dict({name: x for name, x in settings.by_name(saved).items() if name in known})
    return config


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, Settings]:
    """Reads the command line; returns the arguments and the checked settings."""
    parser = settings.Parser("jppo.critic_fit", __doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=expanded, metavar="RUN", help="the folder of a run with samples/")
    parser.add_argument("--out", type=expanded, required=True, help="a folder that is not there yet")
    parser.add_argument("--model", help="the model to start from: critic.path, which by default is the policy's")
    parser.add_argument("--epochs", type=settings.natural, default=10, help="at most; it ends if two do not help (10)")
    parser.add_argument("--held_out", type=float, default=0.1, help="share of the prompts to measure on (0.1)")
    parser.add_argument("--last_step", type=int, default=-1, help="the last step whose samples are read; -1: all")
    args, rest = parser.parse_known_args(argv)
    if not 0 < args.held_out < 1:
        raise UserError(f"--held_out={args.held_out} is a share: it must be between 0 and 1")
    rest += [] if args.model is None else [f"--config.critic.path={args.model}"]
    config, _ = settings.parse(rest, __doc__ or "", config_of_run(args.runs[0]), needs_file=False)
    c = settings.typed(config, Settings, training=False)
    if c.critic.value_bins:
        raise UserError(f"critic.value_bins={c.critic.value_bins}: a histogram head is always new; set it to 0")
    if c.memory_chooses:  # affects memory, not results
        c = settings.changed(c, {"model.remat": "full", "actor.max_tokens_per_device": 4096})
    return args, settings.changed(c, {"algorithm.options": parts.options(c)})


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Reads the samples, fits the critic and prints the table."""
    args, c = read_arguments(sys.argv[1:] if argv is None else argv)
    require_free(args.out)
    tokenizer = read_tokenizer(c, hf.read_config(c.model.path, longest=c.data.longest_row)[1])
    encode = logged.make_encode(c, tokenizer)
    samples = [one for run in args.runs for one in logged.read_run(run, encode, args.last_step)]
    lengths = c.data.max_prompt_length, c.data.max_response_length
    fitting = [one for one in samples if one is not None and logged.fits(one, *lengths)]
    if not fitting:
        raise UserError(
            f"{args.runs[0]}: none of {len(samples)} graded samples can be used; those of conversations need token"
            " records, which a run logs of trainer.token_samples responses of each step"
        )
    train, held_out = logged.split(fitting, share=args.held_out, seed=c.trainer.seed)
    left_out = f"left out {len(samples) - len(fitting)}: over-long, or of conversations without token records"
    print(f"{len(train)} samples to learn from, {len(held_out)} of held-out prompts; {left_out}")
    with durable_files.own(args.out, "--out"):
        tokens = fit_critic(c, train, held_out, args.out, epochs=args.epochs, pad=tokenizer.pad_token_id)
        rows = explained.explain(tokens)
        table_text = json.dumps([dataclasses.asdict(row) for row in rows], indent=2)
        durable_files.write_text(args.out / "explained.json", f"{table_text}\n")
        durable_files.write_text(args.out / "explained.svg", explained.draw(rows))
    print(escaped(f"{explained.format_table(rows)}\ncritic            {args.out / 'hf'}"))


if __name__ == "__main__":
    main()
