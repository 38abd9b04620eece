"""The page of `tilegrad chip serve`: sliders for an NPU, and what it makes of a network."""

from .server import Server, answer, serve

__all__ = ["Server", "answer", "serve"]
