"""LaunchGraph: a sequence of launches and copies captured as a CUDA graph and launched whole.

Launches are captured from a stream kept for that, so a graph holds what the stream would have
run, and nothing that others do meanwhile disturbs it; an Entry that waits for its dependency
itself is captured with a programmatic edge from the kernel before it. Invariant: `operations` is
what the next launch runs; kernels already under way are not touched by a patch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from ...core.errors import InternalError, TilegradError
from ...runtime.launcher import Operation
from .context import Context, Event
from .cuda_api import Recent, api, call


def run_directly(
    device: Context, operations: Iterable[Operation], after_kernel: bool = False
) -> None:
    """Put operations on the stream one by one; `after_kernel`: what comes before is ours."""
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
        prepared.last = None
        prepared.point(operation.pointers)
        (prepared.capture if captured else prepared.start)(after_kernel)


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
            if new.prepared is not old.prepared or new.bytes != old.bytes:
                return False
            if new.pointers != old.pointers:
                if new.prepared is None:
                    return False
                changed.append(number)
        for number in changed:
            operation = operations[number]
            prepared = operation.prepared
            prepared.last = None
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


__all__ = ["LaunchGraph", "Operation", "run_directly"]
