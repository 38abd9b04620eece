"""Makes the small dialect importable as `toy_dialect`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
