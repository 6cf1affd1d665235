import shell.settings  # noqa: F401  (before PyTorch)
