"""The verdicts of `jppo prove` on eight known algorithms and on three broken ones:

    python benchmarks/prove.py
    python benchmarks/prove.py --tasks=chain,bisection --seeds=3

Further arguments are those of `jppo.prove`, such as --stories_model=MODEL. The same command resumes.
"""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
BAD = ROOT / "benchmarks/known_bad.py"
KNOWN = {
    "PPO": ["gae"],
    "GRPO": ["grpo"],
    "Dr. GRPO": ["grpo", "--config.algorithm.norm_adv_by_std_in_grpo=False"],
    "RLOO": ["rloo"],
    "REINFORCE++": ["reinforce_plus_plus"],
    "REINFORCE++ baseline": ["reinforce_plus_plus_baseline"],
    "OPO": ["opo"],
    "SPO": [f"{ROOT}/examples/algorithms/spo.py:spo"],
}
BROKEN = {name: [f"{BAD}:{name}"] for name in ("sign_flipped", "other_sample", "constant_reward")}


def main() -> None:
    """Proves one after the other and prints the table; exit code 1 if a known one fails or a broken one passes."""
    rows, surprises = [], 0
    for name, words in (KNOWN | BROKEN).items():
        command = [sys.executable, "-m", "jppo.prove", *words, *sys.argv[1:]]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode not in (0, 1):
            sys.exit(done.returncode)
        *_, said, page = done.stdout.splitlines()
        rows.append(f"| {name} | {'passes' if done.returncode == 0 else 'fails'} | {said.split(': ', 1)[1]} | {page} |")
        print(rows[-1], flush=True)
        surprises += (done.returncode == 0) != (name in KNOWN)
    print("\n".join(["", "| algorithm | | verdict | page |", "|---|---|---|---|", *rows]))
    sys.exit(min(1, surprises))


if __name__ == "__main__":
    main()
