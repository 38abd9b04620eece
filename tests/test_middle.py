"""The middle of the house (kernels, tile, schedule, targets): how much there is to read.

A reader takes this path from Tensor to machine code, so its size, its widest classes and its import
cycles are counted. The sizes are as counted, so that a change says what it adds and takes away.
Code lines are neither blank nor comment nor docstring; commas are no tokens.

`python tests/test_middle.py` prints the figures by folder.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "tilegrad"
FOLDERS = ("kernels", "tile", "schedule", "targets")
LINES, TOKENS = 36_458, 383_044  # goals: 32,000 and 315,000
METHODS = 40  # of a class, inherited ones included
WIDE: dict[str, int] = {}  # classes that have more, and how many
FIRST = 250  # code lines of a kernel that a reader opens first
READ_FIRST = (
    "kernels.matmul.wide",
    "kernels.attention.forward",
    "kernels.paged.attention",
    "kernels.quantised.gpu_rows",
    "schedule.threads.reductions",  # softmax and other rows
)
# All of attention: whole files that are about it, wherever they are, and folders with all below.
# Not counted: rows that tables of all ops have (graph/grad, batch, forward, interpret, ops and
# schedule/cost, families), layers and models that call it (nn/transformer, models), who gets which
# page (generate/cache), and what a chip under design makes of it (chip/workload).
ATTENTION = (
    "kernels/attention",
    "kernels/attention_cpu",
    "kernels/paged",
    "schedule/attention.py",
    "schedule/paged.py",
    "compiler/expand.py",
    "graph/attention.py",
    "graph/attention_types.py",
    "graph/axes.py",  # which recognition of attention alone reads
    "graph/paged_reference.py",
    "graph/paged_types.py",
    "graph/recognize_attention.py",
    "graph/recognize_extras.py",
    "graph/recognize_mask.py",
    "graph/recognize_parts.py",
    "graph/recognize_scores.py",
    "graph/recognize_softmax.py",
    "tensor/attention.py",
    "tensor/heads.py",
    "tensor/paged.py",
    "nn/attention.py",
    "nn/paged.py",
)
ATTENTION_LINES = 6_475  # goal: 6,500
CYCLES: list[set[str]] = []  # files that import one another, deferred imports included
SILENT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
DEFINED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def trees() -> dict[str, tuple[Path, ast.Module]]:
    """All files by their name as modules below the package."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path, ast.parse(path.read_text())
    return found


def docstrings(tree: ast.AST) -> set[int]:
    """The lines of all docstrings."""
    found: set[int] = set()
    for node in ast.walk(tree):
        first = node.body[0] if isinstance(node, DEFINED) and node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            if isinstance(first.value.value, str):
                found.update(range(first.lineno, (first.end_lineno or 0) + 1))
    return found


def size(path: Path, tree: ast.AST) -> tuple[int, int]:
    """Code lines and tokens of a file."""
    skipped, lines, tokens = docstrings(tree), set(), 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in SILENT or (token.type == tokenize.STRING and token.start[0] in skipped):
            continue
        lines.update(range(token.start[0], token.end[0] + 1))
        tokens += token.string != ","
    return len(lines), tokens


def sizes() -> dict[str, tuple[int, int]]:
    """Code lines and tokens by folder."""
    found: dict[str, tuple[int, int]] = {}
    for path, tree in trees().values():
        folder = path.parent.relative_to(PACKAGE).as_posix()
        before, more = found.get(folder, (0, 0)), size(path, tree)
        found[folder] = before[0] + more[0], before[1] + more[1]
    return found


def lines_of_attention() -> int:
    """Code lines of all that is about attention."""
    found: list[Path] = []
    for name in ATTENTION:
        path = PACKAGE / name
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return sum(size(path, ast.parse(path.read_text()))[0] for path in found)


def methods() -> dict[str, set[str]]:
    """The methods of every class, inherited ones included, by file and name. A base is the class of
    that name in the same file, else all of that name."""
    bases: dict[str, set[str]] = {}
    own: dict[str, set[str]] = {}
    named: dict[str, list[str]] = {}
    for module, (_, tree) in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                name = f"{module}.{node.name}"
                found = [b.value if isinstance(b, ast.Subscript) else b for b in node.bases]
                bases[name] = {
                    b.attr if isinstance(b, ast.Attribute) else ast.unparse(b) for b in found
                }
                own[name] = {m.name for m in node.body if isinstance(m, FUNCTIONS)}
                named.setdefault(node.name, []).append(name)

    def all_of(name: str, seen: frozenset[str]) -> set[str]:
        found = set(own[name])
        for base in bases[name]:
            near = f"{name.rpartition('.')[0]}.{base}"
            for one in [near] if near in own else named.get(base, ()):
                if one not in seen:
                    found |= all_of(one, seen | {name})
        return found

    return {name: all_of(name, frozenset()) for name in own}


def imports() -> dict[str, set[str]]:
    """Which file of these imports which, wherever in it the import stands."""
    found: dict[str, set[str]] = {}
    for name, (path, tree) in trees().items():
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        found[name] = set()
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = package[: len(package) - node.level + 1]
            whole = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                options = (f"{whole}.{alias.name}", whole)
                found[name].update([o for o in options if o in trees() and o != name][:1])
    return found


def cycles() -> Iterator[set[str]]:
    """Files that reach one another."""
    edges = imports()
    reach: dict[str, set[str]] = {}
    for name in edges:
        seen, waiting = set(), list(edges[name])
        while waiting:
            one = waiting.pop()
            if one not in seen:
                seen.add(one)
                waiting.extend(edges[one])
        reach[name] = seen
    done: set[str] = set()
    for name in sorted(edges):
        if name in reach[name] and name not in done:
            found = {other for other in reach[name] if name in reach[other]}
            done |= found
            yield found


def test_the_middle_does_not_grow() -> None:
    lines, tokens = (sum(column) for column in zip(*sizes().values(), strict=True))
    assert lines <= LINES and tokens <= TOKENS, f"{lines} code lines, {tokens} tokens"


def test_attention_is_small() -> None:
    assert all((PACKAGE / name).exists() for name in ATTENTION)
    assert lines_of_attention() <= ATTENTION_LINES, f"{lines_of_attention()} code lines"


def test_kernels_that_are_read_first_are_short() -> None:
    long = {name: lines for name in READ_FIRST if (lines := size(*trees()[name])[0]) > FIRST}
    assert not long


def test_no_class_has_many_methods() -> None:
    wide = {name: len(found) for name, found in methods().items() if len(found) > METHODS}
    more = {name: count for name, count in wide.items() if count > WIDE.get(name, METHODS)}
    assert not more, f"more methods than before: {more}"
    gone = {name for name in WIDE if wide.get(name, 0) < WIDE[name]}
    assert not gone, f"these have fewer now, lower WIDE: {gone}"


def test_no_import_cycles() -> None:
    found = [sorted(one) for one in cycles()]
    new = [one for one in found if not any(set(one) <= known for known in CYCLES)]
    assert not new, f"files that import one another: {new}"


if __name__ == "__main__":
    for where, (lines_, tokens_) in sorted(sizes().items()):
        print(f"{where:28}{lines_:8,}{tokens_:9,}")
    totals = [sum(column) for column in zip(*sizes().values(), strict=True)]
    print(f"{'together':28}{totals[0]:8,}{totals[1]:9,}")
    print(f"{'of attention, everywhere':28}{lines_of_attention():8,}")
    for class_, many in sorted(methods().items(), key=lambda item: -len(item[1])):
        if len(many) > METHODS:
            print(f"{len(many):4} methods: {class_}")
    for one in cycles():
        print("cycle:", ", ".join(sorted(one)))
