"""Writes one HTML page about one run or several: python -m jppo.report runs/quickstart [RUN_DIR ...] [--out FILE]

The page opens from disk without a network: curves, stage times, scores, samples, settings, warnings.
"""

import pathlib
import sys

from jppo.errors import UserError, escaped, expanded
from jppo.plugins.report.page import NAME, write_report
from jppo.settings import Parser, exit_on_user_error


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Writes the page about the runs and prints its path."""
    parser = Parser("jppo.report", __doc__)
    parser.add_argument("run_dirs", nargs="+", type=expanded, metavar="RUN_DIR", help="the folder of a run")
    parser.add_argument("--out", type=expanded, help=f"the page (RUN_DIR/{NAME} for one run, ./{NAME} for several)")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    out = args.out
    if out is None:
        out = (args.run_dirs[0] if len(args.run_dirs) == 1 else pathlib.Path()) / NAME
    try:
        print(escaped(str(write_report(args.run_dirs, out))))
    except OSError as e:
        raise UserError(f"{e.filename or out}: {e.strerror}; use another file by --out") from e


if __name__ == "__main__":
    main()
