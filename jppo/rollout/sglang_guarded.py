"""Starts SGLang with the guard over all of its routes: `python -m jppo.rollout.sglang_guarded OPTIONS`.

SGLang has no option for a middleware, and its API key would be on the command line, which every user can read.
"""

import runpy

from jppo.rollout.guard import Guard


def main() -> None:
    """As `python -m sglang.launch_server`, guarded."""
    from sglang.srt.entrypoints import http_server

    http_server.app.add_middleware(Guard)
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
