"""Lets vLLM be imported if the installed torchcodec cannot be loaded.

PyPI's torchcodec is a CUDA build; without CUDA its libraries raise OSError at import, which vLLM does not expect. vLLM
needs torchcodec only for audio, and works without it."""

import importlib.util
import sys


def hide_broken() -> None:
    """Makes a torchcodec that cannot be loaded look uninstalled in this process."""
    if "torchcodec" in sys.modules or importlib.util.find_spec("torchcodec") is None:
        return
    try:
        import torchcodec  # noqa: F401  # pyright: ignore[reportMissingImports]
    except Exception:
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchcodec"]:
            del sys.modules[name]
        sys.modules["torchcodec"] = None  # type: ignore[assignment]  # its import raises ImportError
