"""vLLM without a server, for `rollout.py`: runs in vLLM's interpreter, with requests on stdin.

    python benchmarks/offline.py --model DIR [vLLM's options]

A line is JSON: `{"check": {...}}` loads what a publish hands over, by the worker extension; `{"requests": [...]}`
answers bodies of the generate route, all at once. Each is answered by a line of JSON; what vLLM prints goes to stderr.
"""

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """The command line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, EngineArgs, SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    options, _ = parser.parse_known_args()  # the server's own options are not the engine's
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(options))

    def load(check: dict[str, Any]) -> dict[str, Any]:
        for method, kwargs in (
            ("jppo_check", check),
            ("jppo_load", {name: check[name] for name in ("version", "path")}),
        ):
            (result,) = llm.collective_rpc(method, kwargs=kwargs)
            if not result["ok"]:
                return result
        return result

    def generate(requests: list[dict[str, Any]]) -> dict[str, Any]:
        prompts = [{"prompt_token_ids": request["token_ids"]} for request in requests]
        params = [SamplingParams(**request["sampling_params"]) for request in requests]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": [list(output.outputs[0].token_ids) for output in outputs]}

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = load(asked["check"]) if "check" in asked else generate(asked["requests"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
