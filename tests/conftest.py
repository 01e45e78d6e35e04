"""Settings for all tests: one thread, no network, small hypothesis runs."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("draftsmith", max_examples=40, deadline=None, derandomize=True)
settings.load_profile("draftsmith")
