"""What a denoiser learns: ddpm.py (Ho et al.), flow.py (rectified flows, and EDM of Karras et al.).

Each makes the inputs of a forward pass of latents and draws.
"""
