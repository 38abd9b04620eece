"""Schedule IR: from a Graph to ordered Kernels over planned memory."""
