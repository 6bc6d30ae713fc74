"""Writes a config for your data, model and machine: python -m jppo.init train.jsonl --model=DIR --reward=reward.py

    python -m jppo.init train.jsonl --val=test.jsonl --model=DIR --reward=reward.py --out=config.py
    python -m jppo.init questions.csv --prompt_key=question --truth_key=answer --reward=reward.py --lora
    python -m jppo.init tasks.jsonl --model=DIR --agent=agent.py:play
    python -m jppo.train --config=config.py

The config has lengths from the data, batch sizes that divide, and a comment for every choice. It is checked as
`jppo.train` would check it before it is written; nothing is trained.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import pathlib
import runpy
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence

import jax

from jppo import plugins, settings
from jppo.data.prompts import SOLUTIONS
from jppo.data.rows import TFDS, Row, Source, read_sources
from jppo.data.tokenizer import load_tokenizer
from jppo.errors import UserError, escaped, expanded
from jppo.learner.sharding import fastest_dtype
from jppo.models import hf
from jppo.models.config import ModelConfig
from jppo.preflight import memory
from jppo.preflight.accelerators import NvidiaGpu, cuda_fault, gpus
from jppo.preflight.finding import GIB
from jppo.registry import did_you_mean
from jppo.rewards.graders import FunctionPart, grader_of
from jppo.rewards.pool import Pool
from jppo.rollout.vllm.arguments import check_vllm, torch_cuda
from jppo.run.inputs import Inputs, read_inputs
from jppo.settings import Parser, Settings, texts
from jppo.types import Prompt

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
NO_TRUTH = "gets no ground truth"
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input")  # names of the column, tried in turn
# Columns that may have the ground truth of a custom reward function, tried in order.
TRUTH_COLUMNS = ("answer", "solution", "expected", "label", "target", "output", "response", "completion")
# Columns with a meaning of their own: others are read by nothing, unless a setting names them.
READ = ("prompt", "ground_truth", "reward_model", "data_source", "ability", "extra_info", "id", "index")
SECTIONS = ("model", "data", "reward", "algorithm", "actor", "critic", "rollout", "trainer")  # in the file's order
SLOW_ON_CPU = 5e7  # parameters; with 135M a step of 32 responses takes 44 s on two cores, of 16 24 s
STEPS = 100
GROUP = 8  # responses to a prompt, for GRPO
MIN_MEASURED = 32  # tokens; shorter answers in the data do not tell how long responses will be
TESTED = 256  # most rows that are held out, or of a test on training prompts
HELD_OUT = 5  # one of so many rows is held out
SERVED_HEAD = 32  # least head size that vLLM serves on a CPU
TRAINED_BYTES = 16  # of each trained parameter: itself, its gradient and two moments, in float32
ADDED = 64  # tokens of an agent's own words in its first request
RANK = 32  # of adapters
# Learning rate of adapters divided by the one of full fine-tuning (Schulman et al. 2025, LoRA Without Regret).
ADAPTER_RATE = 10
# Up to so many parameters: learning rates of policy and critic, which were measured on models of this size.
RATES = ((2e7, 1e-4, 3e-4), (3e8, 1e-5, 3e-5), (float("inf"), 1e-6, 1e-5))


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A setting of the config and its reason."""

    name: str
    value: bool | int | float | str
    reason: str


def prompt_column(rows: Sequence[Row]) -> str:
    """Returns the column that has the prompts; UserError if none has a usual name, or several have."""
    names = [name for name in PROMPTS if any(row.columns.get(name) for row in rows)]
    if not names:
        raise UserError(
            f"{rows[0].source} has no column of prompts among {', '.join(map(str, rows[0].columns))} with a usual name;"
            " name it by --prompt_key"
        )
    if names[0] != PROMPTS[0] and len(names) > 1:
        raise UserError(
            f"{rows[0].source} has the columns {' and '.join(names)}: write prompts as one column, or name the one that"
            " is the whole prompt by --prompt_key"
        )
    return names[0]


def truth_column(rows: Sequence[Row]) -> str:
    """Returns the column with the ground truth, if it needs to be named in the config; otherwise ''."""
    if any(row.columns.get(name) is not None for row in rows for name in ("ground_truth", "reward_model")):
        return ""
    name = next((name for name in TRUTH_COLUMNS if any(name in row.columns for row in rows)), "")
    return name if all(name in row.columns for row in rows) else ""  # another column would have something else


def held_out(sources: Sequence[Source]) -> list[int]:
    """Returns how many of each source's last rows are test rows."""
    return [min(TESTED // len(sources), len(source.rows) // HELD_OUT) for source in sources]


def split_entries(files: str, sources: Sequence[Source]) -> tuple[str, str]:
    """Splits sources into training and test rows, the last of each, as slices; no test rows where there are few."""
    entries, counts = texts.entries(files), held_out(sources)
    if not all(counts) or any(entry.startswith(TFDS) or entry.endswith("]") for entry in entries):
        return files, ""
    cuts = [*zip(entries, counts, strict=True)]
    return ",".join(f"{entry}[:-{n}]" for entry, n in cuts), ",".join(f"{entry}[-{n}:]" for entry, n in cuts)


def file_choices(files: str, val: str, sources: Sequence[Source]) -> Iterator[Proposal]:
    """Yields the training and the test set; without test prompts, some of the rows are held out."""
    count = sum(len(source.rows) for source in sources)
    train, test = (files, val) if val else split_entries(files, sources)
    yield Proposal("data.train_files", train, f"of {count} rows" if train != files else f"{count} rows")
    if test:
        tested = [row for source, n in zip(sources, held_out(sources), strict=True) for row in source.rows[-n:]]
        untested = _data_sources(row for source in sources for row in source.rows) - _data_sources(tested)
        lacking = f", without data_source={min(untested)!r}" if untested else ""
        reason = f"held out for tests: the last rows{lacking}; --val names other rows"
        yield Proposal("data.val_files", test, "test prompts" if val else reason)
    else:
        yield Proposal("data.val_files", files, "the training prompts: --val gives held-out ones")
        yield Proposal("data.val_max_samples", min(TESTED, count), "prompts of a test")


def _data_sources(rows: Iterable[Row]) -> set[str]:
    return {str(row.columns.get("data_source")) for row in rows}


def check_names(args: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Raises UserError for a column or an agent program that the options name and that is not there."""
    if args.agent:
        plugins.load("agents.gateway.process").parse_agent(args.agent)
    names = [*map(str, rows[0].columns)]
    for option, key in (("--prompt_key", args.prompt_key), ("--truth_key", args.truth_key)):
        if key and key.partition(".")[0] not in names and key not in names:
            raise UserError(
                f"{option}={key} is no column of {args.data}, which has {', '.join(names)}{did_you_mean(key, names)}"
            )


def column_choices(args: argparse.Namespace, rows: Sequence[Row]) -> Iterator[Proposal]:
    """Yields the settings that follow from the columns: their names, and the reward."""
    if (column := args.prompt_key or prompt_column(rows)) != "prompt":
        reader = ", the agent's task['prompt']" if args.agent else ""
        yield Proposal("data.prompt_key", column, f"column of the prompts{reader}")
    template = load_tokenizer(args.model).chat_template
    if args.agent:
        yield from agent_choices(args.agent, args.reward, bool(template))
    elif template and any(isinstance(row.columns.get(column), str) for row in rows):
        yield Proposal("data.prompt_role", "user", "the chat template renders text as a message; '' leaves it as it is")
    if not args.reward and not args.agent:
        sources = [row.columns.get("data_source") for row in rows]
        unknown = [source for source in sources if not (isinstance(source, str) and grader_of(source))]
        if unknown:
            raise UserError(
                f"{args.data}: no rule scores data_source={unknown[0]!r}; give --reward=FILE.py, whose"
                " compute_score(data_source, solution_str, ground_truth, extra_info) returns a number"
            )
    tests = [row for source in read_sources(args.val, "--val") for row in source.rows] if args.val else []
    truth, reason = args.truth_key or truth_column([*rows, *tests]), "scores a response"
    others = sorted({name for row in rows for name in row.columns} - {column, "data_source"})
    if truth:
        reader = "the agent's task['ground_truth']" if args.agent else "which the reward gets"
        yield Proposal("data.ground_truth_key", truth, f"column of the ground truth, {reader}")
    elif others and not {"ground_truth", "reward_model"} & {*others}:
        missing = f"--truth_key names the column of the ground truth, perhaps {' or '.join(map(repr, others))}"
        if not args.reward and not args.agent:
            raise UserError(f"{args.data}: rules need a ground truth; {missing}")
        reason += f"; {NO_TRUTH}: {missing}"
    if args.reward:
        yield Proposal("reward.function", args.reward, reason)


def agent_choices(agent: str, reward: str, template: bool) -> Iterator[Proposal]:
    """Yields the settings of an agent program, which gets a row as it is."""
    yield Proposal("rollout.agent", agent, "runs once for each response, and calls the policy as a chat API")
    if not reward:
        yield Proposal("rollout.agent_reward", "reported", 'the program\'s last line is {"reward": NUMBER}')
    if not template:
        yield Proposal("rollout.agent_format", "plain", "the model has no chat template")


def free_folder(files: str, algorithm: str) -> str:
    """Returns a run folder that does not exist yet, named after data and algorithm."""
    folder = f"runs/{pathlib.PurePath(files.partition(',')[0]).stem}-{algorithm}"
    names = itertools.chain([folder], (f"{folder}-{i}" for i in itertools.count(2)))
    return next(name for name in names if not os.path.lexists(name))


def size_choices(
    count: int, backend: str, parameters: float, algorithm: str, adapters: bool = False
) -> Iterator[Proposal]:
    """Yields the algorithm with its batch sizes, the length of the run and learning rates."""
    group = 1 if algorithm == "ppo" else GROUP
    of_cpu = 16 if parameters > SLOW_ON_CPU and algorithm == "ppo" else 32
    batch = min((of_cpu if backend == "cpu" else 256) // group, 1 << (count.bit_length() - 1))
    epochs, responses = -(-STEPS // (count // batch)), batch * group
    mini = max(min(8, responses), responses // 4)
    actor, critic = next((actor, critic) for max_parameters, actor, critic in RATES if parameters <= max_parameters)
    if algorithm == "grpo":
        yield Proposal("algorithm.adv_estimator", "grpo", "compares the responses to a prompt; there is no critic")
        yield Proposal("rollout.n", group, "responses to each prompt")
    yield Proposal("data.train_batch_size", batch, f"prompts per step, of {count}")
    yield Proposal("actor.ppo_mini_batch_size", mini, f"responses per update: {responses // mini} updates per step")
    rate, note = (ADAPTER_RATE, f", times {ADAPTER_RATE} for adapters") if adapters else (1, "")
    yield Proposal("actor.lr", round(rate * actor, 10), f"usual for {parameters / 1e6:.3g}M parameters{note}")
    if algorithm == "ppo":
        yield Proposal("critic.lr", round(rate * critic, 10), "the critic learns faster than the policy")
    yield Proposal("algorithm.use_kl_in_reward", True, "keeps the policy near its start, by algorithm.kl_coef")
    yield Proposal("trainer.total_training_steps", STEPS, f"about {epochs} passes over the data")
    yield Proposal("trainer.test_freq", STEPS // 10, "steps between tests")
    yield Proposal("trainer.save_freq", STEPS // 10, "steps between checkpoints")


def choose_engine(backend: str, cfg: ModelConfig, cards: Sequence[NvidiaGpu]) -> Proposal:
    """Chooses vLLM where one is installed that runs on this machine and serves the model."""
    own = functools.partial(Proposal, "rollout.name", "inprocess")
    try:
        build = "" if backend == "tpu" else check_vllm("")
    except UserError:
        build = ""
    if not build:
        return own("no vLLM here: the trainer samples by itself")
    if build == "gpu" and (fault := cuda_fault(cards, torch_cuda(""))) is not None:
        return own(f"vLLM does not run here ({fault}): the trainer samples by itself")
    if build == "cpu" and cfg.head_dim < SERVED_HEAD:
        return own(f"vLLM on a CPU serves no heads of {cfg.head_dim}")
    return Proposal("rollout.name", "vllm", f"vLLM for the {build.upper()} is installed")


def machine_choices(device: jax.Device, cfg: ModelConfig, cards: Sequence[NvidiaGpu]) -> Iterator[Proposal]:
    """Yields the engine and the settings that depend on the device and installed vLLM."""
    engine = choose_engine(device.platform, cfg, cards)
    yield engine
    if device.platform == "cpu":
        yield Proposal("model.scan_layers", False, "compiles more slowly, runs faster on a CPU")
        if settings.cpu_dtype() == "bfloat16":
            yield Proposal("model.compute_dtype", "bfloat16", "this CPU has instructions for it")
            yield Proposal("rollout.dtype", "bfloat16", "as model.compute_dtype")
        return
    dtype = fastest_dtype(device)
    reason = f"fast on a {device.device_kind}" + ("" if dtype == "bfloat16" else ", which has no bfloat16")
    yield Proposal("model.compute_dtype", dtype, reason)
    yield Proposal("rollout.dtype", dtype, "as model.compute_dtype")
    yield Proposal("model.remat", "auto", "recomputes activations where memory is short")
    yield Proposal("actor.max_tokens_per_device", -1, "what fits in memory")


def adapter_choices(device: jax.Device, parameters: float, algorithm: str, wanted: bool = False) -> Iterator[Proposal]:
    """Yields LoRA adapters where they are wanted, or the training of all weights does not fit the device's memory."""
    room = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
    models = 2 if algorithm == "ppo" else 1
    needed = (TRAINED_BYTES * models + 4) * parameters  # and the reference
    reason = "adapters learn, and the weights are frozen" if wanted else ""
    if room is not None and needed > room:
        reason = f"adapters: all weights would take {needed / GIB:.0f} GiB of a device's {room / GIB:.0f}"
    if not reason:
        return
    yield Proposal("model.lora_rank", RANK, reason)
    yield Proposal("model.lora_alpha", RANK, "scale of the adapters")
    if device.platform != "cpu":
        yield Proposal("model.param_dtype", "bfloat16", "of the frozen weights")


def prompt_lengths(prompts: Sequence[Prompt], turns: bool) -> list[int]:
    """Returns the tokens of each prompt, with room for an agent's own words if it plays the rows."""
    return [len(prompt.ids) + ADDED * turns for prompt in prompts]


def length_choices(
    inputs: Inputs, rows: Sequence[Row], limit: int, backend: str, turns: bool = False
) -> Iterator[Proposal]:
    """Yields the lengths of prompts and responses, from the data and within the model's `limit`.

    `turns`: a response is all that follows the prompt in a conversation.
    """
    lengths = prompt_lengths([*inputs.train.prompts, *inputs.val.prompts], turns)
    longest = max(lengths)
    answers = [row.columns[name] for row in rows for name in SOLUTIONS if isinstance(row.columns.get(name), str)]
    response, reason = (64 if backend == "cpu" else 512), "a guess: the data has no worked solutions to measure"
    if turns:
        response, reason = 4 * response, "a guess: of all turns after the prompt together"
    elif answers:
        counts = sorted(map(len, inputs.tokenizer(answers, verbose=False)["input_ids"]))
        from_answers = _round_up(counts[-1 - len(counts) // 100] * 3 // 2)
        if from_answers >= MIN_MEASURED:
            response, reason = from_answers, "one and a half of the rows' own answers"
        else:
            reason = f"a guess: the rows' own answers are short, with up to {counts[-1]}, and a model may write more"
    prompt = min(_round_up(longest), max(limit // 2, limit - response))
    dropped = inputs.train.overlong + inputs.val.overlong + sum(length > prompt for length in lengths)
    left_out = f"; {dropped} that are longer are left out, by the model's {limit} positions" if dropped else ""
    if response > limit - prompt:
        response, reason = limit - prompt, f"what the model's {limit} positions leave"
    about = (
        f"a first request of the agent, {ADDED} more than a prompt" if turns else f"the longest prompt has {longest}"
    )
    yield Proposal("data.max_prompt_length", prompt, f"tokens; {about}{left_out}")
    yield Proposal("data.max_response_length", response, f"tokens; {reason}")


def _round_up(tokens: int) -> int:
    return max(8, -(-tokens // 8) * 8)


def render(choices: Sequence[Proposal], title: str, out: pathlib.Path) -> str:
    """Formats the config as a Python file with a comment on each setting."""
    lines = [
        f'"""{title}; written by jppo.init, to be changed as you like.',
        "",
        f"    python -m jppo.train --config={shlex.quote(str(out))}",
        '"""',
        "",
        "from jppo import settings",
        "",
        "",
        "def get_config():",
        "    config = settings.default()",
    ]
    section = ""
    for proposal in sorted(choices, key=lambda proposal: SECTIONS.index(proposal.name.partition(".")[0])):
        if proposal.name.partition(".")[0] != section:
            section = proposal.name.partition(".")[0]
            lines.append("")
        lines.append(f"    config.{proposal.name} = {proposal.value!r}  # {proposal.reason}")
    return "\n".join([*lines, "    return config.lock()", ""])


def _make_settings(choices: Sequence[Proposal]) -> Settings:
    """Returns the checked settings that the proposals make."""
    config = settings.default()
    config.update_from_flattened_dict({proposal.name: proposal.value for proposal in choices})
    c: Settings = settings.typed(config)
    return c


def note_unread(rows: Sequence[Row], choices: Sequence[Proposal]) -> Iterator[str]:
    """Yields notes on answers in the prompts and on columns that neither policy nor reward reads."""
    proposals = {proposal.name: proposal for proposal in choices}
    names = ("data.prompt_key", "data.ground_truth_key")
    key, truth = (str(proposals[name].value) if name in proposals else "" for name in names)
    prompts = [row.columns.get(key or PROMPTS[0]) for row in rows]
    if answered := sum(isinstance(prompt, list) and prompt[-1]["role"] == "assistant" for prompt in prompts):
        yield (
            f"{answered} prompts end with an assistant's message, which the policy would read; if it is the answer,"
            " write it to a column of its own"
        )
    unread = sorted({name for row in rows for name in row.columns} - {*READ, *TRUTH_COLUMNS, key, truth})
    if NO_TRUTH in (reward := proposals.get("reward.function", choices[0]).reason):
        yield f"reward.function {reward.partition('; ')[2]}"
    elif unread and "rollout.agent" not in proposals:
        yield f"the policy reads the column {key or PROMPTS[0]!r} alone, not {', '.join(map(repr, unread))}"


def _choose_settings(args: argparse.Namespace) -> tuple[list[Proposal], list[Row]]:
    """Proposes the settings of a run, from the rows; UserError where data, model or reward cannot be used."""
    _say(f"reading {args.data}")
    sources = read_sources(args.data, "DATA")
    rows = [row for source in sources for row in source.rows]
    check_names(args, rows)
    _say(f"reading config and tokenizer of {args.model}")
    _, cfg = hf.read_config(args.model, longest=1)
    columns = [*column_choices(args, rows)]
    _say("looking at this machine and its vLLM")
    device, limit = jax.local_devices()[0], cfg.max_position_embeddings
    parameters = memory.engine_bytes(cfg, "float32") / 4
    proposals = [
        Proposal("model.path", args.model, f"{cfg.family}, {parameters / 1e6:.3g}M parameters"),
        *file_choices(args.data, args.val, sources),
        *columns,
        *machine_choices(device, cfg, gpus() if device.platform == "gpu" else []),
        Proposal("trainer.run_dir", free_folder(args.data, args.algorithm), "files of the run, which resumes there"),
    ]
    _say(f"measuring {len(rows)} prompts")
    measured = [*proposals, *loosest_sizes(limit)]
    if args.agent and not any(proposal.name == "rollout.agent_format" for proposal in columns):  # it sends messages
        measured.append(Proposal("data.prompt_role", "user", ""))
    inputs = read_inputs(_make_settings(measured))
    adapters = [*adapter_choices(device, parameters, args.algorithm, args.lora)]
    lengths = [*length_choices(inputs, rows, limit, device.platform, bool(args.agent))]
    count = sum(length <= int(lengths[0].value) for length in prompt_lengths(inputs.train.prompts, bool(args.agent)))
    sizes = size_choices(max(1, count), device.platform, parameters, args.algorithm, bool(adapters))
    choices = [*proposals, *adapters, *lengths, *sizes]
    _say("checking the config")
    c = _make_settings(choices)
    read_inputs(c)
    if args.reward:
        pool = Pool(1, timeout_s=c.reward.timeout_s, memory_bytes=c.reward.memory_bytes)
        try:
            FunctionPart(args.reward, pool=pool, decode=inputs.tokenizer.decode)
        finally:
            pool.close()
    return choices, rows


def _say(stage: str) -> None:
    print(f"jppo.init: {stage}", file=sys.stderr, flush=True)


def loosest_sizes(limit: int) -> list[Proposal]:
    """Returns lengths and sizes by which every prompt that the model can read is read, to be measured."""
    sizes = {"data.max_prompt_length": limit - 1, "data.max_response_length": 1, "actor.max_tokens_per_device": limit}
    sizes |= {"data.train_batch_size": 1, "actor.ppo_mini_batch_size": 1}
    return [Proposal(name, value, "") for name, value in sizes.items()]


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Writes a config for the data, model and reward, and prints the next commands."""
    parser = Parser("jppo.init", __doc__)
    parser.add_argument("data", help="parquet, jsonl, json, csv or hub:NAME/SPLIT; several separated by commas")
    parser.add_argument("--val", default="", help="test prompts, in the same forms; default: the last rows of the data")
    parser.add_argument("--model", default=MODEL, help=f"model directory or hub name; default: {MODEL}")
    parser.add_argument("--reward", default="", help="FILE.py or FILE.py:NAME; default: the rules of data_source")
    parser.add_argument("--agent", default="", help="a program that plays the rows: FILE.py:FUNCTION or 'COMMAND'")
    parser.add_argument("--algorithm", default="ppo", choices=("ppo", "grpo"), help="with a critic, or without")
    parser.add_argument("--prompt_key", default="", help=f"column of the prompts; default: {', '.join(PROMPTS)}")
    parser.add_argument("--truth_key", default="", help="column of the ground truth, which the reward gets")
    parser.add_argument("--lora", action="store_true", help=f"train adapters of rank {RANK} in place of all weights")
    parser.add_argument("--out", default="config.py", help="the file to write; default: config.py")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    out = expanded(args.out)
    if out.exists():
        raise UserError(f"--out={out} is there already; remove it, or name another file")
    choices, rows = _choose_settings(args)
    text = render(choices, f"{args.algorithm.upper()} on {args.data}", out)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as e:
        raise UserError(f"--out={out} cannot be written ({e.strerror}); name another file") from e
    runpy.run_path(str(out))["get_config"]()
    print(escaped(text))
    for note in note_unread(rows, choices):
        print(escaped(f"Note: {note}\n"))
    run_dir = next(proposal.value for proposal in choices if proposal.name == "trainer.run_dir")
    folder, config = shlex.quote(str(run_dir)), shlex.quote(str(out))
    checked = "reward and agent" if args.agent else "the reward"
    print(f"{out} is written. Check {checked}, train, test the model and chat with it:\n")
    print(f"  python -m jppo.rewards.check --config={config}\n  python -m jppo.train --config={config}")
    print(f"  python -m jppo.evaluate --config={config} --model={folder}\n  python -m jppo.chat {folder}")


if __name__ == "__main__":
    main()
