"""Commands whose help shows a flag as a flag.

Invariant: every command and every group of commands is made of these classes, so that no option
that takes no value is shown with one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options and arguments."""
        return without_values(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options."""
        return without_values(super().get_params(ctx))


class WithDefault(Group):
    """A group that runs its first command where none is named: `bench MODEL` is `bench model`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The words of a command, with the first one's name before them if they name none."""
        if args and args[0] not in {*self.commands, "--help"}:
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


class App(typer.Typer):
    """Commands under one name."""

    def __init__(self, *, cls: type[Group] = Group, **settings: Any) -> None:
        super().__init__(cls=cls, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:
        """Take a function as a command."""
        return super().command(name, cls=Command, **settings)


def without_values(params: list[Any]) -> list[Any]:
    """Params, of which flags have no word for a value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params
