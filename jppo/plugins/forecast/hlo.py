"""Parser of XLA's optimised HLO text: computations, instructions, and executions of each.

    program = parse_hlo(compiled.as_text())
    for computation, instruction, times in program.executed(): ...

Loops are multiplied out: by the trip count that XLA states, or by the constant in the loop's condition (TPUs).
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "f4e2m1fn": 4,
    "f8e4m3": 8, "f8e4m3fn": 8, "f8e5m2": 8, "f8e4m3b11fnuz": 8, "f8e4m3fnuz": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8,
}  # fmt: skip

WRAPPERS = ("fusion", "async-start", "call")

_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=\s]*)\](\{[^{}]*\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LISTS = re.compile(r"(?:called_computations|branch_computations)=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0  # S(n) of its layout: 0 is a device's main memory; on a TPU 1 is its vector memory

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return -(-self.elements * BITS[self.dtype] // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of its result, a tuple flattened
    operands: tuple[str, ...]  # names
    attributes: str  # the rest of the line
    root: bool = False
    start_operands: int = 0  # arrays in the first part of a tuple of tuples: the operands of a start

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that the instruction calls."""
        names = _CALLED.findall(self.attributes)
        for group in _CALLED_LISTS.findall(self.attributes):
            names += re.findall(r"%?([\w.\-]+)", group)
        return tuple(names)

    def attribute(self, pattern: str) -> str | None:
        """Returns the first group of a pattern's match in the attributes; None without a match."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    @property
    def source(self) -> str:
        """The operation of the traced program that it comes from; '' if unknown."""
        return self.attribute(r'op_name="([^"]*)"') or ""


@dataclasses.dataclass(frozen=True)
class HloProgram:
    """An HLO module."""

    entry: str
    computations: dict[str, dict[str, Instruction]]
    share: float = 1.0  # assumed share of iterations in data-dependent loops

    def executed(self) -> Iterator[tuple[str, Instruction, int]]:
        """Yields (computation, instruction, executions) outside of fusions, from the entry on, loops included."""
        for name, times in self._execution_counts().items():
            for instruction in self.computations[name].values():
                yield name, instruction, times

    def lines(self, name: str, wrappers: Sequence[str] = WRAPPERS) -> Iterator[tuple[str, Instruction]]:
        """Yields (computation, instruction) of a computation and of those that its fusions and wrappers call."""
        for line in self.computations.get(name, {}).values():
            yield name, line
            for inner in line.called if line.opcode in wrappers else ():
                yield from self.lines(inner, wrappers)

    def shapes_of(self, computation: str, instruction: Instruction) -> list[tuple[Shape, ...]]:
        """Returns the shapes of an instruction's operands."""
        instructions = self.computations[computation]
        return [instructions[name].shapes if name in instructions else () for name in instruction.operands]

    def unknown_loops(self) -> list[str]:
        """Returns the loops without a known trip count; they count once."""
        return [loop.name for _, loop, _ in self.executed() if loop.opcode == "while" and self.trips(loop) is None]

    def trips(self, loop: Instruction) -> int | None:
        """Returns how often a loop runs: by XLA, by its condition, or by the array that it slices; None if unknown."""
        known_count = loop.attribute(r'known_trip_count":\{"n":"(\d+)"')
        if known_count is not None:
            return int(known_count)
        condition, body = (loop.attribute(rf"{name}=%?([\w.\-]+)") for name in ("condition", "body"))
        count = None if condition is None else self._loop_bound(condition)
        if count is None and body is not None and (longest := self._sliced_length(body)) is not None:
            count = math.ceil(self.share * longest)
        return count

    def bodies(self, instruction: Instruction) -> list[tuple[str, int]]:
        """Returns (computation, times) of a loop, call or conditional; all branches count, an upper bound."""
        names, times = instruction.called if instruction.opcode in ("call", "conditional") else (), 1
        if instruction.opcode == "while":
            names, times = tuple(re.findall(r"body=%?([\w.\-]+)", instruction.attributes)), self.trips(instruction) or 1
        return [(name, times) for name in names if name in self.computations]

    def _sliced_length(self, body: str) -> int | None:
        """Returns N where each iteration slices an s32 [N, ...], as the loop over a mask's tokens does; else None."""
        lengths = set()
        for name, line in self.lines(body):
            if line.opcode == "dynamic-slice" and line.shapes[0].dtype == "s32":
                array_dims, slice_dims = self.shapes_of(name, line)[0][0].dims, line.shapes[0].dims
                if len(array_dims) > 1 and slice_dims[0] == 1 and slice_dims[1:] == array_dims[1:]:
                    lengths.add(array_dims[0])
        return lengths.pop() if len(lengths) == 1 else None

    def _loop_bound(self, condition: str) -> int | None:
        """Returns the N of a loop's condition `i < N`, where i begins at 0; None for another condition."""
        lines = [line for _, line in self.lines(condition)]
        limits = {int(v) for line in lines if line.opcode == "constant" and (v := line.attribute(r"^(\d+)\)"))}
        comparisons = [line for line in lines if line.opcode == "compare"]
        if len(comparisons) == 1 and len(limits) == 1 and "direction=LT" in comparisons[0].attributes:
            return limits.pop()
        return None

    def _execution_counts(self) -> dict[str, int]:
        """Counts the executions of each computation outside of fusions, with loops multiplied out."""
        times: collections.Counter[str] = collections.Counter()

        def add_executions(name: str, count: int) -> None:
            times[name] += count
            for instruction in self.computations[name].values():
                for inner, repeats in self.bodies(instruction):
                    add_executions(inner, count * repeats)

        add_executions(self.entry, 1)
        return dict(times)


def parse_hlo(text: str, share: float = 1.0) -> HloProgram:
    """Parses the HLO text of a module; ValueError if it has no entry."""
    computations: dict[str, dict[str, Instruction]] = {}
    computation: dict[str, Instruction] | None = None
    entry = None
    for line in text.splitlines():
        if line[:1] not in (" ", "}", ""):
            head = _HEAD.match(line)
            if head and "=" not in line.split("(")[0]:
                computation = computations[head[2]] = {}
                entry = head[2] if head[1] else entry
            continue
        if computation is not None and (instruction := _parse_instruction(line)) is not None:
            computation[instruction.name] = instruction
    if entry is None:
        raise ValueError(f"no ENTRY in {len(text)} characters of HLO")
    return HloProgram(entry, computations, share)


def _parse_instruction(line: str) -> Instruction | None:
    """Parses a line `%name = shapes opcode(operands), attributes`; None for another line."""
    name = _NAME.match(line)
    if name is None:
        return None
    rest = line[name.end() :]
    end = _closing_end(rest, 0) if rest.startswith("(") else rest.find(" ")
    result, rest = rest[:end], rest[end:]
    opcode = _OPCODE.match(rest)
    if opcode is None:
        return None
    first_part = result[1 : _closing_end(result, 1)] if result.startswith("((") else ""
    operands_end = _closing_end(rest, opcode.end() - 1) - 1
    operand_text = rest[opcode.end() : operands_end]
    if opcode[1] == "constant":
        operands, attributes = [], rest[opcode.end() :]  # a literal first
    else:
        operands, attributes = re.findall(r"%([\w.\-]+)", operand_text), rest[operands_end + 1 :]
    return Instruction(
        name=name[2],
        opcode=opcode[1],
        shapes=tuple(_parse_shapes(result)),
        operands=tuple(operands),
        attributes=attributes if opcode[1] != "parameter" else operand_text + attributes,
        root=bool(name[1]),
        start_operands=len(list(_parse_shapes(first_part))),
    )


def _closing_end(text: str, start: int) -> int:
    """Returns the end of the parenthesis that opens at `start`."""
    depth = 0
    for parenthesis in re.finditer(r"[()]", text[start:]):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return start + parenthesis.end()
    return len(text)


def _parse_shapes(text: str) -> Iterator[Shape]:
    """Yields the arrays in a text such as `(f32[2,3]{1,0}, s32[])`."""
    for dtype, dims, layout in _SHAPE.findall(text):
        if dtype in BITS:
            space = re.search(r"S\((\d+)\)", layout)
            sizes = re.findall(r"\d+", dims)
            yield Shape(dtype, tuple(map(int, sizes)), int(space[1]) if space else 0)
