"""Pretrain and fine-tune diffusion models on Ascend NPU, CUDA and CPU with one code path."""

import logging

# diffusers imports a bitsandbytes that is there, and that misses a kernel of 4 bits on CPUs at every start; nothing here has it
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

__version__ = "0.5.0"
