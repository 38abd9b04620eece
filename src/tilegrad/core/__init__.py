"""Facts that import nothing of ours: dtypes, targets, errors, settings."""
