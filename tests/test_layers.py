"""The rules of what may import what, held against the source of jppo and configs."""

import ast
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from jppo import plugins
from jppo.settings import table

ROOT = pathlib.Path(__file__).resolve().parents[1]

# The optional rooms. The core loads one by name (`jppo/plugins/__init__.py`); only commands import them.
PLUGINS = ("agents", "carriers", "critic_fit", "forecast", "judge", "loggers", "prove", "replay", "report")
PLUGINS += ("reward_models", "sandbox", "sglang", "tinker", "verl")
NEEDS = {"agents": ("sandbox",), "prove": ("report",), "verl": ("sandbox",)}  # what a plugin imports of others

ABOVE_COMMANDS = ("critic_fit", "forecast", "prove", "replay", "tinker")  # plugins that run commands

# A place may import the places of the rows above its own.
LAYERS = (
    ("errors", "user_files", "plugins"),
    ("registry", "traces"),
    ("types", "settings", "tensorheader", "child_process", "event_loop"),
    ("algorithms", "models", "statistics", "process", "distributed"),
    ("learner", "data", "runlog", "http_server"),
    ("rollout",),
    ("rewards",),
    ("plugins.sandbox",),
    ("samples", *(f"plugins.{name}" for name in PLUGINS if name not in ("sandbox", *ABOVE_COMMANDS))),
    (
        "run.tokenizer",
        "run.make",
        "run.inputs",
        "run.loop",
        "run.resume",
        "run.agreement",
        "run.supervised",
        "run.trained_model",
    ),
    ("check",),  # COMMANDS_BELOW
    ("preflight",),
    ("run",),
    ("train", "sft", "reward_model", "dpo", "evaluate", "sweep", "from_verl", "export", "chat", "serve"),
    ("doctor", "init", *(f"plugins.{name}" for name in ABOVE_COMMANDS)),
    ("tinker", "report", "plan", "critic_fit", "prove", "replay", "__main__"),
)
COMMANDS = tuple(place for row in LAYERS[-3:] for place in row if not place.startswith("plugins."))
LAYER = {place: i for i, row in enumerate(LAYERS, -2) for place in row}  # those below 0 are everybody's
# Commands that stand with what they look at.
COMMANDS_BELOW = ("jppo.data.check", "jppo.data.math", "jppo.rewards.check")

# Packages that few may import: a module, or all modules below a package.
ONLY_IN = {
    "vllm": ("jppo.plugins.carriers.weight_engine", "jppo.rollout.vllm.kept"),
    "torch": (
        "jppo.rollout.vllm.worker",
        "jppo.plugins.carriers.weight_engine",
        "jppo.plugins.reward_models.torch_worker",
        "jppo.preflight.parity_worker",
        "jppo.plugins.reward_models.convert_worker",
    ),
    "transformers": (
        "jppo.data.tokenizer",
        "jppo.data.template_worker",
        "jppo.rollout.vllm.worker",
        "jppo.plugins.reward_models.torch_worker",
        "jppo.preflight.parity_worker",
        "jppo.plugins.reward_models.convert_worker",
    ),
    "tensorflow": ("jppo.data",),
    "openai": ("jppo.plugins.judge.client",),
    "anthropic": ("jppo.plugins.judge.client",),
    "math_verify": ("jppo.rewards.rules",),
    "datasets": ("jppo.data.rows",),
    "tensorflow_datasets": ("jppo.data",),
    "wandb": ("jppo.plugins.loggers.remote",),
    "mlflow": ("jppo.plugins.loggers.remote",),
    "swanlab": ("jppo.plugins.loggers.remote",),
    "clearml": ("jppo.plugins.loggers.remote",),
    "trackio": ("jppo.plugins.loggers.remote",),
    "opentelemetry": ("jppo.traces",),
    "prometheus_client": ("jppo.runlog.sinks",),
    "orbax": ("jppo.runlog.checkpoint", "jppo.runlog.checkpoint_arrays"),
    "tensorboardX": ("jppo.runlog.sinks",),
    "h11": ("jppo.http_server", "jppo.rollout.servers.http_client"),
    "google": ("jppo.plugins.tinker.requests",),  # protobuf
    "ml_collections": (
        *("configs", "jppo.settings", "jppo.train", "jppo.sft", "jppo.reward_model", "jppo.dpo", "jppo.from_verl"),
        *("jppo.critic_fit", "jppo.plugins.prove.tasks", "jppo.plugins.replay.recompute"),
    ),
}
BY_VLLM = ONLY_IN["vllm"]  # imported only by vLLM itself
# TensorFlow can take the GPU when it is imported; vLLM and transformers cost seconds.
ONLY_IN_FUNCTIONS = {
    "vllm",
    "tensorflow",
    "datasets",
    "tensorflow_datasets",
    "openai",
    "anthropic",
    "math_verify",
    "wandb",
    "mlflow",
    "swanlab",
    "clearml",
    "trackio",
    "opentelemetry",
    "tensorboardX",
}

# All that a module may import of what is not jppo.
PURE = {"collections", "dataclasses", "functools", "math", "typing", "jax", "chex", "numpy"}
NO_MORE_THAN = {
    "jppo.algorithms": PURE,
    "jppo.statistics": PURE - {"jax", "chex"},
    "configs": {"ml_collections", "typing"},
    # what runs in vLLM's process, whose environment may have no more of jppo's dependencies
    "jppo.plugins.carriers.weight_engine": {*sys.stdlib_module_names, "torch", "vllm"},
    "jppo.rollout.vllm.worker": {*sys.stdlib_module_names, "numpy", "torch", "transformers"},
    "jppo.rollout.vllm.kept": {*sys.stdlib_module_names, "numpy", "vllm"},
    "jppo.rollout.vllm.layout": {*sys.stdlib_module_names, "numpy"},
    "jppo.plugins.carriers.transports": {*sys.stdlib_module_names},
    "jppo.plugins.reward_models.torch_worker": {*sys.stdlib_module_names, "torch", "transformers"},
    "jppo.plugins.reward_models.convert_worker": {*sys.stdlib_module_names, "torch", "transformers", "safetensors"},
    "jppo.preflight.parity_worker": {*sys.stdlib_module_names, "torch", "transformers"},
    # what runs in the processes of the pool
    "jppo.rewards.pool_worker": {*sys.stdlib_module_names},
    "jppo.child_process": {*sys.stdlib_module_names},
    "jppo.user_files": {*sys.stdlib_module_names},
    "jppo.rewards.earned": {*sys.stdlib_module_names},
    "jppo.plugins.sandbox.code": {*sys.stdlib_module_names},
    "jppo.plugins.sandbox": {*sys.stdlib_module_names, "numpy"},  # of values that cross
    "jppo.rewards.rules": {*sys.stdlib_module_names, "math_verify"},
    "jppo.rollout.servers.launch": {*sys.stdlib_module_names},
}
# Imported along with the worker, so they import nothing.
BARE = ("jppo", "jppo.rollout", "jppo.rewards", "jppo.preflight", "jppo.plugins.sandbox")
OF_ROOT = ("typing", "collections", "jppo.run.api.model")  # but `jppo.open` loads its module when it is called
# All that a module may import of jppo.
OF_JPPO = {
    "jppo.algorithms": ("jppo.types", "jppo.algorithms"),
    "jppo.statistics": (),
    "configs": ("jppo.settings", "jppo.errors"),
    "jppo.plugins.carriers.weight_engine": (
        "jppo.rollout.vllm.layout",
        "jppo.plugins.carriers.transports",
        "jppo.rollout.vllm.worker",
    ),
    "jppo.rollout.vllm.worker": ("jppo.rollout.vllm.layout",),
    "jppo.plugins.carriers.transports": ("jppo.rollout.vllm.layout",),
    "jppo.rollout.vllm.kept": (),
    "jppo.rollout.vllm.layout": (),
    "jppo.plugins.reward_models.torch_worker": (),
    "jppo.plugins.reward_models.convert_worker": (),
    "jppo.preflight.parity_worker": (),
    "jppo.rewards.pool_worker": (
        "jppo.child_process",
        "jppo.plugins",
        "jppo.rewards.earned",
        "jppo.rewards.rules",
        "jppo.user_files",
    ),
    "jppo.user_files": (),
    "jppo.rewards.earned": (),
    "jppo.plugins.sandbox.code": ("jppo.rewards.rules", "jppo.plugins.sandbox"),
    "jppo.plugins.sandbox": ("jppo.plugins.sandbox",),
    "jppo.rewards.rules": (),
    "jppo.rollout.servers.launch": (),
}
# Few modules read settings. All but pure rooms may take what commands need.
OF_COMMANDS = tuple(f"jppo.settings.{name}" for name in ("Parser", "exit_on_user_error", "natural"))
PURE_ROOMS = ("jppo.algorithms", "jppo.models", "jppo.learner")
MAKERS = (
    "jppo.learner.make",
    "jppo.learner.catalogue",
    "jppo.learner.auto_packing",
)  # of learner/, which read settings
READERS = (
    *("configs", "jppo.settings", "jppo.run", "jppo.preflight"),
    *(f"jppo.{command}" for command in COMMANDS),
    *(f"jppo.{room}.make" for room in ("rewards", "rollout", "rollout.servers", "runlog", "samples")),
    *(f"jppo.plugins.{name}.make" for name in ("agents", "judge", "reward_models", "sglang")),
    *(f"jppo.plugins.{name}" for name in ABOVE_COMMANDS),
    *("jppo.rewards.check", "jppo.plugins.report.page", "jppo.plugins.verl.translate", "jppo.plugins.verl.values"),
    *MAKERS,
)
LOADS = re.compile(r'plugins\.load\("([\w.]+)"\)(?:\.(\w+))?')
SECTIONS = {name.split(".")[0] for name in table.TABLE}
PLACES = {tuple(name.split(".")[-2:]) for name in table.TABLE}  # (section, setting)
# Files, engines and metrics deal in tokens and arrays; an engine that is a model itself is the exception.
NO_MODEL = ("jppo.data", "jppo.runlog", "jppo.rollout", "jppo.plugins.agents")
BUT = ("jppo.rollout.inprocess", "jppo.rollout.make", "jppo.rollout.servers.make", "jppo.rollout.publish")
# What training, or a loop on `jppo.open`, imports only where a setting or a switch asks for it.
OPTIONAL = tuple(f"jppo.plugins.{name}" for name in PLUGINS)
OPTIONAL += ("jppo.http_server", "jppo.preflight", "jppo.rollout.servers", "jppo.rollout.vllm")
LIGHT = ("jppo.preflight", "jppo.preflight.request")


class Import(NamedTuple):
    name: str  # dotted, with what is taken from it: jppo.UserError
    line: int
    in_function: bool


def within(name: str, place: str) -> bool:
    return name == place or name.startswith(f"{place}.")


def imports(source: str, module: str, is_package: bool = False) -> Iterator[Import]:
    """Every import in the source, also those by importlib with the name spelt out."""
    tree = ast.parse(source)
    package = module if is_package else module.rpartition(".")[0]

    def visit(node: ast.AST, in_function: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(a.name, node.lineno, in_function) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            up = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            yield from (Import(f"{base}.{a.name}", node.lineno, in_function) for a in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called in ("importlib.import_module", "import_module", "__import__"):
                yield Import(str(node.args[0].value), node.lineno, in_function)
        inner = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inner)

    return visit(tree, False)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What the rules have against the imports of a module, one sentence each."""
    if module.startswith("jppo.") and place_of(module) not in LAYER:
        return [f"{module} has no layer: give it one in LAYERS"]
    read = [] if any(within(module, reader) for reader in READERS) else reads(source)
    return [f"{module}:{line} reads {text}: it is none of READERS" for line, text in read] + [
        f"{module}:{found.line} imports {found.name}: {complaint}"
        for found in imports(source, module, is_package)
        for complaint in (against_jppo if within(found.name, "jppo") else against_others)(module, found)
    ]


def place_of(name: str) -> str:
    """The place of a module, or of something in it: the longest that has a layer."""
    parts = [*name.split("."), "", ""][1:3]
    return place if (place := ".".join(parts)) in LAYER else parts[0]


def against_jppo(module: str, found: Import) -> Iterator[str]:
    place, target = place_of(module), place_of(found.name)
    yield from against_plugins(module, found)
    if module in COMMANDS_BELOW:
        place = "check"
    elif any(within(found.name, command) for command in COMMANDS_BELOW) and place != "preflight":
        yield f"{found.name} is a command"
    if module in BARE and not (module == "jppo" and any(within(found.name, one) for one in OF_ROOT)):
        yield f"{module} must import nothing"
    # What is no place is a name of the root package, such as its version.
    within_room = place.split(".")[0] == target.split(".")[0]
    if place in LAYER and target in LAYER and LAYER[target] >= LAYER[place] + within_room:
        yield f"layer {LAYER[place]} may import only the layers above it"
    if target == "settings":
        yield from against_settings(module, found)
    if is_pure(module) and any(within(found.name, m) for m in MAKERS):
        yield "a pure room sees no maker"
    if any(within(module, p) for p in NO_MODEL) and module not in BUT and target in ("algorithms", "models"):
        yield f"jppo.{place} has nothing to do with models"
    which = max((rule for rule in OF_JPPO if within(module, rule)), key=len, default=None)
    if which is not None and not any(within(found.name, a) for a in OF_JPPO[which]):
        yield f"{which} may import of jppo only {', '.join(OF_JPPO[which]) or 'nothing'}"


def against_plugins(module: str, found: Import) -> Iterator[str]:
    """Yields a complaint about an import of a plugin, or of a private name by one."""
    own, other = plugin_of(module), plugin_of(found.name)
    if own and own != other and found.name.rpartition(".")[2].startswith("_"):
        yield "a plugin imports the core's public names"
    if other and other != own and other not in NEEDS.get(own, ()) and (own or place_of(module) not in COMMANDS):
        yield "only commands import a plugin; load it by name where a setting asks for it"


def plugin_of(name: str) -> str:
    """The plugin of a module, or of something in it; '' for the core."""
    return (
        name.split(".")[2]
        if within(name, "jppo.plugins") and name.count(".") > 1 and name.split(".")[2] in PLUGINS
        else ""
    )


def is_pure(module: str) -> bool:
    return any(within(module, p) for p in PURE_ROOMS) and module not in MAKERS


def against_settings(module: str, found: Import) -> Iterator[str]:
    if is_pure(module):
        yield "a pure room reads no settings"
    elif not any(within(module, reader) for reader in READERS) and found.name not in OF_COMMANDS:
        yield "it is none of READERS, which take settings; let the room's make.py hand values on"


def reads(source: str) -> Iterator[tuple[int, str]]:
    """Every `x.section.setting` of the source, and every `c.section`, also where the type of x is unknown."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Attribute(attr=section), attr=leaf) if (section, leaf) in PLACES:
                yield node.lineno, ast.unparse(node)
            case ast.Attribute(value=ast.Name(id="c" | "settings"), attr=section) if section in SECTIONS:
                yield node.lineno, ast.unparse(node)


def against_others(module: str, found: Import) -> Iterator[str]:
    top = found.name.split(".")[0]
    if module in BARE and not (module == "jppo" and any(within(found.name, one) for one in OF_ROOT)):
        yield f"{module} must import nothing"
    if top in ONLY_IN and not any(within(module, a) for a in ONLY_IN[top]):
        yield f"only {', '.join(ONLY_IN[top])} may"
    if top in ONLY_IN_FUNCTIONS and not found.in_function and module not in BY_VLLM:
        yield "only inside the function that needs it"
    for which, allowed in NO_MORE_THAN.items():
        if within(module, which) and top not in allowed:
            yield f"{which} may import nothing of the kind"


def sources() -> Iterator[tuple[str, pathlib.Path]]:
    for folder in ("jppo", "configs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield module.removesuffix(".__init__"), path


FILES = dict(sources())


@pytest.mark.parametrize("module", FILES)
def test_a_module_imports_only_what_its_place_allows(module):
    path = FILES[module]
    assert violations(path.read_text(), module, path.name == "__init__.py") == []


def test_a_command_loads_what_takes_seconds_only_where_it_needs_it():
    """A wrong setting is said in the time that JAX takes: what others import of these counts too."""
    commands = "jppo.train, jppo.sft, jppo.reward_model, jppo.evaluate, jppo.export, jppo.chat, jppo.sweep, jppo.doctor"
    code = f"import sys, {commands}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "jppo.doctor" in loaded and not loaded & {"torch", "transformers", "tensorboardX", "vllm", "wandb", "mlflow"}


@pytest.mark.parametrize("core", ["jppo.train", "jppo.sft", "jppo.reward_model", "jppo.dpo", "jppo.run.api.model"])
def test_optional_rooms_are_loaded_only_where_something_asks_for_them(core):
    code = f"import sys, {core}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if any(within(name, room) for room in OPTIONAL)}
    # The training of a reward model reads texts as a run's reward model does.
    room = "jppo.plugins.reward_models"
    texts = {room, f"{room}.classifier", f"{room}.model"} if core == "jppo.reward_model" else set()
    assert loaded <= {*LIGHT} | texts


def test_to_import_jppo_loads_nothing_else():
    code = "import sys, typing; before = {*sys.modules}; import jppo; print(*{*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in done.stdout.split()} <= {"jppo", "collections"}


def test_the_modules_that_rules_name_are_there():
    tables = (*ONLY_IN.values(), NO_MORE_THAN, BARE, OF_JPPO, MAKERS, NO_MODEL, BUT)
    tables += (PURE_ROOMS, COMMANDS_BELOW, BY_VLLM, READERS, OPTIONAL)
    named = {name for table in tables for name in table} | {f"jppo.{place}" for row in LAYERS for place in row}
    assert {name for name in named - {"jppo.check"} if name not in FILES} == {"configs"}
    assert {name.split(".")[2] for name in FILES if name.startswith("jppo.plugins.")} == {*PLUGINS}


def test_what_is_loaded_by_name_is_there():
    loads = [found for path in FILES.values() for found in LOADS.findall(path.read_text())]
    assert len(loads) > 10
    for module, name in loads:
        assert hasattr(plugins.load(module), name) if name else plugins.load(module), module


def test_the_walk_sees_the_project():
    found = {(m, i.name) for m, path in FILES.items() for i in imports(path.read_text(), m, path.stem == "__init__")}
    assert ("jppo.runlog.checkpoint", "orbax.checkpoint") in found
    assert ("jppo.rollout.vllm.worker", "jppo.rollout.vllm.layout") in found
    assert ("configs.gsm8k", "jppo.settings") in found


@pytest.mark.parametrize(
    "module, source, complaint",
    [
        ("jppo.types", "from jppo import settings as config", "layer 0 may import only"),
        ("jppo.models.heads", "from jppo.algorithms import masked", "layer 1 may import only"),
        ("jppo.models.heads", "import jppo.learner.packing", "layer 1 may import only"),
        ("jppo.rollout.vllm.client", "from jppo.models import hf", "jppo.rollout has nothing to do with models"),
        ("jppo.rollout.inprocess", "from jppo.models import decoder", None),
        ("jppo.learner.ppo", "from ..data import files", "layer 2 may import only"),
        ("jppo.learner.ppo", "def f():\n    from jppo import train", "layer 2 may import only"),
        ("jppo.statistics", "import jax", "may import nothing of the kind"),
        ("jppo.run.resume", "from jppo.run.inputs import Inputs", None),
        ("jppo.run.resume", "from jppo.run.start import Run", "layer 7 may import only"),
        ("jppo.train", "from jppo import sft", "layer 11 may import only"),
        ("jppo.train", "from jppo.data import check", "jppo.data.check is a command"),
        ("jppo.preflight.models_and_data", "from jppo.data import check", None),
        ("jppo.learner.ppo", "from jppo.errors import UserError", None),
        ("jppo.learner.make", "from jppo.settings import Settings", None),
        ("jppo.learner.ppo", "from jppo.settings import Settings", "a pure room reads no settings"),
        ("jppo.learner.ppo", "from jppo import settings", "a pure room reads no settings"),
        ("jppo.learner.ppo", "from jppo.learner.make import plan_rows", "a pure room sees no maker"),
        ("jppo.learner.ppo", "from jppo.learner import make", "a pure room sees no maker"),
        ("jppo.models.heads", "def f(given):\n    return given.actor.clip_ratio", "reads given.actor.clip_ratio"),
        ("jppo.algorithms.losses", "def f(c):\n    a = c.actor\n    return a.clip_ratio", "reads c.actor"),
        ("jppo.learner.make", "def f(c):\n    return c.actor.lr", None),
        ("jppo.rewards.pool", "from jppo.settings import Settings", "it is none of READERS"),
        ("jppo.rewards.pool", "def f(c):\n    return c.reward.workers", "reads c.reward.workers"),
        ("jppo.rewards.make", "from jppo.settings import Settings\ndef f(c):\n    return c.reward.workers", None),
        ("jppo.data.aime", "from jppo.settings import exit_on_user_error", None),
        ("jppo.learner.ppo", "from ml_collections import ConfigDict", "only configs, jppo.settings"),
        ("jppo.strange", "", "has no layer"),
        ("jppo.run.inputs", "def f():\n    from jppo.plugins.agents import make", "only commands import a plugin"),
        ("jppo.run.inputs", "from jppo import plugins", None),
        ("jppo.sweep", "from jppo.plugins.report import write_report", None),
        ("jppo.plugins.judge.judge", "from jppo.plugins.agents import make", "only commands import a plugin"),
        ("jppo.plugins.judge.judge", "from jppo.rewards.parts import _split_into_blocks", "the core's public names"),
        ("jppo.plugins.verl.overrides", "from jppo.plugins.sandbox import shell", None),
        ("jppo.algorithms.kl", "import flax", "may import nothing of the kind"),
        ("jppo.algorithms.kl", "import jax.numpy as jnp", None),
        ("jppo.rollout.servers.member", "def f():\n    import vllm", "jppo.rollout.vllm.kept may"),
        ("jppo.rollout.vllm.worker", "import vllm", "only inside the function"),
        ("jppo.plugins.carriers.weight_engine", "from vllm import LLM", None),
        ("jppo.rollout.vllm.worker", "from jppo.types import Prompt", "only jppo.rollout.vllm.layout"),
        ("jppo.rollout.vllm.layout", "from jppo.rollout import protocol as sampler", "may import of jppo only nothing"),
        ("jppo.data.rows", "def f():\n    import tensorflow_datasets as tfds", None),
        (
            "jppo.data.prompts",
            "import torch",
            "jppo.preflight.parity_worker, jppo.plugins.reward_models.convert_worker may",
        ),
        (
            "jppo.data.prompts",
            "import importlib\nimportlib.import_module('torch')",
            "only jppo.rollout.vllm.worker",
        ),
        ("configs.gsm8k", "from jppo import run", "configs may import of jppo only jppo.settings, jppo.errors"),
        ("jppo.rollout", "from jppo.rollout.vllm.client import start_vllm", "jppo.rollout must import nothing"),
        ("jppo.rollout.servers.member", "from jppo import __version__", None),
    ],
)
def test_the_rules_see_what_breaks_them_and_nothing_else(module, source, complaint):
    found = violations(source, module)
    if complaint is None:
        assert found == []
    else:
        assert [f for f in found if complaint in f], found
