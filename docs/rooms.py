"""The rooms of the code: what each may import, checked, and a picture of them.

    python docs/rooms.py            what is wrong; nothing and 0 where nothing is
    python docs/rooms.py --draw     the picture, docs/images/rooms.svg

A room is a folder of modules. Imports count wherever they stand: for types only, or inside a
function too. No two modules and no two rooms may import one another, however indirectly. A room
has at most `MOST` modules, and its docstring says what comes in, what goes out, what it imports.
No two classes are called alike. A compiled kernel has at most `MOST_LINES` lines and
`MOST_ARGUMENTS` arguments. The docstring of a room ends so:

    Imports: plan, stage and below.
    Imports: cache, the simulator; no torch.

Names are those of rooms of the same package, of others with the package in front; *below* is what
the named rooms import, however indirectly; *the simulator* is any room of it.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE, TESTS = ROOT / "src", ROOT / "tests"
PICTURE = ROOT / "docs" / "images" / "rooms.svg"
MOST, MOST_TESTS = 12, 14
"""Modules side by side in a room, and files in a room of tests."""
LONGEST = 600
"""Lines of a module."""
MOST_LINES, MOST_ARGUMENTS = 45, 8
"""Lines of a kernel, without its docstring, and its positional arguments."""
KERNEL = re.compile(r"(kernel|uncounted)\(")
"""How the decorators of kernels begin."""
SAYS = ("In:", "Out:", "Imports:")
"""How the sentences of a room's docstring begin."""
PACKAGES = {"search": "searcher"}
"""How packages are imported that are called otherwise."""
TORCH = re.compile(r"^ *(import|from) (torch\b|stratagem\.simulator\.torch_ops)", re.MULTILINE)
SHELVES = (("", "executor"), ("searcher", "profiler"), ("simulator",))
"""Packages in the picture, by row; the one without a name is what stands above them."""
ABOVE = "command line, exports and what joins the packages"

Graph = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """The file of every module, by its dotted name."""
    found = {}
    for folder, _, files in os.walk(SOURCE / "stratagem", followlinks=True):
        for file in files:
            if file.endswith(".py"):
                path = Path(folder, file)
                name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
                found[name.removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, known: Iterable[str]) -> set[str]:
    """The modules of ours that a module imports, wherever in it."""
    known, found = set(known), set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{each.name}" for each in node.names}
            found |= {each if each in known else node.module for each in full}
    return (found & known) - {name}


def import_graph() -> tuple[dict[str, Path], dict[str, set[str]]]:
    """All modules, and what each imports."""
    known = modules()
    return known, {name: imports(name, path, known) for name, path in known.items()}


def room_of(name: str, known: Mapping[str, Path]) -> str:
    """The package that a module stands in; that of a package is itself."""
    return name if known[name].name == "__init__.py" else name.rpartition(".")[0]


def between_rooms(known: Mapping[str, Path], graph: Graph) -> dict[str, set[str]]:
    """What the modules of every room import from other rooms."""
    found: dict[str, set[str]] = {room_of(name, known): set() for name in known}
    for name, read in graph.items():
        here = room_of(name, known)
        found[here] |= {room_of(each, known) for each in read} - {here}
    return found


def ring_of(graph: Graph) -> list[str]:
    """Some ring of those in a graph; empty where it has none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def stated(docstring: str) -> list[str]:
    """What a docstring says that a room imports, word by word.

    Example:
        >>> stated("In: a. Imports: plan, stage and below; no torch.")
        ['plan', 'stage', 'below', 'no torch']
    """
    words = " ".join(docstring.partition(SAYS[-1])[2].split()).removesuffix(".")
    return re.split(r"[,;] | and ", words)


def meant(word: str, room: str, graph: Graph) -> set[str]:
    """The rooms that a word of a room's docstring stands for; none where there are none."""
    if word.startswith("the "):
        package = f"stratagem.{PACKAGES.get(word[4:], word[4:])}"
        return {each for each in graph if f"{each}.".startswith(f"{package}.")}
    if word == "its own rooms":
        return {each for each in graph if each.startswith(f"{room}.")}
    own = ".".join(room.split(".")[:2]) if _package(room) else "stratagem"
    return {f"{start}.{word}" for start in (own, "stratagem")} & set(graph)


def untrue(room: str, words: Iterable[str], graph: Graph) -> Iterator[str]:
    """What is wrong with what a room says that it imports, one sentence each."""
    may: set[str] = set()
    for word in words:
        if word in ("nothing of ours", "no torch", "below"):
            continue
        rooms = meant(word, room, graph) - {room}
        if not rooms & graph[room]:
            yield f"{room} says that it imports {word!r}, and does not"
        may |= rooms
    below = [each for each in may if "below" in words]
    while below:
        more = graph[below.pop()] - may
        may |= more
        below += more
    for each in sorted(graph[room] - may):
        yield f"{room} imports {each}, which its docstring does not say"


def with_torch(room: str, known: Mapping[str, Path]) -> Path | None:
    """Some module of a room that imports torch, or what captures with it; None without any."""
    for name, path in sorted(known.items()):
        if room_of(name, known) == room and TORCH.search(path.read_text("utf-8")):
            return path
    return None


def shared_names(known: Mapping[str, Path]) -> Iterator[str]:
    """Which classes are called alike, one sentence each: a reader would take one for the other."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, path in sorted(known.items()):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(name)
    for each, modules in sorted(found.items()):
        if len(modules) > 1:
            yield f"{each} is a class of {' and of '.join(modules)}; give each its own name"


def kernels_of(path: Path) -> Iterator[tuple[str, int, int]]:
    """The kernels of a module: name, lines of the body, and positional arguments of each."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        if any(KERNEL.match(ast.unparse(each)) for each in node.decorator_list):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            yield node.name, lines, len(node.args.posonlyargs + node.args.args)


def large_kernels(known: Mapping[str, Path]) -> Iterator[str]:
    """Which kernels are too long or take too much, one a line."""
    for module, path in sorted(known.items()):
        for name, lines, arguments in kernels_of(path):
            if lines > MOST_LINES:
                yield (
                    f"kernel {name} of {module} has {lines} lines of at most {MOST_LINES}: "
                    "take steps of it out as inner kernels"
                )
            if arguments > MOST_ARGUMENTS:
                yield (
                    f"kernel {name} of {module} takes {arguments} arguments of at most "
                    f"{MOST_ARGUMENTS}: put arrays that belong together in a NamedTuple"
                )


def long_modules(known: Mapping[str, Path]) -> Iterator[str]:
    """Modules of more lines than somebody reads at once."""
    for name, path in sorted(known.items()):
        lines = path.read_text("utf-8").count("\n")
        if lines > LONGEST:
            yield f"{name} has {lines} lines, and a module has at most {LONGEST}"


def complaints() -> Iterator[str]:
    """What is wrong with the rooms, one sentence each."""
    known, graph = import_graph()
    for what, each in (("modules", graph), ("rooms", between_rooms(known, graph))):
        if ring := ring_of(each):
            yield f"{what} import one another: {' -> '.join(ring)}"
    counts = Counter(path.parent for path in known.values() if path.name != "__init__.py")
    for folder, count in counts.items():
        if count > MOST:
            where = folder.relative_to(SOURCE)
            yield f"{where} has {count} modules side by side, and a room has at most {MOST}"
    for folder, count in Counter(path.parent for path in TESTS.rglob("test_*.py")).items():
        if count > MOST_TESTS:
            where = folder.relative_to(ROOT)
            yield f"{where} has {count} files of tests side by side, of at most {MOST_TESTS}"
    for name, path in known.items():
        if path.name == "__init__.py" and counts[path.parent] and name != "stratagem":
            words = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            if missing := [each for each in SAYS if f"\n{each}" not in words]:
                yield f"the docstring of {name} has no line that begins with {missing[0]!r}"
            else:
                yield from untrue(name, stated(words), between_rooms(known, graph))
                if "no torch" in stated(words) and (path := with_torch(name, known)):
                    yield f"{name} says {'no torch'!r}, and {path.relative_to(SOURCE)} imports it"
    yield from shared_names(known)
    yield from long_modules(known)
    yield from large_kernels(known)


def levels(graph: Graph) -> dict[str, int]:
    """How many rooms stand below each, at most."""
    found: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        found[name] = 1 + max((found[each] for each in graph.get(name, ())), default=-1)
    return found


def reduced(graph: Graph) -> dict[str, set[str]]:
    """A graph without the edges that follow from its others."""

    def below(name: str) -> set[str]:
        return {name}.union(*(below(each) for each in graph[name]))

    return {
        name: {each for each in read if not any(each in below(o) for o in read - {each})}
        for name, read in graph.items()
    }


@dataclass(frozen=True)
class Box:
    """A room in the picture."""

    name: str
    modules: int
    x: float
    y: float


WIDTH, HEIGHT, GAP, ROW = 150.0, 30.0, 12.0, 58.0


def draw() -> str:
    """The picture: rooms by package, the lowest at the bottom, and arrows to what they import.

    Arrows that follow from others are left out.
    """
    known, graph = import_graph()
    rooms = between_rooms(known, graph)
    counts = Counter(room_of(n, known) for n, p in known.items() if p.name != "__init__.py")
    boxes: dict[str, Box] = {}
    parts: list[str] = []
    drawn: list[dict[str, set[str]]] = []
    top, right = 0.0, 0.0
    for shelf in SHELVES:
        contents = [_levelled(package, rooms, counts) for package in shelf]
        bottom = top + 40 + max(max(level.values()) + 1 for level, _ in contents) * ROW
        left = 20.0
        for package, (level, inside) in zip(shelf, contents, strict=True):
            wide = max(Counter(level.values()).values()) * (WIDTH + GAP)
            parts.append(_text(left + wide / 2, bottom + 25, package or ABOVE, 15, "bold"))
            boxes |= _placed(level, counts, left + wide / 2, bottom)
            drawn.append(inside)
            left += max(wide, 8.0 * len(package or ABOVE)) + 60
        right, top = max(right, left), bottom + 40
    arrows = [
        _arrow(boxes[a], boxes[b])
        for inside in drawn
        for a, read in sorted(reduced(inside).items())
        for b in sorted(read)
    ]
    shapes = [_box(box) for _, box in sorted(boxes.items())]
    style = (
        "text{font-family:sans-serif;fill:#222}rect{fill:#eef3fa;stroke:#4a6fa5}"
        "path{stroke:#8a97a8;fill:none}@media(prefers-color-scheme:dark)"
        "{text{fill:#ddd}rect{fill:#26303f}}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right:g} {top:g}">',
            f"<style>{style}</style>",
            '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8" style="fill:#8a97a8"/>'
            "</marker></defs>",
            *arrows,
            *shapes,
            *parts,
            "</svg>",
            "",
        ]
    )


def _levelled(
    package: str, rooms: Graph, counts: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, set[str]]]:
    """The rooms of a package: the level of each, and what each imports of the others."""
    own = {room for room in rooms if _package(room) == package and counts[room]}
    inside = {room: rooms[room] & own for room in sorted(own)}
    return levels(inside), inside


def _placed(
    level: Mapping[str, int], counts: Mapping[str, int], middle: float, bottom: float
) -> dict[str, Box]:
    rows: dict[int, list[str]] = defaultdict(list)
    for room in sorted(level):
        rows[level[room]].append(room)
    found = {}
    for number, names in rows.items():
        first = middle - len(names) * (WIDTH + GAP) / 2
        for k, name in enumerate(names):
            x, y = first + k * (WIDTH + GAP), bottom - (number + 1) * ROW + 20
            found[name] = Box(name, counts[name], x, y)
    return found


def _package(room: str) -> str:
    first = [*room.split("."), ""][1]
    return first if any(first in shelf for shelf in SHELVES) else ""


def _text(x: float, y: float, words: str, size: int, weight: str = "normal") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="middle">{escape(words)}</text>'
    )


def _box(box: Box) -> str:
    name = box.name.removeprefix("stratagem").removeprefix(".")
    short = name.removeprefix(f"{_package(box.name)}.") if _package(box.name) else name
    words = f"{short or 'stratagem'} ({box.modules})"
    size = 12 if len(words) < 22 else 10
    return (
        f'<rect x="{box.x:g}" y="{box.y:g}" width="{WIDTH:g}" height="{HEIGHT:g}" rx="5"/>'
        + _text(box.x + WIDTH / 2, box.y + 20, words, size)
    )


def _arrow(a: Box, b: Box) -> str:
    x1, y1, x2, y2 = a.x + WIDTH / 2, a.y + HEIGHT, b.x + WIDTH / 2, b.y
    bend = (y2 - y1) / 2
    return (
        f'<path d="M{x1:g},{y1:g} C{x1:g},{y1 + bend:g} {x2:g},{y2 - bend:g} {x2:g},{y2:g}" '
        'marker-end="url(#a)"/>'
    )


def main() -> None:
    """Draw the picture, or say what is wrong."""
    if "--draw" in sys.argv[1:]:
        PICTURE.write_text(draw(), encoding="utf-8")
        return
    found = list(complaints())
    sys.stdout.writelines(f"{each}\n" for each in found)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
