"""Users' Python files as modules: one module per file, whatever its name and however many settings name it.

A file that Python finds by its plain name is that module. Any other is a module of the package 'file:FOLDER', so that
equal names in two folders, and names of the standard library, do not collide. It imports files of its own folder first,
as a script does, but for the standard library. A process that has imported this module finds the others by name, which
pickle needs.
"""

import builtins
import functools
import importlib
import importlib.util
import pathlib
import re
import symtable
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any, NoReturn

_FOLDER = "file:"
_DOT = "\N{ONE DOT LEADER}"  # stands for a dot of a path, which in a module's name begins a submodule
_NOT_OF_FOLDERS = {*sys.stdlib_module_names, "__main__", "jppo"}
_DEFINING = ("exec", "globals", "locals", "vars", "setattr", "eval")
_STAR = re.compile(r"import\s*\(?\s*\*")
_plain: dict[str, str] = {}  # files that Python finds by their plain names, by those
_loaded: dict[str, int | str] = {}  # by module: the file's time of change, or the text that was run
_sources: dict[str, str] = {}  # by file: texts that are run in place of the file's
_packages: dict[str, None] = {}  # whose modules have plain names, too; in order


def load(path: pathlib.Path, source: str | None = None) -> ModuleType:
    """Returns the file's module, which runs once, and again after a change.

    With a `source`, as in a process of its own, this text runs, and libraries find the folder's files by plain names.
    """
    path = path.resolve()
    package = _package(path.parent)
    name = f"{package}.{_escaped(path.stem)}"
    if name not in sys.modules and _found(path.stem) == str(path):
        name = path.stem
        _plain[name] = str(path)
    if source is not None:
        _sources[str(path)] = source
        _packages[package] = None
    version = path.stat().st_mtime_ns if source is None else source
    if _loaded.setdefault(name, version) != version:
        sys.modules.pop(name, None)
        _loaded[name] = version
    _of_folder.cache_clear()
    return importlib.import_module(name)


def names_in(text: str, path: str) -> list[str] | None:
    """Returns the names that a file defines, without running it; None if it may define others when it runs.

    Raises SyntaxError.
    """
    top = symtable.symtable(text, path, "exec")
    there, tables = {}, [top]
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_referenced() and symbol.get_name() in _DEFINING:
                return None
            if (table is top or symbol.is_declared_global()) and (symbol.is_assigned() or symbol.is_imported()):
                there[symbol.get_name()] = True
    return None if "__getattr__" in there or _STAR.search(text) else list(there)


def _package(folder: pathlib.Path) -> str:
    return _escaped(f"{_FOLDER}{folder}")


def _escaped(text: str) -> str:
    return text.replace(".", _DOT)


def _found(name: str) -> str | None:
    """Returns the file that Python finds by a plain name, '' for a folder without one; None for nothing."""
    if name in _NOT_OF_FOLDERS or "." in name:
        return None
    if name in sys.modules:
        spec = sys.modules[name].__spec__
    else:
        others = (finder.find_spec(name, None) for finder in sys.meta_path if not isinstance(finder, _Siblings))
        spec = next(filter(None, others), None)
    return None if spec is None else str(pathlib.Path(spec.origin).resolve()) if spec.origin else ""


class _Finder(MetaPathFinder):
    """Finds the packages of folders, and the files and folders in them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a module of a user's file or folder; None for any other."""
        if fullname in _plain:
            loader = _UserFile(fullname, _plain[fullname])
            return importlib.util.spec_from_file_location(fullname, _plain[fullname], loader=loader)
        if not fullname.startswith(_FOLDER):
            return None
        package, _, name = fullname.rpartition(".")
        if not package or path is None:
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [fullname.removeprefix(_FOLDER).replace(_DOT, ".")]
            return spec
        here = pathlib.Path(path[0], name.replace(_DOT, "."))
        for file, inside in ((here / "__init__.py", [str(here)]), (here.with_name(f"{here.name}.py"), None)):
            if getattr(sys.modules.get(name), "__file__", None) == str(file):  # Python has found it
                return ModuleSpec(fullname, _Alias(name), origin=str(file))
            if file.is_file() or str(file) in _sources:
                loader = _UserFile(fullname, str(file))
                return importlib.util.spec_from_file_location(
                    fullname, file, loader=loader, submodule_search_locations=inside
                )
        return PathFinder.find_spec(fullname, path)  # a folder without __init__.py, or an extension module


class _Siblings(MetaPathFinder):
    """Finds a plain name that nothing else has in the packages, for pickles and imports by libraries."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a module of a folder's package; folders without __init__.py have names by chance."""
        for package in _packages if path is None else ():
            spec = importlib.util.find_spec(f"{package}.{fullname}")
            if spec is not None and spec.origin is not None:
                return ModuleSpec(fullname, _Alias(spec.name), origin=spec.origin)
        return None


class _Alias(Loader):
    """Gives a module a second name."""

    def __init__(self, name: str):
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module."""
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Runs nothing: the module has run."""
        module.__spec__ = self._spec  # not that of the second name


class _UserFile(SourceFileLoader):
    """Runs a file whose imports look in the folder first; neither reads nor writes compiled code."""

    def exec_module(self, module: ModuleType) -> None:
        """Runs the file."""
        top = module.__name__.partition(".")[0]
        package = top if top.startswith(_FOLDER) else _package(pathlib.Path(self.path).parent)
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": functools.partial(_import, package)}
        super().exec_module(module)

    def get_data(self, path: str) -> bytes:
        """Returns the text that runs."""
        return _sources[path].encode() if path in _sources else super().get_data(path)

    def path_stats(self, path: str) -> NoReturn:
        """Raises OSError: compiled code would be looked up by whole seconds, which miss a quick change."""
        raise OSError(f"{path} is compiled anew")


def _import(
    package: str,
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """Imports a name for a file of a folder's package, as `__import__` does."""
    top = name.partition(".")[0]
    if level or not _of_folder(package, top):
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    module = builtins.__import__(f"{package}.{name}", globals, locals, fromlist or ())
    return module if fromlist else sys.modules[f"{package}.{top}"]


@functools.cache
def _of_folder(package: str, top: str) -> bool:
    """Whether a plain name means a file of the folder, or a folder in it that nothing else has the name of."""
    if top in _NOT_OF_FOLDERS:
        return False
    if f"{package}.{top}" in sys.modules:
        return True
    if (here := importlib.util.find_spec(f"{package}.{top}")) is None:
        return False
    elsewhere = _found(top)
    return elsewhere is None or (here.origin is not None and here.origin != elsewhere)


sys.meta_path.insert(0, _Finder())
sys.meta_path.append(_Siblings())
