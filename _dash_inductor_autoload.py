"""Called at the end of `import torch` (entry-point group torch.backends)."""


def autoload() -> None:
    """Nothing to do yet."""
