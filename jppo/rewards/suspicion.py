"""Names with which a program reaches into its interpreter; counted, with a warning.

A program can hide such names, so no verdict relies on their absence.
"""

import ast

_MODULES = {"__main__", "_ctypes", "_posixsubprocess", "builtins", "ctypes", "faulthandler", "gc", "inspect", "mmap"}
_ATTRIBUTES = {
    "__builtins__", "__closure__", "__code__", "__globals__", "__subclasses__", "__traceback__", "_exit", "_getframe",
    "addaudithook", "ag_frame", "cr_frame", "currentframe", "exc_info", "f_back", "f_builtins", "f_globals", "f_locals",
    "get_objects", "get_referrers", "gi_frame", "setprofile", "settrace", "tb_frame", "tb_next",
}  # fmt: skip


def suspicious(program: str) -> tuple[str, ...]:
    """Returns such names in a program, sorted."""
    try:
        nodes = list(ast.walk(ast.parse(program)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names if alias.name.split(".")[0] in _MODULES}
            case ast.ImportFrom(module=module, names=names):
                found |= {module or ""} if (module or "").split(".")[0] in _MODULES else set()
                found |= {alias.name for alias in names if alias.name in _ATTRIBUTES}
            case ast.Attribute(attr=name) if name in _ATTRIBUTES:
                found.add(name)
            case ast.Attribute(value=ast.Name(id="sys"), attr="modules"):
                found.add("sys.modules")
            case ast.Name(id=name) if name in _ATTRIBUTES | {"__import__"}:
                found.add(name)
            case ast.Constant(value=str(name)) if name in _MODULES - {"__main__"} | _ATTRIBUTES:
                found.add(name)
    return tuple(sorted(found))
