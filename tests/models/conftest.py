"""Tests here use the torch comparison of tests/tensor, and what they share among them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tensor"))
sys.path.insert(0, str(Path(__file__).parent))
