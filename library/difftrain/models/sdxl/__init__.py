"""Stable Diffusion XL: UNet, VAE, CLIP-L and OpenCLIP bigG."""
