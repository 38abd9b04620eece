"""Attention on CPUs, forward and backward."""
