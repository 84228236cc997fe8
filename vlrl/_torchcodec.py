"""Lets vLLM be imported beside a torchcodec that cannot be loaded.

PyPI's torchcodec is a CUDA build; without CUDA its libraries raise OSError at import, which vLLM does not expect. It
needs torchcodec for audio alone and does without where there is none."""

import importlib.util
import sys


def hide_broken() -> None:
    """Makes a torchcodec that cannot be loaded look as if it were not installed, in this process."""
    if "torchcodec" in sys.modules or importlib.util.find_spec("torchcodec") is None:
        return
    try:
        import torchcodec  # noqa: F401  # pyright: ignore[reportMissingImports]
    except Exception:
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchcodec"]:
            del sys.modules[name]
        sys.modules["torchcodec"] = None  # type: ignore[assignment]  # its import raises ImportError
