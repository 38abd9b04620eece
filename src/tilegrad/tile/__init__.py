"""Tile IR: how a kernel computes, at the portable and at the placed level."""
