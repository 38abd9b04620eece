"""Tests here use the tiny models of tests/models and the torch comparison of tests/tensor."""

import sys
from pathlib import Path

here = Path(__file__).parent
for folder in (here.parent / "tensor", here.parent / "models", here):
    sys.path.insert(0, str(folder))
