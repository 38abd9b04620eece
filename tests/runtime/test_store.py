"""Store: what was put comes back or nothing does, whatever happens to disk or neighbours."""

import builtins
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tilegrad.core.config import override
from tilegrad.runtime.store import HEADER, Store, content_key, default_store


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "cache"), 1 << 20)


def files(store):
    return [
        os.path.join(folder, name) for folder, _, names in os.walk(store.folder) for name in names
    ]


def test_an_entry_under_another_key_is_missing(store):
    """A whole, valid file that lies where another key's belongs is never taken for it."""
    ours, other = content_key("ours"), content_key("other")
    store.put(ours, b"right")
    store.put(other, b"wrong")
    os.replace(store._path(other), store._path(ours))
    assert store.get(ours) is None
    assert not os.path.exists(store._path(ours))


def test_round_trip(store):
    key = content_key("a", b"b")
    assert store.get(key) is None and store.size() == 0
    store.put(key, b"hello" * 100)
    store.put("any text/../may be a key", b"")
    assert store.get(key) == b"hello" * 100
    assert store.get("any text/../may be a key") == b""
    assert store.size() == 500 + 2 * HEADER.size
    assert all(f.startswith(store.folder) for f in files(store))
    store.clear()
    assert store.get(key) is None and store.size() == 0


def test_content_key_separates_parts():
    assert content_key("ab", "c") != content_key("a", "bc") != content_key("abc")
    assert content_key("a") == content_key(b"a")


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "header", "append"])
def test_damaged_entries_are_missing(store, damage):
    key = content_key("k")
    store.put(key, bytes(range(256)))
    (path,) = files(store)
    data = bytearray(Path(path).read_bytes())
    if damage == "flip":
        data[-7] ^= 1
    changed = {
        "flip": data,
        "truncate": data[:-3],
        "empty": b"",
        "header": b"XXXX" + data[4:],
        "append": data + b"x",
    }[damage]
    Path(path).write_bytes(changed)
    assert store.get(key) is None
    assert not os.path.exists(path)
    store.put(key, b"new")
    assert store.get(key) == b"new"


def test_the_least_recently_used_leave_first(tmp_path):
    store = Store(str(tmp_path), 1 << 30)
    keys = [content_key(str(i)) for i in range(12)]
    for age, key in enumerate(keys):
        store.put(key, bytes(9_000))
        os.utime(store._path(key), (1000 + age, 1000 + age))
    store.cap_bytes = 50_000
    assert store.get(keys[0]) is not None  # touched: now the newest
    store.evict()
    assert store.size() <= 50_000
    assert store.get(keys[0]) is not None and store.get(keys[11]) is not None
    assert store.get(keys[1]) is None and store.get(keys[2]) is None


def test_puts_keep_the_cap(tmp_path):
    store = Store(str(tmp_path), 64_000)
    for i in range(100):
        store.put(content_key(str(i)), bytes(5_000))
    assert store.size() <= 64_000 + 10 * 5_100
    store.put("too large", bytes(70_000))
    assert store.get("too large") is None


def test_clear_spares_files_of_others(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "thesis.tex").write_text("mine")
    store = Store(str(tmp_path), 1000)
    store.put("k", b"x")
    store.clear()
    assert (tmp_path / "notes.txt").exists() and (tmp_path / "ab" / "thesis.tex").exists()


def test_stale_temporaries_are_swept(store):
    store.put("k", b"x")
    path = files(store)[0] + ".tilegrad-part"
    open(path, "wb").close()
    store.evict()
    assert os.path.exists(path)
    os.utime(path, (1, 1))
    store.evict()
    assert not os.path.exists(path)


def test_a_folder_that_cannot_be_written_warns_once(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    store = Store(str(blocked / "cache"), 1000)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            store.put("k", b"x")
            assert store.get("k") is None
    assert len(caplog.records) == 1
    assert store.size() == 0
    store.clear()


def test_a_full_disk_leaves_no_part(store, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    store.put("k", b"x")
    assert files(store) == [] and store.get("k") is None


def test_an_empty_folder_name_turns_the_store_off(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store("", 1000)
    store.put("k", b"x")
    assert store.get("k") is None and os.listdir(tmp_path) == []


def test_default_store_follows_the_config(tmp_path):
    with override(cache_folder=str(tmp_path), cache_bytes=123):
        store = default_store()
        assert (store.folder, store.cap_bytes) == (str(tmp_path), 123)
        assert default_store() is store


WRITER = """
import sys
from tilegrad.runtime.store import Store
store = Store(sys.argv[1], 300_000, evict_every=5)
seed, wrong, hits = int(sys.argv[2]), 0, 0
for i in range(300):
    number = (i * 7 + seed * 13) % 40
    found = store.get(f"key{number}")
    expected = bytes([number]) * (1000 + 500 * number)
    hits += found is not None
    wrong += found is not None and found != expected
    store.put(f"key{number}", expected)
print(wrong, hits)
"""


def test_many_processes_share_a_folder(tmp_path):
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(seed)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(4)
    ]
    results = [child.communicate(timeout=600)[0].split() for child in children]
    assert all(child.returncode == 0 for child in children)
    assert [wrong for wrong, _ in results] == ["0"] * 4
    assert sum(int(hits) for _, hits in results) > 0
    assert not [f for f in files(Store(str(tmp_path), 1)) if f.endswith("part")]


def test_many_threads_share_a_store(store):
    faults = []

    def work(seed):
        for i in range(100):
            number = (i + seed) % 10
            store.put(f"k{number}", bytes([number]) * 500)
            if store.get(f"k{number}") not in (None, bytes([number]) * 500):
                faults.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_get_opens_one_file(store, monkeypatch):
    """It looks at nothing else, however much the Store holds."""
    for number in range(20):
        store.put(f"k{number}", bytes(10_000))
    opened, really = [], builtins.open

    def counted(path, *rest):
        opened.append(path)
        return really(path, *rest)

    monkeypatch.setattr(builtins, "open", counted)
    monkeypatch.setattr(os, "scandir", lambda *_: pytest.fail("a folder is searched"))
    assert store.get("k7") == bytes(10_000)
    assert len(opened) == 1
