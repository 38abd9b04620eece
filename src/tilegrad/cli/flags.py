"""Commands whose help shows a flag as a flag and an argument in capitals, and whose errors end in a
message.

Invariant: every command and every group of commands is made of these classes, so that no option
that takes no value is shown with one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..core.errors import TilegradError
from .terminal import INTERRUPTED, error_text, status


class Command(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options and arguments."""
        return [quick(p) for p in named(super().get_params(ctx))]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of its usage; some versions of typer put what is required in braces."""
        pieces: list[str] = super().collect_usage_pieces(ctx)
        return [piece.replace("{", "").replace("}", "") for piece in pieces]


class Group(TyperGroup):
    """A group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options."""
        return [quick(p) for p in named(super().get_params(ctx))]


class Commands(Group):
    """The commands, whose errors end in a message and a status."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except TilegradError as error:
            status(f"error: {error_text(error)}")
            raise typer.Exit(1) from error
        except MemoryError as error:
            status("error: memory ran out")
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            status("")
            raise typer.Exit(INTERRUPTED) from error


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


def quick(param: Any) -> Any:
    """A param that takes text as it is, and nothing as nothing, without the library that converts
    and checks other values: importing that takes a tenth of a second."""
    if "process_value" in vars(param):  # it is one already
        return param
    checked = param.process_value
    text = getattr(getattr(param, "type_descriptor", None), "annotation", None) is str
    several = param.multiple or param.nargs != 1

    def process(ctx: Any, value: Any) -> Any:
        plain = value is None or (text and type(value) is str)
        if not plain or (param.required and value is None):
            return checked(ctx, value)
        found = () if several and value is None else value
        return found if param.callback is None else param.callback(ctx, param, found)

    param.process_value = process
    return param


def named(params: list[Any]) -> list[Any]:
    """Params, of which flags have no word for a value, and arguments their names in capitals."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif param.param_type_name == "argument" and param.metavar is None:
            param.metavar = param.name.upper()
    return params
