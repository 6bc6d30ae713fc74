"""Serves the Tinker API on your machine: python -m jppo.tinker MODEL --lora=32 --key_file=keys.txt

    JPPO_TINKER_KEYS=tml-... python -m jppo.tinker path/to/model --data.max_response_length=512

Clients set TINKER_BASE_URL=http://127.0.0.1:8000 and TINKER_API_KEY to one of the keys. Further arguments are settings
of jppo.train: --rollout.name=inprocess, --mesh.fsdp=4. See docs/tinker.md.
"""

import ast
import os
import signal
import socket
import sys
from typing import Any

from jppo import settings
from jppo.errors import UserError, expanded
from jppo.plugins.tinker.server import name_address_in_errors, require_keys, start_server
from jppo.plugins.tinker.sessions import Service
from jppo.run.api.model import open_model

KEYS = "JPPO_TINKER_KEYS"
_ALPHA = 32  # the API's scale of adapters


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = settings.Parser("jppo.tinker", __doc__)
    parser.add_argument("model", help="model directory or Hub name")
    parser.add_argument(
        "--lora", type=settings.natural, default=32, help="rank of the adapters; 0 trains whole weights"
    )
    parser.add_argument("--name", help="the base_model that clients name; by default MODEL")
    parser.add_argument("--key_file", type=expanded, help=f"keys, one a line; by default {KEYS}")
    parser.add_argument("--folder", type=expanded, default="runs/tinker", help="folder of the checkpoints")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=settings.natural, default=8000, help="the port to listen on")
    parser.add_argument("--expiry_s", type=settings.natural, default=300, help="seconds without a client's heartbeat")
    parser.add_argument("--sessions", type=settings.natural, default=16, help="the most sessions at once")
    args, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    text = args.key_file.read_text(encoding="utf-8") if args.key_file else os.environ.get(KEYS, "")
    keys = require_keys(text, str(args.key_file or KEYS))
    loop_settings = dict[str, Any]({"rollout.name": "vllm"}) | dict(_parse_setting(argument) for argument in rest)
    lora = {"rank": args.lora, "alpha": _ALPHA} if args.lora else None
    engine = {"name": loop_settings.pop("rollout.name")}
    if args.port > 65535:
        raise UserError(f"--port={args.port} must be 0 to 65535; 0 takes a free one")
    with name_address_in_errors(args.host, args.port):  # before the model is loaded
        socket.create_server((args.host, args.port)).close()
    with open_model(args.model, lora=lora, engine=engine, **loop_settings) as model:
        name = args.name or args.model
        bounds = dict(expiry_s=args.expiry_s, max_sessions=args.sessions)
        service = Service(model, name, args.lora, folder=args.folder, **bounds)
        _, address = start_server(service, keys, args.host, args.port)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: service.stop())
        print(f"the Tinker API of {name} is at {address}", flush=True)
        service.work()


def _parse_setting(argument: str) -> tuple[str, Any]:
    """Returns the name and value of an argument --SECTION.NAME=VALUE."""
    name, equals, text = argument.removeprefix("--").partition("=")
    if not argument.startswith("--") or not equals or "." not in name:
        raise UserError(f"{argument!r} is no argument; settings are --SECTION.NAME=VALUE")
    try:
        return name, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return name, text


if __name__ == "__main__":
    main()
