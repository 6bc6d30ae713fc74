"""Runs a program and answers requests about it, in the part of the sandbox that a hostile program can change.

Nothing here is secret, and its output is not trusted: an answer is the value that the program claims. Standard library
only and no import of jppo, because an HTTP sandbox service gets this file as text.
"""

import builtins
import os
import sys

_ITERATED = ("generator", "map", "filter", "zip", "range", "enumerate", "reversed", "dict_keys", "dict_values",
             "dict_items", "deque", "ndarray", "list_reverseiterator", "list_iterator")  # fmt: skip
_MOST = 10**6  # items of an iterator
_DEEPEST = 50


def run(text, requests, answer):
    """Runs the program's text in a new `__main__`; then makes the requests, and answers each by a line of JSON.

    A request is (kind, source): `exec` answers null, `eval` the value. The first that raises ends it. Without requests
    the program is `__main__` by name as well, and its exceptions are raised here.
    """
    for name in ("exit", "quit"):  # as the module site has them
        if not hasattr(builtins, name):
            setattr(builtins, name, sys.exit)
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    names = main.__dict__
    names["__builtins__"] = builtins
    if requests is None:
        exec(compile(text, "program.py", "exec"), names)
        return
    import json  # costs as much as the rest of the start

    names["__name__"] = "program"
    sys.modules["program"] = main  # where dataclasses and pickle look
    try:
        exec(compile(text, "program.py", "exec"), names)
        for kind, source in requests:
            if kind == "eval":
                answer(json.dumps({"value": plain(eval(compile(source, "tests.py", "eval"), names))}))
            else:
                exec(compile(source, "tests.py", "exec"), names)
                answer('{"value": null}')
    except BaseException as e:
        answer(json.dumps({"raised": type(e).__name__}))


def plain(value, depth=0):
    """Encodes a value as JSON, with Python's types kept apart; other values become their type's name."""
    if depth > _DEEPEST:
        return {"other": "nested"}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -(2**53) < number < 2**53 else {"int": hex(number)}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, list):
        return [plain(item, depth + 1) for item in list.__iter__(value)]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [plain(item, depth + 1) for item in kind(value)]}
    if isinstance(value, dict):
        return {"dict": [[plain(k, depth + 1), plain(v, depth + 1)] for k, v in dict.items(value)]}
    return _foreign(value, depth)


def _foreign(value, depth):
    name = type(value).__name__
    if type(value).__module__ == "numpy" and not hasattr(value, "__len__") and hasattr(value, "item"):
        return plain(value.item(), depth + 1)
    if name in _ITERATED:
        items = []
        for item in value:
            items.append(plain(item, depth + 1))
            if len(items) > _MOST:
                break
        return {"items": items}
    return {"other": name}


def write_all(fd, line):
    """Writes a line to a file descriptor."""
    left = (line + "\n").encode()
    while left:
        left = left[os.write(fd, left) :]
