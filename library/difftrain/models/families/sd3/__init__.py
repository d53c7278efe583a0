"""Stable Diffusion 3: joint transformer, VAE, CLIP-L, OpenCLIP bigG and T5."""
