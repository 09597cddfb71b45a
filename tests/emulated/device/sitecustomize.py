"""In every Python that run.py starts: torch's ops on the fake device."""

import aten
import torch

aten.install()

import mixprec.ops._dispatch.library as library  # noqa: E402

library.TRITON_ERROR = f"{torch.cuda.get_device_name()} runs no Triton kernels"
