"""Tests here use the tiny models of tests/models and the torch comparison of tests/tensor."""

import sys
from pathlib import Path

here = Path(__file__).parent
sys.path.insert(0, str(here.parents[1] / "tensor"))
sys.path.insert(0, str(here.parent))
sys.path.insert(0, str(here))
