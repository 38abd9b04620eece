"""The steps of a Recipe on a GPU: one launch, a graph, or step by step.

One kernel is launched as it is. A sequence whose course is known (counters included) becomes a
graph for each choice of Symbols, kept for a few sets of addresses and patched for others; where a
value on the GPU decides the course, the host takes the steps and reads it.

A LaunchGraph is a sequence of launches and copies captured as a CUDA graph. Launches are captured
from a stream kept for that, so a graph holds what the stream would have run, and nothing that
others do meanwhile disturbs it; an Entry that waits for its dependency itself is captured with a
programmatic edge from the kernel before it. Invariant: `operations` is what the next launch runs;
kernels already under way are not touched by a patch; all of a run is on the Device's stream, and
every pointer that a kernel gets is a multiple of 16.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ...core.config import config
from ...core.errors import InternalError, TilegradError
from ...runtime.buffer import Buffer, size_class
from ...runtime.executable import Executable
from ...runtime.launcher import Captured, Launcher, Operation, SlotCopy, Steps
from ...runtime.profile import Profile, measured
from ...runtime.recipe import Recipe, Step
from .context import Context, Event
from .cuda_api import Recent, api, call
from .launch import Prepared
from .memory import GRANULE
from .program import Entry

GRAPHS = 4  # kept for one choice of Symbols
CAPTURE_LIMIT = 20_000  # operations in a graph


class CudaSteps(Steps):
    """The same with the graphs that were made of them, by the addresses in all Slots."""

    def __init__(self, launcher: CudaLauncher, symbols: Mapping[str, int]) -> None:
        launcher.device.activate()
        super().__init__(launcher, symbols)
        self.graphs: OrderedDict[tuple[int, ...], LaunchGraph] = OrderedDict()


class CudaLauncher(Launcher):
    """Runs a Recipe on a GPU."""

    steps_class = CudaSteps
    device: Context

    def __init__(self, recipe: Recipe, code: Mapping[str, Any], device: Context) -> None:
        super().__init__(recipe, code, device)
        self.entries = [Entry.from_text(text) for text in recipe.entries]
        if len(self.entries) != len(recipe.programs):
            raise InternalError("ptx launcher", "a Recipe of another target")
        self.functions = [
            module.function(name) for module, (name, _) in zip(self.code, recipe.programs)
        ]
        single = [step.kind for step in recipe.steps] == ["kernel"]
        self.single = recipe.steps[0] if single else None
        self.symbolic = self.symbolic or any(_is_symbolic(entry) for entry in self.entries)

    def prepare(self, step: Step, symbols: Mapping[str, int]) -> Prepared:
        """A kernel step as a launch but for its pointers."""
        return Prepared(self.functions[step.program], self.entries[step.program], symbols)

    def quick(self, executable: Executable) -> Callable[[], list[Buffer]] | None:
        """For one kernel with one new result and no Symbols: memory, pointers, launch."""
        step, recipe = self.single, self.recipe
        if step is None or self.symbolic or recipe.sites or executable.arenas:
            return None
        if executable.hidden or executable.aliases or len(executable.outputs) != 1:
            return None
        owner, given, _ = executable.outputs[0]
        if given >= 0:
            return None
        binding = executable.bound_to(None)
        prepared, size = binding.steps.launches[0], binding.output_bytes[0]
        device, slots, order = self.device, self.slots, list(step.slots)
        class_ = size_class(size, GRANULE)
        name, pool = device.name, device.pool

        def run() -> list[Buffer]:
            device.activate()
            block = pool.take(size, "", class_)
            slots[owner] = block.pointer
            prepared.launch(tuple([slots[s] for s in order]))
            return [Buffer(block.pointer, size, block, name)]

        return run

    # ---- running --------------------------------------------------------------------------

    def launch(self, steps: CudaSteps) -> None:
        """Put a run on the stream; waits for nothing unless a value decides the course."""
        self.device.activate()
        if self.single is not None:
            steps.launches[0].launch(tuple([self.slots[s] for s in self.single.slots]))
            return
        if self.decided or config().cuda_sync:
            run_directly(self.device, self.operations(steps))
            return
        key = tuple(self.slots)
        graph = steps.graphs.get(key)
        if graph is None:
            operations = list(self.operations(steps))
            if len(operations) > CAPTURE_LIMIT:
                run_directly(self.device, operations)
                return
            graph = steps.graphs[key] = self._graph(steps, operations)
        elif len(steps.graphs) > 1:
            steps.graphs.move_to_end(key)
        graph.launch()

    def _graph(self, steps: CudaSteps, operations: Sequence[Operation]) -> LaunchGraph:
        """A graph of operations: the oldest one patched, or a new one."""
        if len(steps.graphs) >= GRAPHS:
            _, oldest = steps.graphs.popitem(last=False)
            if oldest.patch(operations):
                return oldest
        return LaunchGraph(self.device, operations)

    def capture(
        self, steps: CudaSteps, slots: Sequence[int], copies: Sequence[SlotCopy]
    ) -> CudaCaptured:
        """One graph of all steps and copies."""
        self.refuse_decided("bind")
        return CudaCaptured(self, steps, slots, copies)


class CudaCaptured(Captured):
    """One graph that holds every kernel and copy with its pointers."""

    device: Context

    def __init__(
        self,
        launcher: CudaLauncher,
        steps: CudaSteps,
        slots: Sequence[int],
        copies: Sequence[SlotCopy],
    ) -> None:
        super().__init__(launcher, steps, slots, copies)
        self.device.activate()
        self.graph = LaunchGraph(self.device, self.operations, patched=False)  # most never are

    def point(self, slots: Sequence[int]) -> None:
        """Use these addresses from now on; the Device's lock is held."""
        self.device.activate()
        operations = self._operations(slots)
        if operations != self.operations and not self.graph.patch(operations):
            self.graph = LaunchGraph(self.device, operations)
        self.operations = operations

    def launch(self) -> None:
        """Put a run on the stream; waits for nothing."""
        device = self.device
        with device.lock:
            device.activate()
            if config().cuda_sync:
                run_directly(device, self.operations)
            else:
                self.graph.launch()

    def profile(self, name: str, runs: int, restore: Callable[[], None]) -> Profile:
        """Times of the operations of `runs` runs (the median counts), from a graph that has an
        event after each; `restore` puts back what a run changed."""
        device = self.device
        with device.lock:
            device.activate()
            apart = LaunchGraph(device, self.operations, timed=True)

            def whole() -> float:
                start, stop = Event(device).record(), Event(device)
                self.launch()
                return 1e6 * stop.record().seconds_since(start)

            def each() -> list[float]:
                apart.launch()
                device.synchronize()
                empty, *times = apart.times()
                return [max(0.0, taken - empty) for taken in times]

            how = "events between kernels of a graph, none overlapping, an event's cost taken off"
            about, parts = (name, device.name, how), map(self.described, self.operations)
            restore()
            whole()  # the first ones do not count
            each()
            return measured(about, parts, runs, restore, whole, each)


def _is_symbolic(entry: Entry) -> bool:
    """Whether a launch depends on a Symbol."""
    sizes: list[Any] = list(entry.grid)
    for kind, value in entry.arguments:
        if kind == "map":
            sizes += (*value.sizes, *value.strides)
        elif kind == "symbol":
            return True
    return not all(isinstance(size, int) for size in sizes)


# ---- graphs -------------------------------------------------------------------------------------


def run_directly(
    device: Context, operations: Iterable[Operation], after_kernel: bool = False
) -> None:
    """Put operations on the stream one by one; the first one waits for all that came before, or
    comes after a kernel as the others do."""
    for operation in operations:
        put(device, operation, after_kernel, captured=False)
        after_kernel = operation.prepared is not None


def put(device: Context, operation: Operation, after_kernel: bool, captured: bool) -> None:
    """Put one operation on the stream, or into the graph that is being captured."""
    prepared = operation.prepared
    if prepared is None:
        stream = device.capture_stream if captured else device.stream
        target, source = operation.pointers
        device.copy_bytes(target, source, operation.bytes, stream)
    else:
        prepared.point(operation.pointers)
        prepared.start(after_kernel, captured)


class LaunchGraph:
    """One instantiated graph; a timed one has events around its operations, which then do not
    overlap."""

    def __init__(
        self,
        device: Context,
        operations: Sequence[Operation],
        timed: bool = False,
        patched: bool = True,
    ) -> None:
        """`patched`: `patch` may be asked for; else it says no, and no node is looked up."""
        self.device, self.patched = device, patched
        self.operations = list(operations)
        count = len(self.operations) + 2 if timed else 0  # two first: what an event itself takes
        self.events = [Event(device) for _ in range(count)]
        self.nodes: list[Any] = []
        self.graph: Any = None
        self.executable: Any = None
        self._capture()
        self.executable = call("cuGraphInstantiate", self.graph, 0, during=self.describe())
        call("cuGraphUpload", self.executable, device.stream)

    def describe(self) -> str:
        """What it runs, for messages."""
        names = [o.prepared.entry.name if o.prepared else "copy" for o in self.operations]
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        return f"graph of {len(names)} operations: {shown}"

    def _capture(self) -> None:
        device, stream = self.device, self.device.capture_stream
        mode = api().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        call("cuStreamBeginCapture", stream, mode)
        try:
            for event in self.events[:2]:
                event.record_within(stream)
            after_kernel = False  # the first one waits for all that came before the graph
            for number, operation in enumerate(self.operations):
                put(device, operation, after_kernel and not self.events, captured=True)
                if self.patched:
                    self.nodes.append(self._last_node())
                after_kernel = operation.prepared is not None
                if self.events:
                    self.events[number + 2].record_within(stream)
        except BaseException:
            with contextlib.suppress(TilegradError):
                call("cuStreamEndCapture", stream)
            raise
        self.graph = call("cuStreamEndCapture", stream, during=self.describe())

    def _last_node(self) -> Any:
        """The node that was captured last."""
        _, _, _, nodes, _, count = call("cuStreamGetCaptureInfo", self.device.capture_stream)
        if int(count) != 1:
            raise InternalError("ptx graph", f"a launch left {count} ends in the capture")
        return nodes[0]

    def patch(self, operations: Sequence[Operation]) -> bool:
        """Run these from now on; False if they differ in more than pointers of kernels."""
        if not self.patched or len(operations) != len(self.operations):
            return False
        changed = []
        for number, (new, old) in enumerate(zip(operations, self.operations)):
            if new == old:
                continue
            if new.prepared is None or new.prepared is not old.prepared:
                return False
            changed.append((number, new))
        for number, operation in changed:
            prepared = operation.prepared
            prepared.point(operation.pointers)
            call(
                "cuGraphExecKernelNodeSetParams",
                self.executable,
                self.nodes[number],
                prepared.node_parameters(),
                during=prepared.entry.name,
            )
            self.operations[number] = operation
        return True

    def launch(self) -> None:
        """Run the graph on the stream."""
        call("cuGraphLaunch", self.executable, self.device.stream)
        Recent.kernel = self

    def times(self) -> list[float]:
        """Microseconds between the events of a timed graph, after a launch: what an event takes,
        then each operation and an event."""
        return [1e6 * b.seconds_since(a) for a, b in pairwise(self.events)]

    def __str__(self) -> str:
        return f"one of a {self.describe()}"

    def __del__(self) -> None:
        try:
            if self.executable is not None:
                api().cuGraphExecDestroy(self.executable)
            if self.graph is not None:
                api().cuGraphDestroy(self.graph)
        except Exception:
            return  # the interpreter is going down
