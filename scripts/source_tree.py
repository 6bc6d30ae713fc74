"""Writes the source tree into docs/architecture.md, from the docstrings: python scripts/source_tree.py."""

import ast
import pathlib
import re
import textwrap
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/architecture.md"
FOLDERS = ("jppo", "configs", "examples", "scripts", "benchmarks")
SECTION = re.compile(r"(?<=^## The tree\n\n```\n).*?(?=^```$)", re.S | re.M)


def tree(folder: pathlib.Path, depth: int = 0) -> Iterator[str]:
    """Yields a line per Python file and shell script, with the first line of its description."""
    yield "  " * depth + f"{folder.name}/"
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        name = "  " * (depth + 1) + path.name
        if path.suffix == ".sh":
            yield _line(name, path.read_text(encoding="utf-8").splitlines()[1].removeprefix("# "))
        elif path.suffix == ".py" and path.name != "__init__.py":
            about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            yield _line(name, about.partition("\n")[0])
        elif path.is_dir() and not path.name.startswith(".") and not path.is_symlink() and any(path.rglob("*.py")):
            yield from tree(path, depth + 1)


def _line(name: str, about: str) -> str:
    name = f"{name:<28}"
    return f"{name} {textwrap.shorten(about, 155 - len(name), placeholder=' ...').rstrip('.')}"


def page() -> str:
    """Returns docs/architecture.md with the current tree."""
    lines = [line for name in FOLDERS for line in tree(ROOT / name)]
    return SECTION.sub(lambda _: "".join(f"{line}\n" for line in lines), PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
