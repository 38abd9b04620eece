"""Decoders as many model families have them, and how their files are read."""
