"""Writes what a run has trained for others: python -m jppo.export runs/quickstart --out adder

    python -m jppo.export RUN_DIR|CHECKPOINT --out DIR [--best] [--step N] [--merge_lora] [--dtype bfloat16]

RUN_DIR is a run's folder, of which the newest checkpoint is taken, or RUN_DIR/checkpoints/STEP. DIR is a Hugging Face
directory, which transformers, vLLM and python -m jppo.chat load as it is, with a model card; of a run with LoRA it has
the adapters alone, for peft, unless they are merged. A run that goes on is not disturbed: only its files are read.
"""

import argparse
import pathlib
import sys

import jax

from jppo import __version__
from jppo.assemble import trained
from jppo.assemble.trained import Trained
from jppo.config import Parser, UserError, exit_on_user_error
from jppo.io import hub
from jppo.io.card import CURVE, card
from jppo.io.curve import learning, write_curve
from jppo.io.metrics import FILE
from jppo.models import hf
from jppo.report.folder import read_rows

DTYPES = ("float32", "bfloat16", "float16")


def export(args: argparse.Namespace) -> list[str]:
    """Reads, writes and sends what is asked for; what there is to say of it."""
    if args.push:
        hub.require(args.push)
    require_free(args.out)
    place = trained.find(args.path, step=args.step, best=args.best)
    run = trained.run_of(place)
    if trained.is_checkpoint(place):
        found = trained.of_checkpoint(place, base=args.base, merge=args.merge_lora, dtype=args.dtype)
    else:
        found = trained.of_folder(place, merge=args.merge_lora, dtype=args.dtype)
    if found.kind == "adapter" and args.dtype:
        raise UserError(f"--dtype={args.dtype}: adapters are float32; add --merge_lora to get a whole model in another")
    try:
        with hf.in_place_of(args.out) as tmp:
            found.write(tmp / "model")
            for file in sorted((tmp / "model").iterdir()):
                file.rename(tmp / file.name)
            (tmp / "model").rmdir()
            notes = describe(tmp, found, run, name=args.out.absolute().name)
    except OSError as e:
        raise UserError(
            f"--out={args.out} cannot be written: {e.strerror or e}; name another folder, or make room"
        ) from e
    said = [f"from              {place}", f"{found.kind:<17} {args.out}, {found.dtype}"]
    said += [f"the card lacks    {note}" for note in notes]
    if args.push:
        said.append(f"pushed to         {hub.push(args.out, args.push)}")
    return said


def describe(out: pathlib.Path, found: Trained, run: pathlib.Path | None, *, name: str) -> list[str]:
    """Writes the model card and the run's curve up to the step; what the card could not have, and why."""
    notes: list[str] = [] if found.settings else ["settings: there is no config.json that can be read"]
    if run is None:
        notes.append("scores and curve: the checkpoint lies in no run's folder")
    rows = [] if run is None else read_rows(run / FILE, notes, "no scores and no curve")
    lines = [m for m in rows if isinstance(m.get("step"), int) and (found.step is None or m["step"] <= found.step)]
    if lines:
        write_curve(out / CURVE, title=name, **learning(lines))
    text = card(
        name=name,
        kind=found.kind,
        dtype=found.dtype,
        step=found.step,
        settings=found.settings,
        versions=found.versions,
        lines=lines,
        exported_by=__version__,
    )
    (out / "README.md").write_text(text, encoding="utf-8")
    return notes


def require_free(out: pathlib.Path) -> None:
    """UserError where there is something already that would be lost."""
    try:
        taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    except OSError as e:
        raise UserError(f"--out={out} cannot be looked at: {e.strerror}; name another folder") from e
    if taken:
        what = "is a folder with something in it" if out.is_dir() else "is a file"
        raise UserError(f"--out={out} {what}, which is not overwritten; name a new folder, or remove it")


def read_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line's words."""
    parser = Parser("jppo.export", __doc__)
    parser.add_argument("path", type=pathlib.Path, metavar="RUN_DIR|CHECKPOINT", help="what is exported")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="a folder that is not there yet")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step, not the newest")
    parser.add_argument("--best", action="store_true", help="the checkpoint that checkpoints/best.json names")
    parser.add_argument("--merge_lora", action="store_true", help="a whole model in place of its adapters")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; as in training unless given")
    parser.add_argument("--base", metavar="DIR", help="where the run's model.path lies now, if no more where it was")
    parser.add_argument("--push", metavar="OWNER/NAME", help="send it to the Hugging Face hub, too")
    args = parser.parse_args(argv)
    if args.best and args.step is not None:
        raise UserError(f"--best and --step={args.step} each name a checkpoint; give one of them")
    return args


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    args = read_arguments(sys.argv[1:] if argv is None else argv)
    jax.config.update("jax_platforms", "cpu")  # a training may have the accelerator, and nothing is computed
    for line in export(args):
        print(line)


if __name__ == "__main__":
    main()
