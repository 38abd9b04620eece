"""Attention over a cache that lies in pages, and what fills it."""
