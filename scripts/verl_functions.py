"""Writes jppo/plugins/verl/known_functions.py from the history of verl.

    python scripts/verl_functions.py CHECKOUT [CHECKOUT ...] > jppo/plugins/verl/known_functions.py

A CHECKOUT is a clone of verl with its whole history, or the git directory of one.
"""

import collections
import subprocess
import sys
import textwrap

from jppo.plugins.verl.own_code import FUNCTIONS, fingerprints

HEAD = '''"""Fingerprints of verl's own functions in all versions until {until}, by scripts/verl_functions.py."""

_TABLE = """
'''
FOOT = '''"""

KNOWN = dict(entry.split(" ", 1) for entry in " ".join(_TABLE.split()).split("; ") if entry)
'''


def run_git(checkout: str, *words: str) -> str:
    return subprocess.run(["git", "-C", checkout, *words], check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Prints the module."""
    known, until = collections.defaultdict[str, dict[str, None]](dict), ""
    for checkout in sys.argv[1:]:
        until = max(until, run_git(checkout, "log", "-1", "--format=%cd", "--date=format:%Y-%m"))
        for file, names in FUNCTIONS.items():
            stem = file.rpartition("/")[2].removesuffix(".py")
            for commit in run_git(checkout, "log", "--format=%H", "--", f"verl/{file}").split():
                if not run_git(checkout, "ls-tree", commit, f"verl/{file}"):
                    continue  # it was removed
                try:
                    found = fingerprints(run_git(checkout, "show", f"{commit}:verl/{file}"), names)
                except SyntaxError as e:
                    print(f"{commit}: {file}: {e}", file=sys.stderr)
                    continue
                for name, (_, fingerprint) in found.items():
                    known[f"{stem}.{name}"][fingerprint] = None
    text = "; ".join(" ".join((name, *sorted(values))) for name, values in sorted(known.items()))
    print(HEAD.format(until=until.strip()) + textwrap.fill(text, 120, break_long_words=False) + "\n" + FOOT, end="")


if __name__ == "__main__":
    main()
