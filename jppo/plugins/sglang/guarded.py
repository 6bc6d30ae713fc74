"""Starts SGLang with the guard over all routes: `python -m jppo.plugins.sglang.guarded OPTIONS`.

SGLang has no option for a middleware, and its API key would be visible on the command line.
"""

import runpy

from jppo.rollout.servers.guard import Guard


def main() -> None:
    """Like `python -m sglang.launch_server`, with the guard."""
    from sglang.srt.entrypoints import http_server

    http_server.app.add_middleware(Guard)
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
