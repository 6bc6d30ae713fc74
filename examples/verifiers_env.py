"""Environments of the package `verifiers` (0.4 or newer), one episode per sample.

    pip install verifiers uv
    python -m examples.verifiers_env --out runs/verifiers/data taskset.id=NAME
    python -m jppo.train --config=configs/verifiers.py --config.model.path=MODEL

The first command writes the tasks of an installed environment as prompts. In training, `play` runs each episode with
the environment's own agents, tools and scoring; the policy answers their requests. `NAME=VALUE` sets any field of the
environment's config: `taskset.id` (required), `id` (an environment around the tasks, such as best-of-n),
`agent.max_turns`, `agent.harness.id`, ... Agents get the harness `null`, a chat with the environment's tools, and run
as processes of this machine, unless fields say otherwise: the package's own defaults are a shell and a paid service.

The score of an episode is the mean reward of its traces. So the rewards of an environment that compares several
attempts in `finalize` count, too.
"""

import itertools
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields

from jppo.data.rows import write_sets
from jppo.errors import UserError
from jppo.settings import Parser, exit_on_user_error, natural

ROLE = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


def configured(fields: dict[str, Any]) -> vf.EnvConfig:
    """Returns an environment's config from nested fields, with the defaults of `ROLE` for each of its agents."""
    plain = vf.resolve_env_config(fields)
    roles = {name: ROLE | fields.get(name, {}) for name in agent_config_fields(plain)}
    return vf.resolve_env_config(fields | roles)


def tasks(fields: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Returns the first tasks of an environment as rows: prompts to look at, and what `play` needs."""
    taskset = vf.load_environment(configured(fields)).taskset
    rows = []
    for task in itertools.islice(taskset, count):
        data = task.data
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        prompt = [*system, {"role": "user", "content": data.prompt_text or "(the environment begins)"}]
        rows.append(
            {
                "data_source": fields["taskset"]["id"],
                "prompt": prompt,
                "verifiers": json.dumps({"env": fields, "task": data.model_dump(mode="json", exclude_unset=True)}),
            }
        )
    return rows


async def play(task: dict[str, Any]) -> dict[str, float]:
    """Runs one episode; the address and the key of the policy are in the environment."""
    row = json.loads(task["extra"]["verifiers"])
    env = vf.load_environment(configured(row["env"]))
    kind = env.taskset.task_type()
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        data = kind.data_type().model_validate(row["task"])
        episode = await env.run_episode(
            kind(data, env.taskset.config.task), vf.ModelContext(model="policy", client=client)
        )
    errors = episode.errors + [error for trace in episode.traces for error in trace.errors]
    if not episode.ok:
        first = errors[0] if errors else None
        raise RuntimeError(f"{first.type}: {first.message}" if first else "the episode failed without an error")
    return {"reward": sum(trace.reward for trace in episode.traces) / len(episode.traces)}


def nested(pairs: Sequence[str]) -> dict[str, Any]:
    """Returns NAME=VALUE pairs as nested fields; a value is JSON, or else text."""
    fields: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not all(name.split(".")):
            raise UserError(f"{pair!r} must be NAME=VALUE, such as taskset.id=my-environment")
        *sections, last = name.split(".")
        place = fields
        for section in sections:
            place = place.setdefault(section, {})
        try:
            place[last] = json.loads(value)
        except json.JSONDecodeError:
            place[last] = value
    return fields


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = Parser("examples.verifiers_env", __doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory to write to")
    parser.add_argument("--train", type=natural, default=1000, help="tasks to train on, at most")
    parser.add_argument("--test", type=natural, default=100, help="tasks to hold out: the first ones")
    parser.add_argument("fields", nargs="+", help="NAME=VALUE: fields of the environment's config")
    args = parser.parse_args(argv)
    fields = nested(args.fields)
    try:
        rows = tasks(fields, args.test + args.train)
    except (ImportError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{' '.join(args.fields)}: {error}") from error
    if len(rows) <= args.test:
        raise UserError(
            f"{' '.join(args.fields)} has {len(rows)} tasks; --test={args.test} must leave some to train on"
        )
    write_sets(args.out, {"test": rows[: args.test], "train": rows[args.test :]})


if __name__ == "__main__":
    main()
