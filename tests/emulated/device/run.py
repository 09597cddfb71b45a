"""Run a Python program on a fake CUDA device, whose work the CPU does.

    python tests/emulated/device/run.py -m pytest tests/gpu
    python tests/emulated/device/run.py examples/train_gpt.py --device cuda --steps 3
    python tests/emulated/device/run.py -m mixprec.env

Needs a CUDA build of torch, mixprec built for it (make cuda has both), g++, nvcc for its headers,
and no GPU. torch sees a device of 8 GiB and compute capability 9.0 (cudart.cpp). The CUDA sources
of mixprec, launchers and kernels, run on it through ../shim and ../hopper; torch's
own ops are computed by the CPU (aten.py). Streams, graphs and what may wait for the device behave
as on a GPU, but for order: work is done when it is launched. A generator that is given to an op
starts from its seed again at every call. There is no Triton, no cuDNN, no NCCL, and no speed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    import torch

    import build

    if torch.version.cuda is None:
        print(f"run.py needs a CUDA build of torch, this is {torch.__version__}", file=sys.stderr)
        return 2
    found = importlib.util.find_spec("mixprec._C")
    if found is None or found.origin is None:
        print("run.py needs mixprec in this Python's path, built for its torch", file=sys.stderr)
        return 2
    environment = os.environ | build.environment(Path(found.origin).parent)
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment)


if __name__ == "__main__":
    sys.exit(main())
