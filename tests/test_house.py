"""The habits of the house, read from the source with `ast`: imports, size, words, errors.

Every check gathers all that breaks its rule, so that one run names all of it. A file or function
that is better long says so in its module's docstring: "long because" for a file, the function's
name for a function.
"""

from __future__ import annotations

import ast
import builtins
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "tilegrad"
# A folder imports only folders of earlier steps; folders of one step do not see each other.
STEPS = [
    {"core"},
    {"ir"},
    {"graph", "tile"},
    {"kernels", "runtime"},
    {"schedule", "targets"},
    {"compiler"},
    {"tune"},
    {"tensor"},
    {"nn"},
    {"quant"},
    {"exchange"},
    {"models"},
    {"generate"},
    {"train"},
    {"chip", "serve"},
    {"cli"},
]
STEP_OF = {folder: number for number, step in enumerate(STEPS) for folder in step}
FILE_LINES, FUNCTION_LINES, COLUMNS = 570, 48, 100  # as the formatter lays them out
BY_HAND = 50  # tables that the formatter leaves alone
ABOVE = {"tensor", "nn", "quant", "exchange", "models", "generate", "train"}
ASKS = {  # what a person asks of a Target by name
    "tensor/bundle.py",
    "tensor/explain.py",
}
STANDALONE = {"targets/llvm/probe.py"}  # run by path in a child process, answers by printing
# Words of other projects for what has a word of its own here (docs/vocabulary.md).
FOREIGN_WORDS = {
    "uop",
    "uops",
    "src",
    "srcs",
    "payload",
    "sink",
    "rawbuf",
    "rawbuffer",
    "opts",
    "knob",
    "knobs",
    "sint",
    "renderer",
    "codegen",
    "qtype",
    "addrspace",
    "einops",
}
# Words that do not say what a name holds, and where one is the word of a field of its own.
VAGUE_WORDS: dict[str, tuple[str, ...]] = {
    "again": (),
    "beside": (),
    "both": (),
    "calls": (
        "serve/answer/",  # calls of tools, as the protocols name them
        "serve/api/",
        "cli/bench_serve.py",  # the Calls of a load
        "serve/load/",
        "runtime/profile.py",  # of a kernel, as profilers say
    ),
    "exclusive": (
        "graph/",  # an exclusive product: without the element itself
        "tensor/",  # exclusive ownership of memory
    ),
    "fixed": (  # fixed point
        "chip/rtl/emit.py",
        "core/fixed.py",
        "graph/",
        "quant/fixed.py",
        "schedule/",
        "targets/npu/",
    ),
    "handed": (),
    "level": (
        "chip/explore/",  # a Level of an Accelerator's memories
        "chip/pareto.py",
        "cli/chip_explore.py",
        "compiler/explain.py",  # how deep an explanation goes
        "cli/explain.py",
        "tensor/explain.py",
        "cli/main.py",  # of logging
        "cli/serve.py",
        "core/config.py",
        "generate/grammar.py",
        "targets/llvm/driver.py",  # of optimisation
        "targets/llvm/target.py",  # of caches
        "targets/npu/device.py",  # of detail, at which a chip is simulated
        "targets/npu/kernel.py",
        "tensor/convert.py",
        "kernels/",  # of the tile language: portable or placed
        "schedule/call.py",
        "tensor/kernel.py",
        "tile/",
    ),
    "places": (),
    "slot": (  # a Slot, or a running Request's row of the state; a ring has stages
        "compiler/",
        "generate/",
        "graph/draw",
        "kernels/draw.py",
        "runtime/",
        "schedule/",
        "targets/llvm/launcher.py",
        "targets/llvm/table.py",
        "targets/llvm/workers.py",
        "targets/npu/device.py",
    ),
    "thin": (),
    "walk": (  # over Nodes and other trees; data is looped over or swept
        "graph/",
        "ir/",
        "runtime/bundle.py",  # os.walk
        "schedule/",  # walk_down
        "targets/llvm/emit.py",
        "targets/ptx/",
        "tensor/container.py",
        "tile/",
    ),
    "walked": (),
    "walker": ("tile/",),
    "walkers": (),
    "walks": (),
}
# Names that say too little in a folder: there a group is one of rows, and a Region is a Region.
OF_WHAT = {"schedule/": {"group", "groups", "group_of"}}
AMOUNTS = {"LEAST", "FEW", "MOST"}  # constants that do not say of what
# Files of one name that are the same thing of different owners.
SAME_FILES = {
    "kernels": {"plan.py", "reference.py", "shape.py"},
    "targets": {
        "device.py",
        "driver.py",
        "emit.py",
        "emit_memory.py",
        "emit_shape.py",
        "language.py",
        "launcher.py",
        "rules.py",
        "target.py",
    },
}
MACHINE = re.compile(r"(cpu|gpu|npu|cuda|wgmma|mma|tdp|amx|sm_\d+a?|[ah][12]00|ptx|llvm)\b(?!-)")
# The machine that a PlanTable was measured on, and that a tuner measures on, has a name.
NAMED = {"core/target.py"}
HOMELESS = {"utils", "util", "helpers", "helper", "common", "misc"}
LONG_SAYS_WHY = re.compile(r"long because|why (?:the file|it) is long")
# Methods of a protocol that are named as ops: the docstring of their class speaks for all.
ROWS = re.compile(r"Operations\.\w+")
PRAGMA = re.compile(r"\s*#\s*(?:fmt|type|noqa|ruff)\b.*")
# What Python's own protocols ask a method to raise.
PROTOCOL = {
    "AttributeError": {"__getattr__", "__getattribute__", "__delattr__", "__setattr__"},
    "KeyError": {"__getitem__", "__delitem__", "__missing__"},
    "IndexError": {"__getitem__"},
    "StopIteration": {"__next__"},
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """One file of the package."""

    def __init__(self, path: Path, root: Path = PACKAGE) -> None:
        self.name = path.relative_to(root).as_posix()
        self.text = path.read_text()
        self.lines = self.text.splitlines()
        self.parts = self.name.split("/")
        self.folder = self.parts[0] if len(self.parts) > 1 else ""

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree) or ""

    def functions(self) -> Iterator[Function]:
        """Every function, methods and nested ones too."""
        for node in self.nodes:
            if isinstance(node, Function):
                yield node


SOURCES = [Source(path) for path in sorted(PACKAGE.rglob("*.py"))]
# The simulator of PTX, a package beside tilegrad: judged alike in size and words.
SIMULATOR = [Source(p, PACKAGE.parent) for p in sorted((PACKAGE.parent / "ptxsim").glob("*.py"))]


def report(broken: list[str]) -> None:
    """Fail with one line for each thing that breaks the rule."""
    assert not broken, f"{len(broken)} found:\n" + "\n".join(broken)


# ---- imports --------------------------------------------------------------------------------


def imported(source: Source) -> Iterator[tuple[str, int]]:
    """Folders of ours that a file imports, with the line."""
    here = source.parts[:-1]
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = here[: len(here) - (node.level - 1)]
                path = base + (node.module.split(".") if node.module else [])
            elif node.module and node.module.split(".")[0] == "tilegrad":
                path = node.module.split(".")[1:]
            else:
                continue
            names = [path[0]] if path else [alias.name for alias in node.names]
            yield from ((name, node.lineno) for name in names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "tilegrad" and len(parts) > 1:
                    yield parts[1], node.lineno


def test_imports_go_one_way() -> None:
    broken = []
    for source in SOURCES:
        if not source.folder:
            continue  # the package's own __init__ stands above all folders
        for name, line in imported(source):
            if name in (source.folder, "__version__"):
                continue
            if name not in STEP_OF or STEP_OF[name] >= STEP_OF[source.folder]:
                broken.append(f"{source.name}:{line} {source.folder} imports {name}")
    report(broken)


def test_every_folder_has_its_step() -> None:
    folders = {source.folder for source in SOURCES if source.folder}
    assert folders <= set(STEP_OF), folders - set(STEP_OF)


def test_targets_do_not_see_each_other() -> None:
    broken = []
    for source in SOURCES:
        if source.folder != "targets" or len(source.parts) < 3:
            continue
        own = source.parts[1]
        for node in source.nodes:
            if isinstance(node, ast.ImportFrom) and node.level == 2 and node.module:
                if node.module.split(".")[0] != own:
                    broken.append(f"{source.name}:{node.lineno} sees {node.module}")
    report(broken)


def test_the_simulator_is_beside() -> None:
    """The simulator knows nothing of tilegrad, and only tests and benches know it."""
    root = PACKAGE.parents[1]
    examples = [Source(p, root) for p in sorted((root / "examples").rglob("*.py"))]
    broken = []
    for own, wanted in ((SIMULATOR, "tilegrad"), ([*SOURCES, *examples], "ptxsim")):
        for source in own:
            for node in source.nodes:
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                if any(name.split(".")[0] == wanted for name in names):
                    broken.append(f"{source.name}:{node.lineno} imports {wanted}")
                if isinstance(node, ast.ImportFrom) and own is SIMULATOR and node.level > 1:
                    broken.append(f"{source.name}:{node.lineno} leaves its package")
    assert SIMULATOR and SOURCES and examples
    report(broken)


def test_nothing_above_the_compiler_knows_the_machine() -> None:
    """Models, layers and Tensors import no kernels and no targets, and hold no Target."""
    broken = []
    for source in SOURCES:
        if source.folder not in ABOVE or source.name in ASKS:
            continue
        for node in source.nodes:
            if isinstance(node, ast.ImportFrom):
                parts = (node.module or "").split(".")
                names = {alias.name for alias in node.names}
                known = {"kernels", "targets"} & {*parts[:1], *(names if not node.module else ())}
                asked = names & {"Target", "target_for", "target_of"}
                for name in known | asked:
                    broken.append(f"{source.name}:{node.lineno} imports {name}")
    report(broken)


def machine_tests(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Comparisons with, and searches for, the name of a machine, a device or a unit."""

    def named(node: ast.AST) -> str:
        constants = [n for n in ast.walk(node) if isinstance(n, ast.Constant)]
        texts = [n.value for n in constants if isinstance(n.value, str)]
        return next((text for text in texts if MACHINE.match(text)), "")

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for side in sides:
                if isinstance(side, ast.Constant | ast.Tuple | ast.List | ast.Set):
                    yield named(side), node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("startswith", "endswith"):
                yield named(node), node.lineno


def test_no_one_asks_for_a_machine_by_name() -> None:
    """Outside of targets/, what a machine can do is read from the facts of its Target, and where
    memory lies from its Device."""
    broken = []
    for source in SOURCES:
        if source.folder != "targets" and source.name not in NAMED:
            found = [(text, line) for text, line in machine_tests(source.tree) if text]
            broken += [f"{source.name}:{line} asks for {text!r}" for text, line in found]
    report(broken)


def test_init_files_only_export() -> None:
    broken = []
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    for source in SOURCES:
        if source.parts[-1] != "__init__.py":
            continue
        for node in source.tree.body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            lazy = isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
            typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            if source.name == "tensor/__init__.py" and isinstance(node, ast.ClassDef | ast.Expr):
                continue  # the folder is callable: tilegrad.tensor([1, 2]) as in PyTorch
            if not (docstring or lazy or typing or isinstance(node, allowed)):
                broken.append(f"{source.name}:{node.lineno} {type(node).__name__}")
    report(broken)


# ---- one place each -------------------------------------------------------------------------


def test_environment_is_read_in_one_file() -> None:
    broken = []
    for source in SOURCES:
        if source.name == "core/config.py" or source.name in STANDALONE:
            continue
        for node in source.nodes:
            name = node.attr if isinstance(node, ast.Attribute) else ""
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                name = next((a.name for a in node.names if a.name in ("environ", "getenv")), "")
            if name in ("environ", "environb", "getenv", "putenv"):
                broken.append(f"{source.name}:{node.lineno} {name}")
    report(broken)


def test_locks_are_made_in_one_file() -> None:
    """A lock of `core/lock.py` can be used in a forked child; a plain one may hang it."""
    broken = []
    for source in SOURCES:
        for node in source.nodes:
            if isinstance(node, ast.Call) and source.name != "core/lock.py":
                name = ast.unparse(node.func)
                if name in ("threading.Lock", "threading.RLock", "Lock", "RLock"):
                    broken.append(f"{source.name}:{node.lineno} {name}")
    report(broken)


def test_only_the_command_line_prints() -> None:
    broken = []
    for source in SOURCES:
        if source.folder == "cli" or source.name in STANDALONE:
            continue
        for node in source.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "print":
                    broken.append(f"{source.name}:{node.lineno}")
    report(broken)


def test_no_file_without_a_home() -> None:
    report([s.name for s in SOURCES if Path(s.name).stem in HOMELESS])


def test_depth() -> None:
    report([s.name for s in SOURCES if len(s.parts) > 3])


# ---- errors ---------------------------------------------------------------------------------


def raised(function: str, node: ast.AST) -> Iterator[tuple[str, str, int]]:
    """(innermost function, name of the class raised, line) of every raise of a class."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield from raised(child.name, child)
            continue
        if isinstance(child, ast.Raise) and child.exc is not None:
            what = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            name = what.attr if isinstance(what, ast.Attribute) else getattr(what, "id", "")
            yield function, name, child.lineno
        yield from raised(function, child)


def test_raises_are_our_errors() -> None:
    theirs = {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    broken = []
    for source in SOURCES:
        if source.name in STANDALONE:
            continue
        for function, name, line in raised("", source.tree):
            if name in theirs and function not in PROTOCOL.get(name, ()):
                broken.append(f"{source.name}:{line} {function} raises {name}")
    report(broken)


# ---- size -----------------------------------------------------------------------------------


def test_lines_fit() -> None:
    report(
        [
            f"{source.name}:{number} {len(line)} columns"
            for source in SOURCES + SIMULATOR
            for number, line in enumerate(source.lines, 1)
            if len(PRAGMA.sub("", line)) > COLUMNS
        ]
    )


def test_long_files_say_why() -> None:
    report(
        [
            f"{source.name} {len(source.lines)} lines"
            for source in SOURCES + SIMULATOR
            if len(source.lines) > FILE_LINES
            and source.parts[-1] != "__init__.py"
            and not LONG_SAYS_WHY.search(" ".join(source.docstring.split()))
        ]
    )


def length(function: Function) -> int:
    """Lines of what a function does: signature and docstring are not counted."""
    body = function.body
    first = body[1] if ast.get_docstring(function) is not None and len(body) > 1 else body[0]
    return (function.end_lineno or 0) - first.lineno + 1


def test_long_functions_are_named() -> None:
    broken = []
    for source in SOURCES + SIMULATOR:
        for function in source.functions():
            lines = length(function)
            named = re.search(rf"\b{re.escape(function.name)}\b", source.docstring)
            if lines > FUNCTION_LINES and not named:
                broken.append(f"{source.name}:{function.lineno} {function.name} {lines} lines")
    report(broken)


def test_most_files_and_functions_are_short() -> None:
    files = [len(source.lines) for source in SOURCES]
    lengths = [length(f) for source in SOURCES for f in source.functions()]
    assert sum(n <= FILE_LINES for n in files) > 0.85 * len(files)
    assert sum(n <= FUNCTION_LINES for n in lengths) > 0.98 * len(lengths)


# ---- words ----------------------------------------------------------------------------------


def test_modules_say_what_they_are_for() -> None:
    report([source.name for source in SOURCES + SIMULATOR if not source.docstring])


def public(source: Source) -> Iterator[tuple[str, Function]]:
    """Public functions and methods of public classes, with their qualified names."""
    for node in source.tree.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield node.name, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for method in node.body:
                if isinstance(method, Function) and not method.name.startswith("_"):
                    yield f"{node.name}.{method.name}", method


def decorated(function: Function, *names: str) -> bool:
    """Whether a decorator's last word is one of the names."""
    return any(
        ast.unparse(d).split("(")[0].split(".")[-1] in names for d in function.decorator_list
    )


def test_public_functions_are_typed() -> None:
    broken = []
    for source in SOURCES + SIMULATOR:
        for name, function in public(source):
            given = function.args
            bare = [
                a.arg
                for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)
                if a.annotation is None and a.arg not in ("self", "cls")
            ]
            bare += [a.arg for a in (given.vararg, given.kwarg) if a and a.annotation is None]
            if function.returns is None:
                bare.append("return")
            if bare:
                broken.append(f"{source.name}:{function.lineno} {name}: {', '.join(bare)}")
    report(broken)


def test_public_functions_have_a_docstring() -> None:
    report(
        [
            f"{source.name}:{function.lineno} {name}"
            for source in SOURCES + SIMULATOR
            for name, function in public(source)
            if not ast.get_docstring(function)
            and not decorated(function, "setter", "overload")
            and not ROWS.fullmatch(name)
        ]
    )


def test_public_classes_have_a_docstring() -> None:
    report(
        [
            f"{source.name}:{node.lineno} {node.name}"
            for source in SOURCES + SIMULATOR
            for node in source.tree.body
            if isinstance(node, ast.ClassDef)
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ]
    )


def names_in(source: Source) -> Iterator[tuple[str, int]]:
    """Every name a file makes."""
    for node in source.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno


def test_one_word_per_concept() -> None:
    broken = []
    for source in SOURCES + SIMULATOR:
        for name, line in names_in(source):
            # PyTorch's name of an argument: scatter(dim, index, src), Transformer(src, tgt)
            theirs = {"src"} if source.folder in ("tensor", "nn") else set()
            if (FOREIGN_WORDS - theirs) & set(name.lower().split("_")):
                broken.append(f"{source.name}:{line} {name}")
    report(broken)


def test_names_say_what_they_hold() -> None:
    broken = []
    for source in SOURCES:
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            if token.type == tokenize.NAME:
                words = [
                    word
                    for word in token.string.lower().split("_")
                    if word in VAGUE_WORDS and not source.name.startswith(VAGUE_WORDS[word])
                ]
                words += [
                    token.string
                    for folder, names in OF_WHAT.items()
                    if source.name.startswith(folder) and token.string in names
                ]
                if words or token.string.strip("_") in AMOUNTS:
                    broken.append(f"{source.name}:{token.start[0]} {token.string}")
    report(broken)


def test_file_names_are_single() -> None:
    """No file name stands twice under one folder for different things."""
    broken = []
    for folder in sorted(STEP_OF):
        known: dict[str, str] = {}
        for source in SOURCES:
            name = source.parts[-1]
            if source.folder != folder or name == "__init__.py":
                continue
            if name in known and name not in SAME_FILES.get(folder, ()):
                broken.append(f"{known[name]} {source.name}")
            known.setdefault(name, source.name)
    report(broken)


@pytest.mark.parametrize("folder", ["src", "tests", "bench", "examples", "docs"])
def test_text_is_about_the_project(folder: str) -> None:
    """No paths of one machine and no leftovers of work in progress."""
    root = PACKAGE.parents[1] / folder
    pattern = re.compile(r"/(?:root|work)/\w|\b(?:TODO|FIXME|XXX|HACK)\b")
    broken = []
    for path in sorted(root.rglob("*")) if root.is_dir() else []:
        if path.suffix not in (".py", ".md", ".txt", ".toml") or path.name == "test_house.py":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if pattern.search(line):
                broken.append(f"{path.relative_to(root)}:{number} {line.strip()[:80]}")
    report(broken)


def test_few_places_are_aligned_by_hand() -> None:
    """`fmt: skip` is for tables that are better aligned by hand."""
    root, mark = PACKAGE.parents[1], "# fmt: " + "skip"
    found = [
        f"{path.relative_to(root)}:{number}"
        for folder in ("src", "tests", "bench", "examples")
        for path in sorted((root / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.rstrip().endswith(mark)
    ]
    assert len(found) <= BY_HAND, f"{len(found)} found:\n" + "\n".join(found)
