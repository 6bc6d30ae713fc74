"""The config of a trainer of verl's: the YAML of its checkout, composed as Hydra does; else verl's own, by name."""

import os.path
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from jppo.errors import UserError

_ASYNC = {
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 8,
    "algorithm.rollout_correction.bypass_mode": True,
}
_DAPO = {"reward.reward_manager.name": "dapo", "trainer.project_name": "verl-dapo"}
_FULLY = {
    **_ASYNC,
    "async_training.staleness_threshold": 0.1,
    "async_training.trigger_parameter_sync_step": 4,
    "async_training.require_batches": 1,
    "async_training.partial_rollout": True,
}
# verl's own configs by name: what they change of ppo_trainer's.
_PPO: dict[str, dict[str, Any]] = {
    "ppo_trainer": {},
    "dapo_trainer": _DAPO,
    "one_step_off_ppo_trainer": _ASYNC | {"actor_rollout_ref.rollout.free_cache_engine": False},
    "fully_async_ppo_trainer": _FULLY,
    "transfer_queue_ppo_trainer": {},
    "dapo_transfer_queue_trainer": _DAPO,
}
OWN = _PPO | {
    re.sub("(ppo|dapo)_", r"\1_megatron_", name, count=1): values | {"model_engine": "megatron"}
    for name, values in _PPO.items()
}
OWN |= {name: {} for name in ("sft_trainer", "sft_trainer_engine", "partial_rollout_trainer")}
# The main modules that are translated, by their last two words, and the config that each reads by default.
MAINS = {
    "trainer.main_ppo": "ppo_trainer",
    "trainer.main_ppo_sync": "ppo_trainer",
    "transfer_queue.main_ppo": "transfer_queue_ppo_trainer",
    "dapo.main_dapo": "dapo_trainer",
    "src.main_dapo": "dapo_trainer",  # recipe.dapo.src, until 0.4
    "dapo_transfer_queue.main_dapo": "dapo_transfer_queue_trainer",
    "one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    "fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
}
TUNING = {
    "trainer.sft_trainer": "sft_trainer_engine",
    "trainer.sft_trainer_ray": "sft_trainer_engine",
    "trainer.fsdp_sft_trainer": "sft_trainer",
}
_GROUPS = (  # of verl's own YAML
    *(
        "actor",
        "algorithm",
        "critic",
        "data",
        "distillation",
        "engine",
        "model",
        "model_engine",
        "npu_profile",
        "optim",
    ),
    *("profiler", "ref", "reward", "reward_model", "rollout", "transfer_queue"),
)
_FILE_BYTES = 2**22
_FLOAT = re.compile(r"[+-]?(\d[\d_]*\.?[\d_]*|\.[\d_]+)[eE][+-]?\d+")  # a number to Hydra, a text to PyYAML
_DECORATED = re.compile(r"""config_(name|path)=["']([\w./-]+)["']""")
Setting = tuple[str, Any, bool]  # key, value, whether it is in the tables: of a config of verl's own by its name


def main_of(module: str) -> str:
    """Returns the last two words of a main module, by which it is known."""
    return ".".join(module.split(".")[-2:])


def verl_of(root: str, folder: str) -> pathlib.Path | None:
    """Returns the sources of verl in a checkout, or None."""
    for place in dict.fromkeys((folder, root)):
        for pattern in ("verl", "*/verl", "*/*/verl") if place else ():
            for path in sorted(pathlib.Path(place).glob(pattern)):
                if (path / "trainer/ppo/ray_trainer.py").is_file():
                    return path
    return None


def find_homes(main: str, root: str, folder: str) -> list[pathlib.Path]:
    """Returns the folders in which a main module may be: of the folder where it starts, as for Python, and its root."""
    parts = main.split(".")[:-1]
    return [pathlib.Path(place, *words) for place in (folder, root) for words in (parts, parts[1:]) if parts]


def find_main(main: str, root: str, folder: str) -> pathlib.Path | None:
    """Returns the file of a main module, or None where it is not in its checkout."""
    files = (home / f"{main.rpartition('.')[2]}.py" for home in find_homes(main, root, folder))
    return next((file for file in files if file.is_file()), None)


class Config:
    """The settings of a trainer's config, from the YAML files that Hydra would read."""

    def __init__(self, options: Mapping[str, str], choices: Mapping[str, str], main: str, root: str, folder: str):
        """Takes Hydra's options, the choices of files by group, the main module, its checkout and where it starts."""
        self._given = dict(choices)
        self.found = set[str]()  # groups whose chosen files exist
        self._chosen: dict[str, str] = {}
        self._folder = pathlib.Path(folder or ".")
        homes, file = find_homes(main, root, folder), find_main(main, root, folder)
        source = read_file(file) if file else ""
        decorator = source.partition("hydra.main(")[2][:200]
        named = {f"--config-{key}": value for key, value in _DECORATED.findall(decorator)}
        options = {"--config-name": (MAINS | TUNING).get(main_of(main), "ppo_trainer"), **named, **options}
        self._name = options["--config-name"].removesuffix(".yaml").removesuffix(".yml")
        path = options.get("--config-path", "config")
        self._folders = [self._folder / options["--config-dir"]] if "--config-dir" in options else []
        homes = [home / path for home in (*homes, self._folder)] if main or "--config-path" in options else []
        self._folders += [pathlib.Path(path)] if path.startswith("/") else homes
        # verl's recipes are a repository of their own, which is recipe/ in one of verl
        self._folders += [pathlib.Path(str(f).replace("/recipe/", "/")) for f in self._folders if "/recipe/" in str(f)]
        if main and (verl := verl_of(root, folder)):
            self._folders.append(verl / "trainer" / "config")

    def settings(self) -> Iterator[Setting]:
        """Yields the settings; a later one counts more."""
        yield from self._file(self._name, "", ())

    def _file(self, path: str, package: str, parents: tuple[str, ...]) -> Iterator[Setting]:
        """Yields the settings of a file, by its path without .yaml, and of the files in its `defaults`."""
        file = next((file for one in self._folders if (file := one / f"{path}.yaml").is_file()), None)
        if file is None:
            if path in OWN:
                yield from ((key, value, True) for key, value in OWN[path].items())
            elif path.split("/")[0] not in _GROUPS:
                first = self._folders[0] if self._folders else self._folder
                raise UserError(
                    f"{path}.yaml, which the trainer reads, is not in {first}; put it there, or give its settings"
                )
            return
        text = read_file(file)
        try:
            tree = yaml.safe_load(text) or {}
        except yaml.YAMLError as e:
            raise UserError(f"{file}: not YAML that can be read: {str(e).partition(chr(10))[0]}") from e
        if not isinstance(tree, dict) or path in parents:
            raise UserError(f"{file}: not a config of Hydra's: it must be a mapping that does not include itself")
        hydra = tree.pop("hydra", None)
        for place in (hydra.get("searchpath") or []) if isinstance(hydra, dict) else []:
            if str(place).startswith("file://"):
                self._folders.append(self._folder / str(place).removeprefix("file://"))
        defaults = tree.pop("defaults", None) or []
        defaults.sort(key=lambda entry: not str(entry).startswith("{'override"))
        for entry in defaults if "_self_" in defaults else [*defaults, "_self_"]:
            if entry == "_self_":
                inside = "" if re.search(r"(?m)^# *@package +_global_", text) else f"{package}." if package else ""
                for key, value in tree.items():
                    yield from ((leaf, one, False) for leaf, one in flatten(f"{inside}{key}", value).items())
            else:
                yield from self._included(entry, os.path.dirname(path), package, (*parents, path))

    def _included(self, entry: Any, home: str, package: str, parents: tuple[str, ...]) -> Iterator[Setting]:
        """Yields the settings of the files that an entry of `defaults` names, in a file of the folder `home`."""
        group, choice = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
        if not group and "@" in str(choice):
            choice, _, place = choice.partition("@")
            group = f"@{place}"
        *words, group = str(group).split() or [""]
        group, at, place = group.partition("@")
        inner = place if at else group.strip("./").replace("/", ".")
        inner = package if inner in ("", "_here_") else "" if inner == "_global_" else f"{package}.{inner}".strip(".")
        group = os.path.normpath(group[1:] if group.startswith("/") else os.path.join(home, group)) if group else home
        if "override" in words:  # of files before and after it
            self._given.setdefault(group, str(choice))
            return
        for key in (f"{group}@{inner}", group):
            if group != home and key in self._given:
                choice = self._given[key]
                self.found.add(key)
                break
        for one in choice if isinstance(choice, list) else [choice]:
            if one is None or words[:1] == ["optional"]:
                continue
            name = re.sub(r"\$\{(\w+)\}", lambda match: self._chosen.get(match[1], match[0]), str(one))
            self._chosen[group] = name = name.removesuffix(".yaml")
            yield from self._file(os.path.join(group, name), inner, parents)


def flatten(key: str, value: Any) -> dict[str, Any]:
    """Flattens a dict to dotted keys."""
    if not isinstance(value, dict) or not value:
        return {key: float(value) if isinstance(value, str) and _FLOAT.fullmatch(value) else value}
    return {k: v for name, inner in value.items() for k, v in flatten(f"{key}.{name}", inner).items()}


def read_file(path: pathlib.Path) -> str:
    """Returns the text of a file; raises UserError for one that is none, or not of a script's size."""
    try:
        if not path.is_file():
            raise UserError(f"{path}: {'no file, but a device or a folder' if path.exists() else 'no such file'}")
        if path.stat().st_size > _FILE_BYTES:
            raise UserError(f"{path}: larger than {_FILE_BYTES >> 20} MiB, which no script or config is")
        data = path.read_bytes()
    except OSError as e:
        raise UserError(f"{path}: {e.strerror}") from e
    start = data[:400]
    if start[:2] in (b"\xff\xfe", b"\xfe\xff") or max(start[::2].count(0), start[1::2].count(0)) > len(start) // 4:
        raise UserError(f"{path}: it is UTF-16, which bash does not read; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")
