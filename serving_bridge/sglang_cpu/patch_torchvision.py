"""Makes PyPI's torchvision importable beside a CPU build of torch, in the environment that runs this.

PyPI carries torchvision for CUDA only; without CUDA its compiled part does not load, and its registration of shape functions
then fails for two operators that were never defined. SGLang imports torchvision whatever the model. With torchvision
from PyTorch's own CPU index nothing is changed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

MARK = "import torchvision.extension  # noqa: F401\n"
PATCH = """if not torchvision.extension._has_ops():
    _undefined = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _undefined.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    """Patch once; say what was done."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise SystemExit("torchvision is not installed here")
    path = Path(spec.origin).parent / "_meta_registrations.py"
    text = path.read_text()
    if PATCH in text:
        print(f"{path}: patched already")
    elif MARK not in text:
        raise SystemExit(f"{path}: not the version this patch is for")
    else:
        path.write_text(text.replace(MARK, MARK + PATCH, 1))
        print(f"{path}: patched")


if __name__ == "__main__":
    main()
