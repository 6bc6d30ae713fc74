"""The verdicts of `jppo prove` on eight known algorithms and on three broken ones:

    python benchmarks/prove.py
    python benchmarks/prove.py --tasks=chain,bisection --seeds=3

Further arguments are those of `jppo.prove`, such as --stories_model=MODEL. The same command resumes.
"""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
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
    rows, surprises = [], 0
    for name, words in (KNOWN | BROKEN).items():
        command = [sys.executable, "-m", "jppo.prove", *words, *sys.argv[1:]]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
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
