"""Shell scripts run for what they start: under bash, confined, with stand-ins for all programs but a few text tools.

The script sees copies of the small files around it, an empty home, the variables that it names, without secrets, and a
machine with eight GPUs. What it starts is recorded and succeeds. Read `run_script` first.
"""

import dataclasses
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence

from jppo.plugins.sandbox import choice, launcher
from jppo.plugins.sandbox.child import FOLDER, REPLIES_FD

_RUN_S = 12.0
HIDDEN = "hidden-from-the-script"  # in place of secrets of the environment
_MEMORY = 2**30
_FILE_BYTES, _ALL_BYTES, _FILES = 2**17, 2**25, 3000  # limits of the copied files: of one, of all, their number
_REAL_TOOLS = (
    "awk base64 basename bash bc cat cmp column comm cut date diff dirname echo egrep env expr false fgrep find fold"
    " getopt grep head join jq ls md5sum mktemp nl nohup nproc paste printf pwd readlink realpath rev sed seq sha256sum"
    " shuf sort stat tac tail tee test timeout tr true uname uniq wc xargs ["
)
_LENIENT_TOOLS = "cp ln mkdir mv rm touch"  # real, and succeed
_STAND_INS = (
    "accelerate apt-get conda curl deepspeed git hf huggingface-cli ifconfig ip kill lsof nc ninja npu-smi nsys numactl"
    " nvcc nvidia-smi pgrep pip pip3 pkill ps python python3 ray rocm-smi sbatch scontrol sleep source srun ssh sudo"
    " setsid taskset torchrun uv wandb wget which"
)
_HEAD = f"""#!/bin/bash -p
known() {{  # a word with the variables of the environment that Hydra reads
  known=$1; [[ $1 = *'${{oc.env:'* ]] || return
  local rest=$1 text="" env='\\$\\{{oc\\.env:([A-Za-z_][A-Za-z_0-9]*) *(,[^{{}}]*)?\\}}'
  while [[ $rest =~ $env ]]; do
    local all=${{BASH_REMATCH[0]}} name=${{BASH_REMATCH[1]}} value=""
    [[ $(declare -p "$name" 2>/dev/null) = "declare -x"* ]] && value=${{!name}} || value=$all
    text+=${{rest%%"$all"*}}$value rest=${{rest#*"$all"}}
  done
  known=$text$rest
}}
put() {{ known "$1"; local a=${{known//\\\\/\\\\\\\\}}; printf '%s %s\\n' "$$" "${{a//$'\\n'/\\\\n}}" >&{REPLIES_FD}; }}
"""
_STAND_IN = f"""{_HEAD}
[ "${{0##*/}}" = stand-in ] || set -- "${{0##*/}}" "$@"
for word in "$PWD" "$@"; do put "$word"; done
printf '%s\\n' "$$" >&{REPLIES_FD}
program=${{1##*/}}; shift
case $program in
  python*)
    while [ $# -gt 0 ]; do
      case $1 in
        -c) shift; exec PYTHON -I -S FOLDER/snippet.py "$@" ;;
        -) break ;;
        -m) exit 0 ;;
        -V|--version) echo Python 3.11.0; exit 0 ;;
        -[WX]) shift 2 ;;
        -*) shift ;;
        *) exit 0 ;;
      esac
    done
    exec PYTHON -I -S FOLDER/snippet.py ;;
  nvidia-smi)
    case "$*" in
      -L|--list-gpus|*query-gpu=*) for i in 0 1 2 3 4 5 6 7; do echo "NVIDIA H100 80GB HBM3"; done ;;
    esac ;;
  hostname) echo localhost ;;
  which) command -v "$@" ;;
  *)
    while [ $# -gt 0 ]; do
      case $1 in
        bash|sh|*/bash|*/sh) shift; exec bash "$@" ;;
      esac
      shift
    done ;;
esac
exit 0
"""
_SNIPPET = f"""
import os, sys
sys.path[0] = "{FOLDER}/stubs"
code = sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read()
sys.argv[:2] = ["-c"]
try:
    exec(compile(code, "<string>", "exec"), {{"__name__": "__main__"}})
except ImportError as e:
    for word in (os.getcwd(), "import", e.name or str(e)):
        os.write({REPLIES_FD}, f"{{os.getpid()}} {{word}}\\n".encode())
    os.write({REPLIES_FD}, f"{{os.getpid()}}\\n".encode())
    raise
"""
_DEVICE = "def get_device_name():\n    return 'cuda'\n\n\nis_cuda_available, is_npu_available = True, False\n"
_TORCH = """
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 8)
    get_device_capability = staticmethod(lambda *_: (9, 0))
    get_device_name = staticmethod(lambda *_: "NVIDIA H100 80GB HBM3")
"""
_PRELUDE = """command_not_found_handle() { FOLDER/bin/stand-in "$@"; }
ulimit() { :; }
"""
_PROGRAM = re.compile(r"(?<![\w.~/-])[\w.~/-]*/(?:python[\d.]*|torchrun|ray|accelerate|uv)(?![\w./-])")
_SECRET = re.compile(r"key|token|secret|passw|credential|auth|cookie|private|webhook|dsn|_pat$|_pw$", re.I)
_SECRET_VALUE = re.compile(r"^(sk-|hf_|gh[pousr]_|glpat-|xox|AKIA|eyJ)|-----BEGIN|://[^/@\s]+@")
_RESET = {"PATH", "HOME", "PWD", "OLDPWD", "SHLVL", "BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS", "IFS", "PS4", "TMPDIR"}


@dataclasses.dataclass(frozen=True)
class ScriptRun:
    """What a script started, each with its folder, program and arguments, and how it ended."""

    calls: tuple[tuple[str, ...], ...]
    status: int | None  # None if it was stopped, for the reason `why`
    why: str
    printed: str  # then its errors
    asks: bool  # it has read its standard input
    root: str  # the checkout of the script, or its folder
    text: str  # the script's


def run_script(path: str, arguments: Sequence[str], environment: Mapping[str, str]) -> ScriptRun:
    """Runs a script as bash would in the working directory; raises NoSandbox where it cannot be confined."""
    guards = choice.probe()
    bash = shutil.which("bash", path=os.defpath)
    if fault := choice.lacks(guards) or ("" if bash else "there is no bash"):
        raise launcher.NoSandbox(fault)
    assert bash is not None
    file, working_dir = pathlib.Path(path).resolve(), pathlib.Path.cwd()
    root = _root_of(file)
    script = file.read_bytes()
    text = script.decode("utf-8", errors="replace")
    files, links, read = _sandbox_files(file, root, script, text, bash)
    in_checkout = working_dir.is_relative_to(root)
    variables = _script_variables(environment, text) | {
        "HOME": f"{FOLDER}/home",
        "PWD": f"{FOLDER}/tree/{working_dir.relative_to(root)}".removesuffix("/.") if in_checkout else f"{FOLDER}/cwd",
        "PATH": f"{FOLDER}/bin",
        "BASH_ENV": f"{FOLDER}/prelude",
        "TMPDIR": FOLDER,
    }
    result = launcher.run_command(
        [bash, f"{FOLDER}/tree/{file.relative_to(root)}", *arguments],
        files=files,
        links=links,
        environment=variables,
        read=read,
        guards=guards,
        time_s=_RUN_S,
        memory_bytes=_MEMORY,
        stdin="\n",
    )
    box, *lines = result.replies or ("",)
    home = environment.get("HOME", str(pathlib.Path.home()))
    host_paths = {f"{box}/tree": str(root), f"{box}/home": home, f"{box}/cwd": str(working_dir)}
    calls = tuple(tuple(_with_host_paths(word, host_paths) for word in call) for call in _parse_calls(lines))
    printed = _with_host_paths(f"{result.printed}\n{result.errors}", host_paths)
    return ScriptRun(calls, result.status, result.why, printed, result.input_bytes > 0, str(root), text)


def _root_of(file: pathlib.Path) -> pathlib.Path:
    """Returns the checkout of a script, or its folder."""
    home = pathlib.Path.home()
    for folder in file.parents:
        if home.is_relative_to(folder):
            break
        if any((folder / name).exists() for name in (".git", "pyproject.toml", "setup.py")):
            return folder
    return file.parent


def _sandbox_files(
    file: pathlib.Path, root: pathlib.Path, script: bytes, text: str, bash: str
) -> tuple[dict[str, bytes], dict[str, str], list[str]]:
    """Returns the files and links of the script's world, and the programs that it may read."""
    python = os.path.realpath(sys.executable)
    stand_in = _STAND_IN.replace("PYTHON", python).replace("FOLDER", FOLDER)
    prelude = _PRELUDE.replace("FOLDER", FOLDER)
    for name in set(_PROGRAM.findall(text)):  # programs that are named by their paths
        prelude += f'function {name} {{ {FOLDER}/bin/stand-in "{name.rpartition("/")[2]}" "$@"; }}\n'
    files = {
        "home/": b"",
        "cwd/": b"",
        "bin/stand-in": stand_in.encode(),
        "bin/sh": b'#!/bin/bash -p\nexec bash "$@"\n',
        "prelude": prelude.encode(),
        "snippet.py": _SNIPPET.encode(),
        "stubs/torch.py": _TORCH.encode(),
        "stubs/verl/utils/device.py": _DEVICE.encode(),
        f"tree/{file.relative_to(root)}": script,
    }
    links = {f"bin/{name}": "stand-in" for name in _STAND_INS.split()}
    read = [python, bash, "/bin/bash", "/usr/bin/bash", "/bin/sh", "/usr/bin/sh", "/usr/bin/env"]
    read += [path for path in ("/bin",) if os.path.islink(path)]
    for name in (*_REAL_TOOLS.split(), *_LENIENT_TOOLS.split()):
        if tool := shutil.which(name, path=os.defpath):
            links[f"{'real' if name in _LENIENT_TOOLS.split() else 'bin'}/{name}"] = os.path.realpath(tool)
            read.append(os.path.realpath(tool))
    for name in _LENIENT_TOOLS.split():
        files[f"bin/{name}"] = f'#!/bin/bash -p\n{FOLDER}/real/{name} "$@" 2>/dev/null\nexit 0\n'.encode()
    for name, path in _files_to_copy(file, root):
        files.setdefault(f"tree/{name}", path.read_bytes() if path.is_file() else b"")
    return files, links, read


def _files_to_copy(file: pathlib.Path, root: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    """Yields the small files and the folders around a script, its own folder's first; nothing of a home folder."""
    if pathlib.Path.home().is_relative_to(root):
        return
    size = count = seen = 0
    for start in dict.fromkeys((file.parent, root)):
        for folder_path, folders, names in os.walk(start):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in (*folders, *sorted(names)):
                path = pathlib.Path(folder_path, name)
                if (seen := seen + 1) > 10 * _FILES:
                    return
                if name.startswith(".") or path.is_symlink() or not (path.is_dir() or path.is_file()):
                    continue
                length = path.stat().st_size if path.is_file() else 0
                if length > _FILE_BYTES or not os.access(path, os.R_OK):
                    continue
                size, count = size + length, count + 1
                if size > _ALL_BYTES or count > _FILES:
                    return
                yield str(path.relative_to(root)) + ("/" if path.is_dir() else ""), path


def _script_variables(environment: Mapping[str, str], text: str) -> dict[str, str]:
    """Returns the variables that the script names, without secrets."""
    words = set(re.findall(r"\w+", text))
    variables = {}
    for name, value in environment.items():
        if (name in words or name in ("USER", "LANG")) and name not in _RESET and not name.startswith(("LD_", "BASH_")):
            variables[name] = HIDDEN if value and (_SECRET.search(name) or _SECRET_VALUE.search(value)) else value
    return variables


def _with_host_paths(text: str, host_paths: Mapping[str, str]) -> str:
    """Returns a text with the paths of the host in place of the sandbox's."""
    for inside, outside in host_paths.items():
        text = re.sub(re.escape(inside) + r"(?![\w.-])", outside.replace("\\", r"\\"), text)
    return text


def _parse_calls(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yields the recorded commands."""
    unfinished: dict[str, list[str]] = {}
    for line in lines:
        process, blank, word = line.partition(" ")
        if blank:
            word = re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], word, flags=re.S)
            unfinished.setdefault(process, []).append(word)
        elif len(call := unfinished.pop(process, [])) > 1:
            yield call
