"""What a compiled program moves: bytes of memory and of the interconnect, loops counted in full.

XLA's own `cost_analysis` counts the body of a loop once, however often it runs, and says nothing of
collectives; so the compiled program's text is read here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

_SIZES = {"pred": 1, "bf16": 2, "token": 0} | {f"f8e{form}": 1 for form in ("4m3fn", "5m2")}
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|\s)([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
# Nothing is written by these, or what is written is counted elsewhere.
_FREE = frozenset(
    {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "iota", "opt-barrier"}
    | {"while", "call", "conditional", "after-all", "partition-id", "replica-id"}
    | {"copy-done", "async-done", "async-update"}
)


class Collective(NamedTuple):
    """Bytes that each device takes from the others of its group, over a run of the program.

    Attributes:
        kind: all-gather, all-reduce, reduce-scatter, all-to-all or collective-permute.
        devices: Numbers of one group's devices, in the order of the mesh.
        is_hidden: True where the program computes meanwhile.
        bytes: Per device.
    """

    kind: str
    devices: tuple[int, ...]
    is_hidden: bool
    bytes: float


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation: `name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    rest: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        """Name the operands."""
        return _NAME.findall(self.rest.partition("), ")[0])

    def called(self, attribute: str) -> str | None:
        """Name the computation that an attribute such as `body` or `calls` stands for."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)
        return found[1] if found else None


# Bytes that a device takes from the others of a group of n, for a result of one byte.
_TAKEN = {
    "all-gather": lambda n: (n - 1) / n,
    # The program ends with it, as a reduction and a gathering: each moves what a gathering does.
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}


class Hlo:
    """A compiled program's text (`compiled.as_text()`), read.

    Args:
        text: The optimised module.
    """

    def __init__(self, text: str) -> None:
        self._computations: dict[str, dict[str, Instruction]] = {}
        self._entry = ""
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = self._computations.setdefault(header[1], {})
                self._entry = header[1] if line.startswith("ENTRY") else self._entry
            elif match := _INSTRUCTION.match(line):
                one = _instruction(match)
                current[one.name] = one

    @cached_property
    def _visits(self) -> list[tuple[Instruction, Mapping[str, Instruction], int, bool]]:
        """List (instruction, its computation, how often it runs, whether it is in a fusion)."""
        return list(self._walk(self._entry, 1, is_fused=False))

    def _walk(
        self, computation: str, times: int, *, is_fused: bool
    ) -> Iterator[tuple[Instruction, Mapping[str, Instruction], int, bool]]:
        lines = self._computations.get(computation, {})
        for one in lines.values():
            yield one, lines, times, is_fused
            if one.opcode == "while":
                body, condition = one.called("body"), one.called("condition")
                trips = self._trips(one, condition or "")
                yield from self._walk(body or "", times * trips, is_fused=is_fused)
            elif one.opcode in ("call", "fusion", "async-start", "custom-call"):
                inner = one.called("calls") or one.called("to_apply")
                fused = is_fused or one.opcode != "call"
                yield from self._walk(inner or "", times, is_fused=fused)

    def _trips(self, loop: Instruction, condition: str) -> int:
        """Return how often a loop runs: what its counter is compared with; 1 where data decide."""
        known = re.search(r"known_trip_count[^\d]*(\d+)", loop.rest)
        if known:
            return int(known[1])
        lines = self._computations.get(condition, {})
        root = next((one for one in lines.values() if one.is_root), None)
        if root is not None and root.opcode == "fusion":
            inner = self._computations.get(root.called("calls") or "", {})
            lines = {**lines, **inner}
            root = next((one for one in inner.values() if one.is_root), None)
        if root is None or root.opcode != "compare" or "direction=LT" not in root.rest:
            return 1
        bounds = [
            int(found[1])
            for one in lines.values()
            if one.opcode == "constant" and (found := re.match(r"(\d+)\)", one.rest))
        ]
        return bounds[0] if len(bounds) == 1 else 1

    @cached_property
    def collectives(self) -> list[Collective]:
        """List what devices take from one another, collectives of one kind and group together."""
        total: dict[tuple[str, tuple[int, ...], bool], float] = {}
        for one, lines, times, is_fused in self._visits:
            kind = one.opcode.removesuffix("-start")
            if kind not in _TAKEN or one.opcode.endswith("-done"):
                continue
            group = _group(one.rest)
            n = len(group)
            size = type_bytes(one.type)
            if one.opcode.endswith("-start") and one.type.startswith("("):
                # The operand stands beside the result.
                size *= n / (n + 1) if kind == "all-gather" else 0.5
            taken = size * _TAKEN[kind](n)
            if kind == "all-reduce" and is_fused and _is_scattered(lines):
                taken /= 2
            key = (kind, group, one.opcode.endswith("-start"))
            total[key] = total.get(key, 0.0) + taken * times
        return [Collective(*key, size) for key, size in total.items() if size]

    @cached_property
    def bytes_moved(self) -> float:
        """Return the bytes of memory that a device moves.

        Each value that is written is taken to be read once, and the arguments to be read once.
        """
        written = sum(
            times * self._written(one, lines)
            for one, lines, times, is_fused in self._visits
            if not is_fused and one.opcode not in _FREE
        )
        entry = self._computations[self._entry].values()
        arguments = sum(type_bytes(one.type) for one in entry if one.opcode == "parameter")
        return 2 * written + arguments

    def _written(self, one: Instruction, lines: Mapping[str, Instruction]) -> float:
        """Return the bytes that an instruction writes; of an update in place only the update."""
        if one.opcode == "fusion":
            inner = self._computations.get(one.called("calls") or "", {})
            root = next((line for line in inner.values() if line.is_root), None)
            if root is None:
                return type_bytes(one.type)
            if root.opcode == "tuple":
                parts = [inner[name] for name in root.operands if name in inner]
                return sum(self._written(part, inner) for part in parts)
            return self._written(root, inner) if root.opcode in _IN_PLACE else type_bytes(one.type)
        if one.opcode in _IN_PLACE:
            update = one.operands[_IN_PLACE[one.opcode]]
            return type_bytes(lines[update].type) if update in lines else 0.0
        if one.opcode.endswith("-done"):
            return 0.0
        return type_bytes(one.type)


# Which operand is what an instruction writes into another one.
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}


def type_bytes(text: str) -> float:
    """Return the bytes of all arrays that a type names."""
    return sum(
        _item_bytes(kind) * math.prod(map(int, filter(None, shape.split(","))))
        for kind, shape in _ARRAY.findall(text)
    )


def _item_bytes(kind: str) -> float:
    if kind in _SIZES:
        return _SIZES[kind]
    bits = re.match(r"[a-z]+(\d+)", kind)
    return int(bits[1]) / 8 if bits else 0


def _instruction(match: re.Match[str]) -> Instruction:
    is_root, name, text = match.groups()
    opcode = _OPCODE.search(text)
    if opcode is None:
        return Instruction(name, text, "", "", bool(is_root))
    kind = text[: opcode.start()].strip()
    return Instruction(name, kind, opcode[1], text[opcode.end() :], bool(is_root))


def _is_scattered(lines: Mapping[str, Instruction]) -> bool:
    """Tell whether a fusion sums over devices and keeps each one's part of the sum."""
    return any(one.opcode == "dynamic-slice" for one in lines.values())


def _group(rest: str) -> tuple[int, ...]:
    """Return the devices of the first of an instruction's groups, which are all alike.

    XLA writes them out, `{{0,1},{2,3}}`; as a table that is turned, `[2,4]<=[4,2]T(1,0)`; or by
    the axes of a mesh, `mesh['a'=4,'b'=2] {'a'}`.
    """
    if pair := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", rest):
        return int(pair[1]), int(pair[2])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return tuple(map(int, listed[1].split(",")))
    table = r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if turned := re.search(table, rest):
        shape, dims = (list(map(int, turned[i].split(","))) for i in (1, 2))
        order = list(map(int, turned[3].split(","))) if turned[3] else None
        numbers = np.arange(math.prod(dims)).reshape(dims).transpose(order)
        return tuple(numbers.reshape(shape)[0].tolist())
    if by_axes := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
        axes = re.findall(r"'(\w+)'=(\d+)", by_axes[1])
        chosen = set(re.findall(r"'(\w+)'", by_axes[2]))
        numbers = np.arange(math.prod(int(size) for _, size in axes))
        table_of = numbers.reshape([int(size) for _, size in axes])
        index = tuple(slice(None) if axis in chosen else 0 for axis, _ in axes)
        return tuple(table_of[index].ravel().tolist())
    return (0,)
