"""`tilegrad serve`: a model behind an address that OpenAI and Anthropic clients can use.

Invariant: stdout has the address once requests are served, and nothing else; progress and notices
go to stderr, so that both work piped and into files.
"""

from __future__ import annotations

import logging
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.config import config
from ..core.errors import UserError
from . import options
from .progress import Bars
from .replicas import serve_replicas
from .terminal import INTERRUPTED, put, status

Host = Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 is all of them.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")]
Name = Annotated[
    str | None,
    typer.Option(
        help="What clients call the model; by default, as it is given here.", show_default=False
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        help="A key that clients must have; may be repeated. TILEGRAD_API_KEYS has some too.",
        show_default=False,
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option("--api-key-file", help="A file of keys, one a line.", show_default=False),
]
Origins = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-origin",
        help="A site whose pages may use the server; may be repeated.",
        show_default=False,
    ),
]
Requests = Annotated[int, typer.Option(min=1, help="Requests that run at once at most.")]
Queue = Annotated[int, typer.Option("--max-queue", min=0, help="Requests that may wait.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds for one request.")]
Drain = Annotated[
    float, typer.Option(min=0.0, help="Seconds that requests have to end in after SIGTERM.")
]
Prompts = Annotated[
    bool, typer.Option("--log-prompts", help="Write what clients ask into the log.")
]
Prepare = Annotated[
    bool, typer.Option(help="Compile all steps before the first request, not as they are needed.")
]
Replicas = Annotated[
    int,
    typer.Option(min=1, help="Servers behind one address; --device may name several, with commas."),
]
Ray = Annotated[bool, typer.Option("--ray", help="Have Ray place and keep the replicas.")]
RayAddress = Annotated[
    str | None,
    typer.Option(help="Ray's head; without it, a Ray of this machine.", show_default=False),
]
Verbose = Annotated[bool, typer.Option("--log-requests", help="Log a line for each request.")]


def serve(
    model: options.Model,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Name = None,
    api_key: Keys = None,
    api_key_file: KeyFile = None,
    allow_origin: Origins = None,
    requests: Requests = 8,
    context: options.Context = None,
    device: options.Device = None,
    dtype: options.DType = None,
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDType = None,
    threads: options.Threads = None,
    determinism: options.Determinism = None,
    lora: options.Loras = None,
    speculate: options.Speculate = None,
    guesses: options.Guesses = None,
    random_weights: options.RandomWeights = False,
    prepare: Prepare = True,
    max_queue: Queue = 256,
    timeout: Timeout = 600.0,
    drain: Drain = 30.0,
    replicas: Replicas = 1,
    ray: Ray = False,
    ray_address: RayAddress = None,
    log_requests: Verbose = False,
    log_prompts: Prompts = False,
) -> None:
    """Serve a model over HTTP, as OpenAI's and Anthropic's clients expect it."""
    need_packages()
    import asyncio

    from ..serve.run import run_server
    from ..serve.settings import Settings

    log_at(logging.INFO if log_requests or log_prompts else logging.WARNING)
    keys = keys_of(api_key or [], api_key_file)
    engine = options.given(device=device, dtype=dtype, threads=threads, context=context)
    engine |= options.given(determinism=determinism, random_weights=random_weights or None)
    engine |= options.given(quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    engine |= options.adapters(lora) | options.speculation(speculate, guesses)
    with Bars() as bars:
        path = found(model, bars)
        settings = Settings(
            path,
            name or model,
            host=host,
            port=port,
            keys=keys,
            origins=tuple(allow_origin or ()),
            queue=max_queue,
            timeout=timeout,
            drain=drain,
            log_prompts=log_prompts,
            opening={**engine, "requests": requests, "prepare": prepare},
            sampling=advised(model),
        )
        said = Said(settings, bars)
        if replicas > 1 or ray:
            said.listens(port)
            bars.close()
            ended_by = serve_replicas(settings, replicas, ray, ray_address)
        else:
            told = said.stage, said.listens, said.ready
            ended_by = asyncio.run(run_server(settings, *told, said=status))
    status("the server has ended")
    if ended_by == signal.SIGINT:
        raise typer.Exit(INTERRUPTED)


def log_at(level: int) -> None:
    """Log what the server says from a level on, and warnings of others."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("tilegrad.serve").setLevel(level)


class Said:
    """What a person is told on the way."""

    def __init__(self, settings: Any, bars: Bars) -> None:
        self.settings, self.bars = settings, bars

    def stage(self, name: str, done: float, total: float) -> None:
        """How far opening the model is."""
        note = "compiled once, kept for later starts" if name == "prepare" else ""
        self.bars.stage(name, done, total, note)

    def listens(self, port: int) -> None:
        """The port is ours."""
        if self.settings.host not in ("127.0.0.1", "localhost", "::1") and not self.settings.keys:
            self.bars.line("warning: whoever reaches this machine can use the model (--api-key)")
        if find_spec("prometheus_client") is None:
            self.bars.line("warning: no /metrics, since prometheus_client is not installed")

    def ready(self, server: Any, port: int) -> None:
        """Requests are served."""
        self.bars.close()
        host = self.settings.host
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(host, host)
        address = f"http://{shown}:{port}"
        put(address)
        facts = server.model.facts
        status(
            f"{server.model.name} on {facts['device']}, {facts['requests']} requests at once, "
            f"{facts['context']} tokens of context, {facts['determinism']}; Ctrl-C ends it\n"
            + curl(address, server.model.name, bool(self.settings.keys))
        )


def curl(address: str, name: str, keyed: bool) -> str:
    """A line that tries the server."""
    key = "-H 'Authorization: Bearer KEY' " if keyed else ""
    return (
        f"curl {address}/v1/chat/completions {key}-H 'Content-Type: application/json' "
        f'-d \'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hi"}}]}}\''
    )


def need_packages() -> None:
    """An error that names what is not installed."""
    try:
        import aiohttp
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed", op="serve", hint="pip install 'tilegrad[serve]'"
        ) from None
    numbers = [int(part) if part.isdigit() else 0 for part in aiohttp.__version__.split(".")[:3]]
    if numbers < [3, 13, 4]:
        raise UserError(
            "aiohttp is too old: it has known holes",
            op="serve",
            expected="3.13.4 or newer",
            got=aiohttp.__version__,
            hint="pip install -U 'tilegrad[serve]'",
        )


def found(model: str, bars: Bars) -> str:
    """The path of a model, fetched if it must be."""
    from ..exchange.fetch import find_model
    from ..runtime.bundle import is_bundle

    return model if is_bundle(model) else str(find_model(model, bars.report))


def advised(model: str) -> dict[str, Any]:
    """How tokens are drawn where neither client nor model says: as the makers of a built-in model
    advise, else as the model's probabilities are."""
    from ..exchange.fetch import BUILT_IN

    return dict(BUILT_IN[model].sampling if model in BUILT_IN else {"temperature": 1.0})


def keys_of(given: list[str], file: Path | None) -> tuple[str, ...]:
    """All keys: of the command line, of a file, of the environment."""
    keys = [*given, *config().api_keys]
    if file is not None:
        try:
            keys += file.read_text().split()
        except (OSError, UnicodeDecodeError):
            raise UserError("cannot read the file of keys", op="serve", got=file) from None
    if any(not key.strip() for key in keys):
        raise UserError("a key is empty", op="serve", expected="at least one character")
    return tuple(dict.fromkeys(keys))
