"""Programs in the tile language."""
