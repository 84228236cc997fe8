"""Makes Ctrl-C during the imports end the command without a traceback, with exit code 130."""

import os
import sys
from types import TracebackType

_hook = sys.excepthook


def _quiet(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        _hook(kind, error, trace)


if os.path.basename(sys.argv[0]) in ("vlrl", "vlrl.exe", "train.py", "__main__.py"):
    sys.excepthook = _quiet
