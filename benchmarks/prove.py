"""The verdicts of `jppo prove` on eight known algorithms and on three broken ones:

    python benchmarks/prove.py
    python benchmarks/prove.py --tasks=chain,bisection --seeds=3

Run it in the checkout's folder. The options are those of `jppo.prove`. The same command resumes.
"""

import argparse
import subprocess
import sys

KNOWN = {
    "PPO": ["gae"],
    "GRPO": ["grpo"],
    "Dr. GRPO": ["grpo", "--config.algorithm.norm_adv_by_std_in_grpo=False"],
    "RLOO": ["rloo"],
    "REINFORCE++": ["reinforce_plus_plus"],
    "REINFORCE++ baseline": ["reinforce_plus_plus_baseline"],
    "OPO": ["opo"],
    "SPO": ["examples/algorithms/spo.py:spo"],
}
BROKEN = {name: [f"benchmarks/known_bad.py:{name}"] for name in ("sign_flipped", "other_sample", "constant_reward")}


def main() -> None:
    """Proves one after the other and prints the table; exit code 1 unless known ones pass and broken ones fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("tasks", "seeds", "steps", "jobs", "out", "stories_model"):
        parser.add_argument(f"--{name}", help="as of jppo.prove")
    options = [f"--{name}={value}" for name, value in vars(parser.parse_args()).items() if value is not None]
    rows, surprises = [], 0
    for name, words in (KNOWN | BROKEN).items():
        command = [sys.executable, "-m", "jppo.prove", *words, *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode not in (0, 1):
            sys.exit(done.returncode)
        *_, said, page = done.stdout.splitlines()
        about, words = said.split(": ", 1)
        result = about.split()[-1]
        rows.append(f"| {name} | {result} | {words} | {page} |")
        print(rows[-1], flush=True)
        surprises += result != ("passes" if name in KNOWN else "fails")
    print("\n".join(["", "| algorithm | | verdict | page |", "|---|---|---|---|", *rows]))
    sys.exit(min(1, surprises))


if __name__ == "__main__":
    main()
