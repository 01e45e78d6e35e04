"""Puts a safetensors file into shared memory and prints the handles, base64, for a server on the same machine.

Runs as a process of its own (`python -m serving_bridge.share_tensors FILE`) and keeps the memory until its input ends.
The handles are in the form that SGLang's `/update_weights_from_tensor` takes; the server reads them with its own
restricted unpickler, and nothing is ever unpickled here.
"""

from __future__ import annotations

import base64
import io
import sys
from multiprocessing.reduction import ForkingPickler

import torch.multiprocessing
from safetensors.torch import load_file


def main(path: str) -> None:
    """Print one line, wait for the end of input."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    tensors = list(load_file(path).items())
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(tensors)
    print(base64.b64encode(buffer.getvalue()).decode(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
