"""What a compiled GPU program launches, by XLA's own list: its thunks.

XLA writes the list when it compiles with `dump_options`. A command buffer is a CUDA graph: the host
launches it at once, whatever it holds. Everything outside of one costs a launch of its own.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_THUNK = re.compile(r"( *)\d+: (k\w+)\s*\[[^\]]*\]\s*(\S*)")
_LABEL = re.compile(r"( *)(\w+):\s*")
_GRAPH, _CONDITIONAL = "kCommandBuffer", "kConditional"
_WRAPPERS = ("kSequential", "kDynamicSliceFusion")
_CONTAINERS = (_GRAPH, _CONDITIONAL, "kWhile", *_WRAPPERS)


@dataclass
class Thunk:
    """One entry of the list: `kind` is XLA's, as "kCustomKernel"."""

    kind: str
    kernel: str
    """A kernel's name; of other kinds, whatever XLA writes there."""
    parts: dict[str, list["Thunk"]] = field(default_factory=dict)
    """What it holds: by branch if it is a condition, "condition" and "body" if it is a loop, else
    under ""."""


@dataclass(frozen=True)
class Launches:
    """What one run launches; of a loop, what one round of it does."""

    graphs: int
    """Command buffers, the most that the conditions outside of them allow."""
    outside: Counter[str]
    """Thunks outside of any graph by kind, conditions and loops among them, in all branches."""
    kernels: tuple[int, int]
    """Fewest and most, kernels and copies, in graphs or not: as the conditions go."""


def dump_options(folder: Path) -> dict[str, object]:
    """For `Lowered.compile(compiler_options=...)`, to leave the list in `folder`. A program that a
    compilation cache has leaves none."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def read_thunks(folder: Path) -> list[Thunk]:
    """The list of the one program that was compiled with `dump_options(folder)`.

    FileNotFoundError if there is none, as on a CPU; ValueError if there are several.
    """
    # XLA writes a second list where it has changed the first, as by making graphs: the later name.
    paths = {
        path.name.split(".thunk_sequence")[0]: path
        for path in sorted(folder.glob("*.thunk_sequence*.txt"))
    }
    if not paths:
        raise FileNotFoundError(f"XLA has left no list of thunks in {folder}: not a GPU program?")
    if len(paths) > 1:
        raise ValueError(f"{folder} has the lists of {len(paths)} programs, one is wanted")
    (path,) = paths.values()
    return parse_thunks(path.read_text())


def parse_thunks(text: str) -> list[Thunk]:
    """The outermost thunks of a list; nesting is by indentation."""
    outermost: list[Thunk] = []
    open_thunks: list[tuple[int, Thunk]] = []
    labels: dict[int, str] = {}
    for line in text.splitlines():
        if match := _LABEL.fullmatch(line):
            depth = len(match[1])
            # A loop's condition is written without its indentation: it follows the loop at once.
            while match[2] != "condition" and open_thunks and open_thunks[-1][0] >= depth:
                open_thunks.pop()
            labels[id(open_thunks[-1][1])] = match[2]
        elif match := _THUNK.match(line):
            depth = len(match[1])
            while open_thunks and open_thunks[-1][0] >= depth:
                open_thunks.pop()
            thunk = Thunk(match[2], match[3])
            if open_thunks:
                parent = open_thunks[-1][1]
                parent.parts.setdefault(labels.get(id(parent), ""), []).append(thunk)
            else:
                outermost.append(thunk)
            open_thunks.append((depth, thunk))
    return outermost


def count_launches(thunks: Sequence[Thunk], *, in_graph: bool = False) -> Launches:
    """Added up over `thunks`, which run one after another."""
    graphs, least, most = 0, 0, 0
    outside: Counter[str] = Counter()
    for thunk in thunks:
        inside = in_graph or thunk.kind == _GRAPH
        parts = [count_launches(part, in_graph=inside) for part in thunk.parts.values()]
        graphs += thunk.kind == _GRAPH and not in_graph
        if not inside and thunk.kind not in _WRAPPERS:
            outside[thunk.kind] += 1
        outside.update(Counter(kind for part in parts for kind in part.outside.elements()))
        if thunk.kind == _CONDITIONAL:
            # A branch may hold nothing, and is then not in the list.
            missing = len(parts) < 2
            graphs += max((part.graphs for part in parts), default=0)
            least += 0 if missing else min(part.kernels[0] for part in parts)
            most += max((part.kernels[1] for part in parts), default=0)
        else:
            own = thunk.kind not in _CONTAINERS
            graphs += sum(part.graphs for part in parts)
            least += own + sum(part.kernels[0] for part in parts)
            most += own + sum(part.kernels[1] for part in parts)
    return Launches(graphs, outside, (least, most))


def every_thunk(thunks: Sequence[Thunk]) -> Iterator[Thunk]:
    """All of them, those inside of others too."""
    for thunk in thunks:
        yield thunk
        for part in thunk.parts.values():
            yield from every_thunk(part)
