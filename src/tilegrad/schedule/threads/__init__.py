"""Lowerings for Targets whose programs are blocks of threads: tiles as wide as a program."""
