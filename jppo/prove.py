"""A referee for an algorithm, on CPUs: python -m jppo.prove my.py:algorithm

Trains it, PPO and GRPO on the tasks of docs/learning.md, with the same seeds and number of samples. Prints a verdict,
and writes prove.md with the curves, to attach to a pull request. The algorithm is a file of `algorithm.extension`, or
an estimator such as rloo; --config.SECTION.NAME=VALUE changes a setting of it. The same command resumes; the runs of
PPO and GRPO are kept for the next algorithm.

Exit code 0 if it passes, 1 if it fails or the verdict is undecided.
"""

import os
import shlex
import sys

import jax

from jppo import child_process, settings
from jppo.configs import learning
from jppo.errors import UserError, expanded
from jppo.plugins.prove import contest, verdict
from jppo.plugins.prove.page import write_page
from jppo.runlog.durable_files import own
from jppo.sweep import print_line


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Trains the algorithm and its references, and prints the verdict."""
    argv = sys.argv[1:] if argv is None else argv
    parser = settings.Parser("jppo.prove", __doc__, allow_abbrev=False)
    parser.add_argument("algorithm", help="FILE.py:NAME or MODULE:NAME of algorithm.extension, or an estimator")
    parser.add_argument("--tasks", help=f"of {','.join(learning.TASKS)} (default: all; rlhf with --stories_model)")
    parser.add_argument("--seeds", type=int, default=5, help="runs of an algorithm on a task, 2 or more")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--steps", type=settings.natural, default=0, help="of a run (default: the task's)")
    parser.add_argument("--out", type=expanded, default="runs/prove", help="folder of all runs and pages")
    parser.add_argument("--stories_model", type=expanded, help="directory of a TinyStories Llama, for rlhf")
    args, changes = parser.parse_known_args(argv)
    tasks = (args.tasks or ",".join(t for t in learning.TASKS if t != "rlhf" or args.stories_model)).split(",")
    if unknown := [task for task in tasks if task not in learning.TASKS]:
        raise UserError(f"--tasks={args.tasks}: {unknown[0]!r} is not one of {', '.join(learning.TASKS)}")
    if args.seeds < 2 or args.jobs < 1:
        raise UserError(f"--seeds={args.seeds} must be 2 or more and --jobs={args.jobs} 1 or more")
    jax.config.update("jax_platforms", "cpu")
    os.environ["JAX_PLATFORMS"] = "cpu"  # of the runs
    base = args.out / contest.base_name()
    references = [contest.enter(e, base, steps=args.steps, label=name) for name, e in contest.REFERENCES.items()]
    tried = contest.enter(args.algorithm, base, changes, steps=args.steps)
    runs = [contestant.plan_all(tasks, args.seeds) for contestant in (tried, *references)]
    about = [tried.label, f"`{shlex.join(['jppo', 'prove', *argv])}`", f"{base.name}, {contest.machine()}"]
    if "rlhf" not in tasks:
        about.append("without the task rlhf, which needs --stories_model=DIR with a TinyStories Llama")
    child_process.unwind_on_signals()
    with own(base, "--out"):
        contest.prepare_all(tasks, base, args.stories_model, args.jobs)
        curves, scores = {}, {}
        try:
            contest.run_all(runs[0], args.jobs)
        except contest.Crashed as crash:
            found = verdict.Verdict("fails", f"crashed: {crash}")
        else:
            contest.run_all(runs[1] + runs[2], args.jobs)
            curves = {t: {c.label: c.read_curves(t, args.seeds) for c in (*references, tried)} for t in tasks}
            scores = {task: verdict.summarise(task, by_name) for task, by_name in curves.items()}
            found = verdict.judge(scores)
        page = write_page(tried.folder, found, about, curves, scores)
    print_line(f"{tried.label} {found.result}: {found.words}\n{page}")
    if found.result != "passes":
        sys.exit(1)


if __name__ == "__main__":
    main()
