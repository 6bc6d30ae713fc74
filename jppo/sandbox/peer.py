"""Two processes that share objects over a pipe: the tests of a graded program, and the program.

Values are copied: numbers, texts, containers, numpy's arrays and the like (`values.py`). Any other object stays where
it is, and the other side holds a `Remote` of it, whose methods run where the object is (`remote.py`). A call changes
the containers that it was given, as in one process. Standard library and these files only, because an HTTP sandbox
service gets them as text.
"""

import contextlib
import copy
import json
import operator
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from jppo.sandbox.remote import BINARY, UNARY
from jppo.sandbox.values import Gone, Memo, Values, builtin_value

_LINE_BYTES = 2**26  # of a message


class Peer:
    """One side of the pipe. `trusting`: the other side's objects may compare themselves with values of this side."""

    def __init__(self, receives: int, sends: int, *, trusting: bool, look_up: Callable[[str], Any] | None = None):
        self._in, self._out = os.fdopen(receives, "rb"), sends
        self._look_up = look_up  # (name) -> a global of this side
        self.values = Values(self.ask, trusting=trusting)
        self.asked = 0  # operations on the other side, other than to look up a name

    def ask(self, op: str, *operands: object) -> Any:
        """Does an operation on the other side, and returns or raises what it does."""
        self.asked += op != "name"
        memo = Memo()
        body = [self.values.encoded(operand, memo) for operand in operands]
        self._send({"op": op, "args": body, "heap": self.values.drained(memo)})
        while True:
            message = self._receive()
            if "op" in message:
                self._answer(message)
                continue
            objects = self.values.filled(message["heap"], memo.objects)
            if printed := message.get("printed"):
                sys.stdout.write(str(printed))
            if "raised" in message:
                raise self.values.exception(message["raised"], objects)
            return self.values.decoded(message["value"], objects)

    def serve(self) -> None:
        """Answers requests until the other side ends, which waits for this to begin."""
        with contextlib.suppress(Gone):
            os.set_blocking(self._out, True)
            os.write(self._out, b"\n")
            while True:
                self._answer(self._receive())

    def wait(self) -> bool:
        """Returns whether the other side has begun to serve; False if it has ended before."""
        return self._in.readline(_LINE_BYTES) == b"\n"

    def _answer(self, message: dict[str, Any]) -> None:
        memo, sent = Memo(), message["heap"]
        reply: dict[str, Any] = {}
        try:
            objects = self.values.filled(sent, [])
            memo.start(objects)
            if not (self.values.trusting or self._reaches(message)):
                raise Gone("a request about none of this side's objects")
            operands = [self.values.decoded(operand, objects) for operand in message["args"]]
            reply["value"] = self.values.encoded(
                self._done(message["op"], operands), memo, kept=message["op"] == "iter"
            )
        except Gone:
            raise
        except BaseException as e:
            reply["raised"] = self.values.described(e, memo)
        heap = self.values.drained(memo)
        reply["heap"] = [None if i < len(sent) and entry == sent[i] else entry for i, entry in enumerate(heap)]
        if isinstance(sys.stdout, Captured):
            reply["printed"] = sys.stdout.taken()
        self._send(reply)

    def _reaches(self, message: dict[str, Any]) -> bool:
        """Whether a request is about an object that this side has sent; others would reach into this process."""
        args = message["args"]
        about = args if message["op"] in BINARY else args[:1]
        return any(isinstance(operand, list) and operand[:1] == ["yours"] for operand in about)

    def _done(self, op: str, operands: list[Any]) -> Any:
        if op == "call":
            function, args, named = operands
            return function(*args, **named)
        if op in ("get", "set", "del"):
            name = operands[1]
            if not self.values.trusting and str(name).startswith("__"):
                raise AttributeError(name)
            changes: dict[str, Any] = {"get": getattr, "set": setattr, "del": delattr}
            return changes[op](*operands)
        if op == "name" and self._look_up is not None:
            return self._look_up(*operands)
        if op == "deepcopy":
            return copy.deepcopy(*operands)
        if op == "format":
            return format(*operands)
        if op == "plain":
            return builtin_value(*operands)
        if op in UNARY:
            return UNARY[op](*operands)
        if op in BINARY or op in ("getitem", "setitem", "delitem", "contains"):
            return getattr(operator, op)(*operands)
        raise Gone(f"no such operation: {op}")

    def _send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        left = memoryview(line)
        while left:
            left = left[os.write(self._out, left) :]

    def _receive(self) -> dict[str, Any]:
        os.set_blocking(self._in.fileno(), True)  # a program may have changed it
        line = self._in.readline(_LINE_BYTES)
        try:
            message = json.loads(line)
            if not isinstance(message, dict) or not isinstance(message.get("heap"), list):
                raise ValueError
        except (ValueError, RecursionError) as e:
            raise Gone("no message") from e
        return message


class Captured:
    """A standard output that keeps its text for the next answer."""

    encoding, errors = "utf-8", "strict"

    def __init__(self) -> None:
        self._parts: list[str] = []

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._parts.append(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def taken(self) -> str:
        text = "".join(self._parts)
        self._parts.clear()
        return text
