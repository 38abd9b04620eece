"""Machine code on a GPU: modules loaded from cubins or PTX text, and their functions.

Invariant: a function is loaded whole when it is asked for, never in the middle of a capture, and
its limits are raised before a launch needs them, or the error names kernel and limit. A module is
unloaded when none of its functions is held any more, at the next load.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.errors import InternalError, UserError
from .context import Context
from .cuda_api import api, call, describe

PLAIN_SHARED = 48 << 10  # dynamic shared memory that needs no leave
LOG_BYTES = 16 << 10
PORTABLE_CLUSTER = 8
FUNCTION_FACTS = {
    "threads": "MAX_THREADS_PER_BLOCK",
    "static_shared_bytes": "SHARED_SIZE_BYTES",
    "local_bytes": "LOCAL_SIZE_BYTES",
    "registers": "NUM_REGS",
}


class Module:
    """Loaded machine code, and its functions."""

    def __init__(self, device: Context, data: bytes) -> None:
        self.device = device
        # Whoever launches a function holds it, and it holds its module.
        self._functions: weakref.WeakValueDictionary[str, Function] = weakref.WeakValueDictionary()
        self.handle: Any = None
        device.activate()
        if data[:4] == b"\x7fELF":
            self.handle = call("cuModuleLoadData", data)
        else:
            self.handle = self._compiled(data)

    def _compiled(self, text: bytes) -> Any:
        """PTX text compiled by the driver; an error carries its log."""
        kinds = api().CUjit_option
        log = bytearray(LOG_BYTES)
        options = [kinds.CU_JIT_ERROR_LOG_BUFFER, kinds.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        values = [log, LOG_BYTES]
        status, handle = api().cuModuleLoadDataEx(text + b"\0", len(options), options, values)
        if status:
            said = log.split(b"\0")[0].decode(errors="replace").strip()
            raise InternalError(
                "ptx driver", f"the driver cannot compile this PTX: {describe(status)}\n{said}"
            )
        return handle

    def __del__(self) -> None:
        if self.handle is not None:  # a collector may run in the middle of a capture
            self.device.retired.append(self.handle)

    def function(self, name: str, shared_bytes: int = 0, cluster: Sequence[int] = ()) -> Function:
        """An entry by name, allowed this much dynamic shared memory and clusters of this size."""
        found = self._functions.get(name)
        if found is None:
            found = self._functions[name] = Function(self, name)
        found.allow(shared_bytes, cluster)
        return found


class Function:
    """An entry of a module: handle, name and the facts the driver knows of it."""

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.device, self.name = module, module.device, name
        self.device.activate()
        self.handle = call("cuModuleGetFunction", module.handle, name.encode(), during=name)
        call("cuFuncLoad", self.handle, during=name)  # now, not in the middle of a capture
        self.facts = {fact: self._attribute(kind) for fact, kind in FUNCTION_FACTS.items()}
        self._shared = PLAIN_SHARED
        self._wide = False

    def __repr__(self) -> str:
        return f"Function({self.name}, {self.facts})"

    def _attribute(self, kind: str) -> int:
        kinds = api().CUfunction_attribute
        attribute = getattr(kinds, f"CU_FUNC_ATTRIBUTE_{kind}")
        return int(call("cuFuncGetAttribute", attribute, self.handle, during=self.name))

    def allow(self, shared_bytes: int, cluster: Sequence[int] = ()) -> None:
        """Raise the limits of the function as far as a launch needs."""
        kinds = api().CUfunction_attribute
        if shared_bytes > self._shared:
            static = self.facts["static_shared_bytes"]
            limit = self.device.attributes["max_shared_memory_per_block_optin"] - static
            if shared_bytes > limit:
                raise UserError(
                    f"the kernel {self.name} needs too much shared memory",
                    op="launch",
                    expected=f"at most {limit} bytes on {self.device.attributes['name']}"
                    + (f" beside its own {static}" if static else ""),
                    got=f"{shared_bytes} bytes",
                    hint="smaller tiles or fewer stages",
                )
            kind = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuFuncSetAttribute", self.handle, kind, shared_bytes, during=self.name)
            self._shared = shared_bytes
        if int(np.prod(cluster or (1,))) > PORTABLE_CLUSTER and not self._wide:
            kind = kinds.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            call("cuFuncSetAttribute", self.handle, kind, 1, during=self.name)
            self._wide = True
