"""What every chapter uses and no chapter teaches."""
import sys


def tell(kind, error, trace, others=sys.excepthook):
    """End with one line after Ctrl-C, also while PyTorch is imported."""
    print("\nInterrupted.", file=sys.stderr) if kind is KeyboardInterrupt else others(kind, error, trace)


sys.excepthook = tell
