"""Pretrain and fine-tune diffusion models on Ascend NPU, CUDA and CPU with one code path."""

__version__ = "0.4.0"
