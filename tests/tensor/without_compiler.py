"""The start of a program in which what compiles cannot be imported, nor what compiles need."""

from __future__ import annotations

WITHOUT_COMPILER = """
import sys

class Blocked:
    folders = ("schedule", "kernels", "tile", "targets.llvm.emit", "targets.ptx", "tune")

    def find_spec(self, name, path=None, target=None):
        compiler = name.startswith("tilegrad.compiler.") and name != "tilegrad.compiler.loader"
        ours = tuple(f"tilegrad.{folder}" for folder in self.folders)
        if compiler or name.split(".")[0] == "llvmlite" or name.startswith(ours):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
"""
