"""Attention on GPUs, forward and backward."""
