"""Config: what the environment says, defaults, and overriding it for a while."""

import subprocess
import sys

import pytest

from tilegrad.core.config import (
    config,
    configure,
    override,
    read_environment,
    set_threads,
    usable_cores,
)
from tilegrad.core.errors import UserError


def test_defaults():
    settings = read_environment({"XDG_CACHE_HOME": "/somewhere"})
    assert settings.threads == usable_cores() >= 1
    assert settings.cache_folder == "/somewhere/tilegrad"
    assert settings.cache_bytes == 2048 << 20
    assert (settings.device, settings.log_level, settings.memory_bytes) == ("cpu", "warning", 0)
    assert not settings.verify and not settings.eager_debug


def test_every_variable_is_read():
    settings = read_environment(
        {
            "TILEGRAD_THREADS": "3", "TILEGRAD_CACHE": "/c", "TILEGRAD_CACHE_MB": "5",
            "TILEGRAD_DEVICE": "gpu", "TILEGRAD_LOG": "DEBUG", "TILEGRAD_VERIFY": "1",
            "TILEGRAD_EAGER": "on", "TILEGRAD_MEMORY_MB": "7",
            "TILEGRAD_SUMS": "fast", "TILEGRAD_DOTS": "tf32", "TILEGRAD_KEEP": "9",
        }
    )  # fmt: skip
    assert settings.threads == 3 and settings.cache_folder == "/c"
    assert settings.cache_bytes == 5 << 20 and settings.memory_bytes == 7 << 20
    assert settings.device == "gpu" and settings.log_level == "debug"
    assert settings.verify and settings.eager_debug
    assert (settings.sums, settings.dots, settings.keep) == ("fast", "tf32", 9)


def test_bad_sums_are_refused_and_change_nothing():
    with pytest.raises(UserError, match="reproducible, fast"):
        configure(sums="any")
    assert config().sums == "reproducible"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TILEGRAD_THREADS", "0"), ("TILEGRAD_THREADS", "many"), ("TILEGRAD_CACHE_MB", "-1"),
        ("TILEGRAD_LOG", "loud"), ("TILEGRAD_VERIFY", "maybe"), ("TILEGRAD_SUMS", "some"),
        ("TILEGRAD_DOTS", "fp8"),
    ],
)  # fmt: skip
def test_bad_values_name_the_variable(name, value):
    with pytest.raises(UserError, match=name):
        read_environment({name: value})


def test_verifiers_run_under_pytest():
    assert read_environment({"PYTEST_VERSION": "8"}).verify
    assert not read_environment({"PYTEST_VERSION": "8", "TILEGRAD_VERIFY": "0"}).verify


def test_override_ends_even_after_an_error():
    before = config()
    with pytest.raises(ZeroDivisionError), override(threads=17, device="x") as inner:
        assert config() is inner and config().threads == 17
        raise ZeroDivisionError
    assert config() is before
    with pytest.raises(UserError, match="unknown setting"), override(colour=1):
        pass
    assert config() is before


def test_set_threads():
    with override():
        set_threads(5)
        assert config().threads == 5
        with pytest.raises(UserError):
            set_threads(0)
    with override(), pytest.raises(UserError):
        configure(nonsense=True)


def test_import_loads_only_numpy_and_ml_dtypes():
    code = (
        "import sys, threading; import tilegrad, tilegrad.core.config, tilegrad.core.target;"
        "import tilegrad.runtime.buffer, tilegrad.runtime.store, tilegrad.targets.llvm.driver;"
        "import tilegrad.targets.llvm.workers, tilegrad.targets.llvm.target;"
        "assert 'llvmlite' not in sys.modules, 'llvmlite';"
        "assert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
