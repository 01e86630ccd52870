"""How many bytes each kernel of a compiled program moves, from the shapes in its optimised HLO.

Operands and results count once each. Of an operand that a fusion gathers or slices from, what is
taken counts; of one that it updates in place, what is written. Caches may do better or worse.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SHAPE = re.compile(r"([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")
_COMPUTATION = re.compile(r"(?:ENTRY )?%([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(
    r"\s+(?:ROOT )?%([\w.\-]+) = (\((?:[^()]|\([^()]*\))*\)|\S+) ([\w\-]+)\(([^)]*)\)(.*)"
)
_OPERAND = re.compile(r"%([\w.\-]+)(?:#(\d+))?")
_CALLS = re.compile(r"calls=%([\w.\-]+)")
_PARTS = ("gather", "dynamic-slice", "slice")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations in place on their first operand, and which operand has what is written."""


@dataclass
class _Instruction:
    shape: str
    operation: str
    operands: list[tuple[str, str]]
    """Names, and which element of a tuple, or ""."""
    calls: str | None
    index: str
    """Of a parameter."""
    is_root: bool


_Computation = dict[str, _Instruction]


def kernel_bytes(hlo: str) -> dict[str, int]:
    """Bytes by kernel name, of every fusion in the text of an optimised module.

    XLA names a kernel as its first fusion, with underscores for points; later fusions that compute
    the same share it.
    """
    computations = _parse(hlo)
    found: dict[str, int] = {}
    for computation in computations.values():
        for name, instruction in computation.items():
            if instruction.operation == "fusion" and instruction.calls in computations:
                body = computations[instruction.calls]
                moved = _read(body, computation, instruction) + _written(body, instruction)
                found[re.sub(r"[.\-]", "_", name)] = moved
    return found


def shape_bytes(shape: str) -> int:
    """Of an array, as "bf16[32,896]{1,0}", or of all in a tuple."""
    return sum(_array_bytes(*match.groups()) for match in _SHAPE.finditer(shape))


def _array_bytes(dtype: str, dims: str) -> int:
    size = 1
    for dim in filter(None, dims.split(",")):
        size *= int(dim)
    bits = _BITS.search(dtype)
    return size * (max(int(bits[0]) // 8, 1) if bits else 1)


def _parse(hlo: str) -> dict[str, _Computation]:
    computations: dict[str, _Computation] = {}
    current: _Computation = {}
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations[match[1]] = {}
        elif match := _INSTRUCTION.match(line):
            name, shape, operation, operands, rest = match.groups()
            calls = _CALLS.search(rest)
            current[name] = _Instruction(
                shape,
                operation,
                _OPERAND.findall(operands),
                calls[1] if calls else None,
                operands if operation == "parameter" else "",
                line.lstrip().startswith("ROOT"),
            )
    return computations


def _read(body: _Computation, outside: _Computation, fusion: _Instruction) -> int:
    total = 0
    for name, parameter in body.items():
        if parameter.operation != "parameter":
            continue
        operand, element = fusion.operands[int(parameter.index)]
        shape = outside[operand].shape if operand in outside else parameter.shape
        if element:
            shape = [match[0] for match in _SHAPE.finditer(shape)][int(element)]
        uses = list(_uses(body, name))
        if uses and all(use.operation in _PARTS and use.operands[0][0] == name for use in uses):
            total += min(sum(shape_bytes(use.shape) for use in uses), shape_bytes(shape))
        elif not (
            uses and all(use.operation in _UPDATES and use.operands[0][0] == name for use in uses)
        ):
            total += shape_bytes(shape)
    return total


def _uses(body: _Computation, name: str) -> Iterator[_Instruction]:
    """Of a value, also by another name: a reshape without a copy."""
    for other, instruction in body.items():
        if any(operand == name for operand, _ in instruction.operands):
            if instruction.operation == "bitcast":
                yield from _renamed(_uses(body, other), other, name)
            else:
                yield instruction


def _renamed(uses: Iterator[_Instruction], old: str, new: str) -> Iterator[_Instruction]:
    for use in uses:
        operands = [(new if name == old else name, element) for name, element in use.operands]
        yield _Instruction(use.shape, use.operation, operands, use.calls, use.index, use.is_root)


def _written(body: _Computation, fusion: _Instruction) -> int:
    (root,) = (instruction for instruction in body.values() if instruction.is_root)
    while root.operation == "bitcast" and root.operands[0][0] in body:
        root = body[root.operands[0][0]]
    results = [root]
    if root.operation == "tuple":
        results = [body[name] for name, _ in root.operands if name in body]
    total = 0
    for result in results:
        if result.operation in _UPDATES:
            result = body[result.operands[_UPDATES[result.operation]][0]]
        total += shape_bytes(result.shape)
    return total
