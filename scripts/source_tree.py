"""Writes the source tree into docs/architecture.md, from the docstrings: python scripts/source_tree.py."""

import ast
import pathlib
import re
import textwrap
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/architecture.md"
SECTION = re.compile(r"(?<=^## The tree\n\n```\n).*?(?=^```$)", re.S | re.M)


def packages() -> Iterator[str]:
    """Yields each package of the core with the first line of its description; the names of plugins and of commands."""
    for init in sorted((ROOT / "jppo").rglob("__init__.py")):
        folder = init.parent
        if "plugins" in folder.parent.relative_to(ROOT).parts:
            continue
        yield f"{f'{folder.relative_to(ROOT)}/':<26} {_about(init)}"
        inner = {"jppo": folder.glob("*.py"), "plugins": (path.parent for path in folder.glob("*/__init__.py"))}
        names = ", ".join(path.stem for path in sorted(inner.get(folder.name, ())) if path != init)
        yield from textwrap.wrap(names, 132, initial_indent="    ", subsequent_indent="    ")


def _about(path: pathlib.Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0].rstrip(".")


def page() -> str:
    """Returns docs/architecture.md with the current tree."""
    return SECTION.sub(lambda _: "".join(f"{line}\n" for line in packages()), PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
