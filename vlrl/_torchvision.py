"""Makes a CUDA-built torchvision importable together with a CPU-only torch.

PyPI's torchvision wheel refers to operators `torchvision::nms` and `qnms` at import. Without CUDA its library cannot be
loaded, the operators are missing, and the import of any image processor fails. Declaring the operators' schemas
beforehand is enough. This is done when torchvision is first imported, in this process or in any worker that imports
vlrl."""

import importlib.abc
import sys

_declared: list[object] = []  # torch removes the schemas when the Library object is collected


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _declare_schemas()
        return None


def _declare_schemas() -> None:
    import torch
    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


def needed() -> bool:
    """Whether importing torchvision would fail without `install`, because its operators are missing on this machine."""
    from torchvision import extension
    return bool(_declared) and not extension._has_ops()


def install() -> None:
    """Registers the import hook, unless it is registered. Does nothing if torchvision has been imported already."""
    known = any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path)
    if "torchvision" not in sys.modules and not known and not _declared:
        sys.meta_path.insert(0, _BeforeTorchvision())
