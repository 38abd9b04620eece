"""Locks that a forked child can use.

A fork copies a lock that another thread holds, but not the thread: the child would wait for ever.
So a lock is either free in the child, or the fork waits for it. Invariant: what a lock of the
first kind guards is whole between any two lines of its block, or made anew by the next holder;
locks of the second kind are taken in the order of their ranks, here and everywhere.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

ENGINE, COMPILER, LLVM = 0, 1, 2  # ranks: who holds one may take those after it

_free: weakref.WeakSet[Any] = weakref.WeakSet()
_awaited: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_taken: list[Any] = []  # by a fork under way
_renewals: list[weakref.WeakMethod[Any]] = []


def new_lock() -> Any:
    """A Lock that is free in a forked child, whoever held it."""
    lock = threading.Lock()
    _free.add(lock)
    return lock


def new_rlock() -> Any:
    """An RLock that is free in a forked child, whoever held it."""
    lock = threading.RLock()
    _free.add(lock)
    return lock


def awaited_rlock(rank: int) -> Any:
    """An RLock that a fork waits for, so that the child finds whole what it guards."""
    lock = threading.RLock()
    if not _awaited:
        _register()
    _awaited[lock] = rank
    return lock


@functools.cache
def _register() -> None:
    """Take part in forks, before Python's thread pools do: who compiles holds a lock of ours and
    starts threads. Handlers run in the reverse order of registration."""
    import concurrent.futures.thread  # noqa: F401  registers the handler of the pools

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
        )


def _before_fork() -> None:
    for lock, _ in sorted(_awaited.items(), key=lambda item: item[1]):
        lock.acquire()
        _taken.append(lock)


def _after_fork() -> None:
    while _taken:
        _taken.pop().release()


def renew_in_child(method: Callable[[], None]) -> None:
    """Call a method of an object, while it lives, in every forked child: it forgets the threads
    that the child does not have."""
    _renewals[:] = [r for r in _renewals if r() is not None]
    _renewals.append(weakref.WeakMethod(method))


def _free_all() -> None:
    for lock in list(_free):
        lock._at_fork_reinit()  # as Python's own modules do with theirs
    for renewal in list(_renewals):
        method = renewal()
        if method is not None:
            method()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_all)
