"""Main-memory traffic of a compiled program: bytes of operands read and results written.

A fusion reads its operands once, or only the part that it slices. Of an in-place update it writes the new part.
"""

from jppo.forecast.hlo import Instruction, Program, Shape

# Instructions that move nothing, or are counted elsewhere.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
    "add-dependency", "partition-id", "replica-id", "opt-barrier", "iota", "domain", "get-dimension-size",
}  # fmt: skip
_PASSING = ("bitcast", "convert", "copy", "reshape", "transpose")
_SLICES = ("dynamic-slice", "slice", "gather")


def of_instruction(program: Program, computation: str, one: Instruction) -> int:
    """Counts bytes read and written by one execution of an instruction outside of fusions."""
    if one.opcode in FREE or one.opcode.endswith("-done"):
        return 0
    operands = program.shapes_of(computation, one)
    if one.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * _main(one.shapes)
    if one.opcode == "dynamic-update-slice":
        return 2 * _main(operands[1])
    if one.opcode == "fusion" and len(one.called) == 1 and one.called[0] in program.computations:
        return _fusion(program, one, operands)
    if one.opcode.endswith("-start"):
        return 2 * _main(one.shapes[one.nested or len(operands) :] or one.shapes)
    return sum(map(_main, operands)) + _main(one.shapes)


def _main(shapes: tuple[Shape, ...]) -> int:
    return sum(shape.bytes for shape in shapes if shape.space == 0)


def _fusion(program: Program, one: Instruction, operands: list[tuple[Shape, ...]]) -> int:
    inner = program.computations[one.called[0]]
    users: dict[str, list[Instruction]] = {}
    for line in inner.values():
        for name in line.operands:
            users.setdefault(name, []).append(line)
    read = 0
    for line in inner.values():
        if line.opcode == "parameter":
            number = int(line.attribute(r"^(\d+)") or 0)
            if number < len(operands):
                read += min(_main(operands[number]), _read(line, users, operands[number]))
    return read + _written(inner, one)


def _read(line: Instruction, users: dict[str, list[Instruction]], whole: tuple[Shape, ...]) -> int:
    """Counts bytes of an operand that a fusion reads: only slices if nothing else reads it."""
    if any(shape.space for shape in whole):
        return 0
    total = 0
    for user in users.get(line.name, ()):
        if user.opcode in _SLICES and user.operands[0] == line.name:
            width = _width(whole) / max(1, _width(user.shapes))  # in the dtype of the operand
            total += int(sum(s.bytes for s in user.shapes) * width)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == line.name:
            continue  # updated in place
        elif user.opcode in _PASSING:
            total += _read(user, users, whole)
        else:
            return sum(shape.bytes for shape in whole)
    return total


def _width(shapes: tuple[Shape, ...]) -> float:
    elements = sum(shape.elements for shape in shapes)
    return sum(shape.bytes for shape in shapes) / elements if elements else 1


def _written(inner: dict[str, Instruction], one: Instruction) -> int:
    """Counts bytes that a fusion writes: only the new part of in-place updates."""
    root = next(line for line in inner.values() if line.root)
    parts = [inner[name] for name in root.operands if name in inner] if root.opcode == "tuple" else [root]
    if len(parts) != len(one.shapes):
        return _main(one.shapes)
    total = 0
    for part, shape in zip(parts, one.shapes, strict=True):
        while part.opcode in _PASSING and part.operands and part.operands[0] in inner:
            part = inner[part.operands[0]]
        if part.opcode == "dynamic-update-slice" and part.operands[1] in inner:
            total += min(sum(s.bytes for s in inner[part.operands[1]].shapes), shape.bytes) * (shape.space == 0)
        else:
            total += _main((shape,))
    return total
