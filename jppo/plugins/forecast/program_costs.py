"""FLOP of the products in a compiled program, and the bytes that its instructions read and write, from shapes."""

import collections
import math
import re
from collections.abc import Iterator

from jppo.plugins.forecast.hlo import HloProgram, Instruction, Shape

FUSIONS = ("fusion", "async-start")
PALLAS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call")
# JAX's attention kernels by name prefix: the number of pairwise products of each, and the axis of the queries' length.
# A single row has no batch axis.
ATTENTION = {"splash_mha_fwd": (2, -2), "splash_mha_dq": (3, -2), "splash_mha_dkv": (4, -2), "mha_forward": (2, -3)}
ATTENTION |= {"mha_backward": (7, -3)}
FLOATS = ("bf16", "f16", "f32")

# Instructions that move nothing, or are counted elsewhere.
MOVES_NOTHING = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
    "add-dependency", "partition-id", "replica-id", "opt-barrier", "iota", "domain", "get-dimension-size",
}  # fmt: skip
_PASSING = ("bitcast", "convert", "copy", "reshape", "transpose")
_SLICES = ("dynamic-slice", "slice", "gather")

Operands = list[tuple[Shape, ...]]


def flops(program: HloProgram) -> dict[str, int]:
    """Counts the FLOP of one execution by the dtype of the factors: float32 if either is."""
    counts: collections.Counter[str] = collections.Counter()
    for computation, instruction, times in program.executed():
        for dtype, flop in flops_of(program, computation, instruction)[0].items():
            counts[dtype] += times * flop
    return dict(counts)


def flops_of(program: HloProgram, computation: str, instruction: Instruction) -> tuple[dict[str, int], bool]:
    """Counts an instruction's FLOP by factor dtype, fused ones too; and whether it is attention."""
    counts: collections.Counter[str] = collections.Counter()
    attends = False
    for inner_computation, line in _with_fused(program, computation, instruction):
        operands = program.shapes_of(inner_computation, line)
        if line.opcode in _FLOPS_OF and (flop := _FLOPS_OF[line.opcode](line, operands)):
            is_float32 = any(shape.dtype in ("f32", "f64") for shapes in operands[:2] for shape in shapes)
            counts["float32" if is_float32 else "bfloat16"] += flop
            attends |= (kernel_of(line) or "").startswith(("__cudnn$fmha", *ATTENTION))
    return dict(counts), attends


def kernels(program: HloProgram) -> dict[str, int]:
    """Counts the calls of each custom kernel."""
    calls: collections.Counter[str] = collections.Counter()
    for computation, instruction, times in program.executed():
        for _, line in _with_fused(program, computation, instruction):
            if (name := kernel_of(line)) is not None:
                calls[name] += times
    return dict(calls)


def _with_fused(program: HloProgram, computation: str, instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
    """Yields (computation, instruction) for an instruction, and for all instructions inside a fusion."""
    yield computation, instruction
    for name in instruction.called if instruction.opcode in FUSIONS else ():
        yield from program.lines(name, FUSIONS)


def kernel_of(instruction: Instruction) -> str | None:
    """Returns the name of the custom kernel that an instruction calls; None if it calls none."""
    if instruction.opcode != "custom-call":
        return None
    target = instruction.attribute(r'custom_call_target="([^"]+)"') or ""
    if target in PALLAS:  # named after the kernel, with a number, or its call is
        words = re.findall(r"\w+", instruction.source.removesuffix("/pallas_call").rsplit("/", 1)[-1])
        name = re.sub(r"(\.\d+|\.clone)+$", "", instruction.name)
        return words[-1] if words and name == "pallas_call" else name
    return target if target.startswith("__") else None


def _dot_flops(instruction: Instruction, operands: Operands) -> int:
    """Counts the FLOP of a dot: two for each element of the result and of the contracted axes."""
    contracted = [int(n) for n in re.findall(r"\d+", instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or "")]
    lhs = operands[0][0]
    return 2 * instruction.shapes[0].elements * math.prod(lhs.dims[n] for n in contracted)


def _convolution_flops(instruction: Instruction, operands: Operands) -> int:
    """Counts the FLOP of a convolution, a TPU's matrix product; positions on padding do not count."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels is not None, instruction.attributes[:200]
    lhs, rhs, out = operands[0][0], operands[1][0], instruction.shapes[0]
    features = rhs.dims[labels[2].index("i")]
    outputs = out.dims[labels[3].index("b")] * out.dims[labels[3].index("f")]
    window = instruction.attribute(r"window=\{([^}]*)\}") or ""
    pairs = 1
    for n in range(len(labels[3]) - 2):
        pairs *= _window_pairs(
            window, n, lhs.dims[labels[1].index(str(n))], rhs.dims[labels[2].index(str(n))],
            out.dims[labels[3].index(str(n))],
        )  # fmt: skip
    groups = int(instruction.attribute(r"batch_group_count=(\d+)") or 1)
    return 2 * outputs * features * pairs // groups


def _window_pairs(window: str, n: int, inputs: int, size: int, outputs: int) -> int:
    """Counts pairs of an output and a window position on the input, along spatial dimension n of a convolution."""

    def part(name: str, default: str) -> str:
        match = re.search(rf"\b{name}=([\dx_\-]+)", window)
        return match[1].split("x")[n] if match else default

    stride, low = int(part("stride", "1")), int(part("pad", "0_0").split("_")[0])
    base, spread = int(part("lhs_dilate", "1")), int(part("rhs_dilate", "1"))
    reach = (inputs - 1) * base + 1
    pairs = 0
    for k in range(size):
        first = k * spread - low  # at output 0; at output o it is first + o * stride
        if base == 1:
            begin = max(0, -(first // stride))  # ceil(-first / stride)
            end = min(outputs, (reach - 1 - first) // stride + 1)
            pairs += max(0, end - begin)
        else:
            pairs += sum(0 <= (at := first + o * stride) < reach and at % base == 0 for o in range(outputs))
    return pairs


def _kernel_flops(instruction: Instruction, operands: Operands) -> int:
    """Counts FLOP of known kernels: cuDNN's attention, cuBLAS's products, and a kernel's own cost estimate."""
    target = instruction.attribute(r'custom_call_target="([^"]+)"') or ""
    if target.startswith("__cudnn$fmha"):
        return _cudnn_attention(instruction, operands, backward="Backward" in target)
    if target.startswith("__cublas$"):
        contracted = re.findall(r"\d+", instruction.attribute(r'lhs_contracting_dimensions":\[([^\]]*)\]') or "")
        return 2 * instruction.shapes[0].elements * math.prod(operands[0][0].dims[int(n)] for n in contracted)
    name = kernel_of(instruction) or ""
    products, axis = next((cost for start, cost in ATTENTION.items() if name.startswith(start)), (0, 0))
    arrays = [shape for shapes in operands for shape in shapes if len(shape.dims) > 2 and shape.dtype in FLOATS]
    if products and arrays:  # all of jppo's attention is causal: half of the pairs
        queries = arrays[0]
        like_queries = [s for s in instruction.shapes if s.dtype == queries.dtype and s.dims[-2:] == queries.dims[-2:]]
        products += name.startswith("splash_mha_dkv") and len(like_queries) > 2  # the queries' gradient, too
        return products * queries.elements * queries.dims[axis]
    own_estimate = instruction.attribute(r'"flops":"?(\d+)')
    return 0 if own_estimate is None else int(own_estimate)


def _cudnn_attention(instruction: Instruction, operands: Operands, *, backward: bool) -> int:
    """Counts the FLOP of cuDNN's attention: two products forward, five backward; half of them for a causal mask."""
    dimensions = instruction.attribute(r'intermediate_tensor_shape":\s*\{[^}]*?"dimensions":\s*\[([^\]]*)\]')
    assert dimensions is not None, instruction.attributes[:200]
    pairs = math.prod(int(n) for n in re.findall(r"\d+", dimensions))
    width = operands[0][0].dims[-1]
    causal = "CAUSAL" in (instruction.attribute(r'mask_type":\s*"(\w+)"') or "")
    return (5 if backward else 2) * 2 * pairs * width // (2 if causal else 1)


# FLOP of one execution of the instructions that are products, two per multiply-add.
_FLOPS_OF = {"dot": _dot_flops, "convolution": _convolution_flops, "custom-call": _kernel_flops}


def bytes_moved(program: HloProgram, computation: str, instruction: Instruction) -> int:
    """Counts main-memory bytes read and written by one execution of an instruction outside of fusions.

    A fusion reads its operands once, or only the part that it slices. Of an in-place update it writes the new part.
    """
    if instruction.opcode in MOVES_NOTHING or instruction.opcode.endswith("-done"):
        return 0
    operands = program.shapes_of(computation, instruction)
    if instruction.opcode in _SLICES:
        return 2 * _main_memory_bytes(instruction.shapes)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _main_memory_bytes(operands[1])
    if (
        instruction.opcode == "fusion"
        and len(instruction.called) == 1
        and instruction.called[0] in program.computations
    ):
        return _fusion_bytes(program, instruction, operands)
    if instruction.opcode.endswith("-start"):
        # The result of a start is (operands, results): count the results, read and written.
        results = instruction.shapes[instruction.start_operands or len(operands) :]
        return 2 * _main_memory_bytes(results or instruction.shapes)
    return sum(map(_main_memory_bytes, operands)) + _main_memory_bytes(instruction.shapes)


def _main_memory_bytes(shapes: tuple[Shape, ...]) -> int:
    return sum(shape.bytes for shape in shapes if shape.space == 0)


def _fusion_bytes(program: HloProgram, fusion: Instruction, operands: list[tuple[Shape, ...]]) -> int:
    """Counts the bytes that a fusion reads and writes."""
    fused = program.computations[fusion.called[0]]
    users: dict[str, list[Instruction]] = {}
    for line in fused.values():
        for name in line.operands:
            users.setdefault(name, []).append(line)
    bytes_read = 0
    for line in fused.values():
        if line.opcode == "parameter":
            number = int(line.attribute(r"^(\d+)") or 0)
            if number < len(operands):
                operand = operands[number]
                bytes_read += min(_main_memory_bytes(operand), _operand_bytes_read(line, users, operand))
    return bytes_read + _fusion_bytes_written(fused, fusion)


def _operand_bytes_read(line: Instruction, users: dict[str, list[Instruction]], operand: tuple[Shape, ...]) -> int:
    """Counts bytes of an operand that a fusion reads: only slices if nothing else reads it."""
    if any(shape.space for shape in operand):
        return 0
    total = 0
    for user in users.get(line.name, ()):
        if user.opcode in _SLICES and user.operands[0] == line.name:
            width = _bytes_per_element(operand) / max(1, _bytes_per_element(user.shapes))  # in the dtype of the operand
            total += int(sum(s.bytes for s in user.shapes) * width)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == line.name:
            continue  # updated in place
        elif user.opcode in _PASSING:
            total += _operand_bytes_read(user, users, operand)
        else:
            return sum(shape.bytes for shape in operand)
    return total


def _bytes_per_element(shapes: tuple[Shape, ...]) -> float:
    elements = sum(shape.elements for shape in shapes)
    return sum(shape.bytes for shape in shapes) / elements if elements else 1


def _fusion_bytes_written(fused: dict[str, Instruction], fusion: Instruction) -> int:
    """Counts bytes that a fusion writes: only the new part of in-place updates."""
    root = next(line for line in fused.values() if line.root)
    parts = [fused[name] for name in root.operands if name in fused] if root.opcode == "tuple" else [root]
    if len(parts) != len(fusion.shapes):
        return _main_memory_bytes(fusion.shapes)
    total = 0
    for part, shape in zip(parts, fusion.shapes, strict=True):
        while part.opcode in _PASSING and part.operands and part.operands[0] in fused:
            part = fused[part.operands[0]]
        if part.opcode == "dynamic-update-slice" and part.operands[1] in fused:
            total += min(sum(s.bytes for s in fused[part.operands[1]].shapes), shape.bytes) * (shape.space == 0)
        else:
            total += _main_memory_bytes((shape,))
    return total
