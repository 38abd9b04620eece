"""Tasks on their way over one engine, for threads too: whoever waits runs the next step for all.

One thread at a time has the *turn*: it runs a step and gives every Task its token. The others wait
for the end of a turn, not for a turn of their own, so nobody who has a token waits any longer.
What fails in a Task (its text, its logits) ends that Task. A step that fails ends the Tasks that
were in it. Invariant: every Task that somebody waits for comes to its end or to an error, and what
it had in the engine is free then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from ..core.errors import StateError
from ..core.lock import ENGINE, awaited_rlock, renew_in_child
from .answer import Answer, Piece
from .engine import Engine
from .request import Produced, Request
from .task import Task


class Turns:
    """Which thread has the engine. It may take the turn twice: a stream may be thrown away in the
    middle of a step."""

    def __init__(self) -> None:
        self._whole = awaited_rlock(ENGINE)  # while somebody has the turn: a fork waits for it
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._depth = self._asking = 0
        renew_in_child(self._renew)

    def _renew(self) -> None:
        """Forget the threads that a forked child does not have."""
        self._changed, self._asking = threading.Condition(), 0
        if self._owner != threading.get_ident():
            self._owner, self._depth = None, 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """The turn, before all who want to step."""
        with self._changed:
            self._asking += 1
            try:
                self._changed.wait_for(self._is_free)
            finally:
                self._asking -= 1
                self._changed.notify_all()
            self._begin()
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def step(self, news: Callable[[], bool]) -> Iterator[bool]:
        """The turn to step, or none as soon as there is news; which of both."""
        with self._changed:
            self._changed.wait_for(lambda: news() or (self._is_free() and not self._asking))
            mine = not news()
            if mine:
                self._begin()
        try:
            yield mine
        finally:
            if mine:
                self._end()

    def _is_free(self) -> bool:
        return self._owner in (None, threading.get_ident())

    def _begin(self) -> None:
        self._whole.acquire()
        self._depth += 1
        self._owner = threading.get_ident()

    def _end(self) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._changed.notify_all()
            self._whole.release()


class Tasks:
    """The Tasks that somebody waits for."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.turns = engine, Turns()
        self._tasks: dict[Hashable, Task] = {}
        self._made: deque[Produced] = deque()  # of a step, not given to their Tasks yet

    def __len__(self) -> int:
        return len(self._tasks)

    def answers(self, tasks: Sequence[Task]) -> list[Answer]:
        """Run some Tasks to their ends; the error of the first that fails."""
        try:
            for task in tasks:
                self._add(task)
            left = list(tasks)
            while left and not any(task.error for task in tasks):
                self._advance(lambda left=left: any(t.finish for t in left))  # type: ignore[misc]
                left = [task for task in left if not task.finish]
        finally:
            self._drop(tasks)
        for task in tasks:
            if task.error is not None:
                raise task.error
        return [task.answer() for task in tasks]

    def pieces(self, task: Task) -> Iterator[Piece]:
        """What comes out of a Task, as it comes; closing this ends it."""
        try:
            self._add(task)
            while True:
                while task.pieces:
                    piece = task.pieces.popleft()
                    yield piece
                    if piece.finish:
                        return
                if task.error is not None:
                    raise task.error
                self._advance(lambda: task.has_news)
        finally:
            self._drop([task])

    def cancel(self) -> None:
        """End all of them where they are."""
        with self.turns.taken():
            for number, task in self._tasks.items():
                self.engine.cancel(number)
                self._guarded(task, task.cancel)

    def _add(self, task: Task) -> None:
        with self.turns.taken():
            self.engine.add(task.request)
            self._tasks[task.request.id] = task

    def _drop(self, tasks: Sequence[Task]) -> None:
        with self.turns.taken():
            for task in tasks:
                self.engine.cancel(task.request.id)
                self._tasks.pop(task.request.id, None)

    # ---- steps ------------------------------------------------------------------------------

    def _advance(self, news: Callable[[], bool]) -> None:
        """Run one step for all, unless there is news by then."""
        with self.turns.step(news) as mine:
            if not mine:
                return
            try:
                self._made.extend(self.engine.step())
            except BaseException as error:
                ended = self._end_lost(error)
                if not ended or not isinstance(error, Exception):
                    raise
            while self._made:
                self._give(self._made.popleft())
            self._end_lost(None)

    def _give(self, produced: Produced) -> None:
        task = self._tasks.get(produced.id)
        if task is not None:
            self._guarded(task, lambda: task.take(produced))
        if task is None or (task.finish and not produced.finished):  # gone, or a stop string
            self.engine.cancel(produced.id)

    def _guarded(self, task: Task, work: Callable[[], None]) -> None:
        """Do something with a Task that ends it if it fails, and nobody else."""
        try:
            work()
        except Exception as error:
            task.fail(error)
        except BaseException as error:
            task.fail(_lost(task.request, error))
            raise

    def _end_lost(self, error: BaseException | None) -> bool:
        """End the Tasks that the engine has no more; whether there were some."""
        made = {produced.id for produced in self._made}
        lost = [
            task
            for number, task in self._tasks.items()
            if not (task.finish or number in self.engine or number in made)
        ]
        for task in lost:
            task.fail(error if isinstance(error, Exception) else _lost(task.request, error))
        return bool(lost)


def _lost(request: Request, error: BaseException | None) -> StateError:
    why = "it was cancelled there" if error is None else f"a step was ended by {error!r}"
    return StateError(
        "the engine has this request no more", op="generate", got=why, location=request.location
    )


__all__ = ["Tasks"]
