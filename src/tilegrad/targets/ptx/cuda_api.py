"""The thin layer between tilegrad and `cuda.bindings.driver`: one function that calls and checks.

`cuda.bindings` is imported at the first call, so machines without CUDA never see it; tests put an
object of their own in its place. Invariant: no status of the driver is dropped; an error names the
call, the driver's words for it, and, where a kernel may be at fault, the kernel launched last.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ...core.errors import InternalError, MemoryLimitError, UserError

OUT_OF_MEMORY = 2
NO_DEVICE = (100, 101, 3, 34, 803, 804)
# Errors that a kernel leaves behind: every later call of the context reports them too.
FAULTS = {
    700: "an address outside of any allocation was read or written",
    702: "the kernel ran too long and was stopped",
    710: "an assertion failed in the kernel",
    714: "the call stack of the kernel was damaged",
    715: "the kernel ran an illegal instruction (a trap counts as one)",
    716: "a misaligned address was read or written",
    717: "an instruction was given an address of the wrong memory",
    718: "the kernel jumped outside of its code",
    719: "the kernel failed in a way the driver does not name",
    720: "a cooperative launch asks for more blocks than fit at once",
    721: "the kernel used more of a tensor memory than it has",
}


class Recent:
    """What ran last, for error messages."""

    kernel: object = ""


_api: Any = None


def api() -> Any:
    """`cuda.bindings.driver`, initialised."""
    global _api
    if _api is None:
        _api = _open()
    return _api


def _open() -> Any:
    wrong: object = None
    try:
        import cuda.bindings
        from cuda.bindings import driver

        version = str(getattr(cuda.bindings, "__version__", "13"))
        wrong = version if version.split(".")[0] != "13" else None
    except ImportError as error:
        wrong = error
    if wrong is not None:
        raise UserError(
            "CUDA needs the package cuda-bindings",
            op="cuda",
            expected="cuda-bindings>=13.0,<14",
            got=wrong,
            hint='pip install "cuda-bindings>=13.0,<14"',
        )
    try:
        status = driver.cuInit(0)[0]
    except Exception as error:  # the library is missing; bindings differ in what they raise
        raise _absent(str(error).splitlines()[0] if str(error) else repr(error)) from None
    if status:
        raise _absent(str(status))
    return driver


def _absent(why: str) -> UserError:
    return UserError(
        "no NVIDIA GPU can be used here",
        op="cuda",
        expected="an NVIDIA driver and a GPU",
        got=why,
        hint="`nvidia-smi` shows what the driver sees; on the CPU everything runs with "
        'device="cpu"',
    )


def count() -> int:
    """How many GPUs there are; none without a driver that answers."""
    try:
        return int(call("cuDeviceGetCount"))
    except UserError:
        return 0


def call(name: str, *arguments: Any, during: str = "") -> Any:
    """Call the driver; gives what it returns beside the status (one value bare)."""
    status, *results = getattr(api(), name)(*arguments)
    if status:
        fail(name, status, during)
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def describe(status: Any) -> str:
    """The driver's name and words for a status."""
    words = []
    for name in ("cuGetErrorName", "cuGetErrorString"):
        error, text = getattr(api(), name)(status)
        if not error and text:
            words.append(text.decode() if isinstance(text, bytes) else str(text))
    return ": ".join(words) or str(status)


def fail(name: str, status: Any, during: str = "") -> NoReturn:
    """Raise the error for a status that is not success."""
    code = int(status)
    what = f"{name} said {describe(status)}" + (f" ({during})" if during else "")
    if code == OUT_OF_MEMORY:
        raise MemoryLimitError(f"the GPU has no more memory: {what}", op="cuda")
    if code in NO_DEVICE:
        raise _absent(what)
    if code in FAULTS:
        kernel = Recent.kernel or "none"
        raise InternalError(
            "ptx driver",
            f"{what}; {FAULTS[code]}. The kernel launched last was {kernel}; one "
            "before it may be at fault: TILEGRAD_CUDA_SYNC=1 waits after each launch and names it. "
            "The process cannot use this GPU any more",
        )
    raise InternalError("ptx driver", what)
