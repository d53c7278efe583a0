"""What a denoiser learns: ddpm.py (Ho et al.) and flow.py (rectified flows, and EDM of Karras et al.); each makes inputs of latents and draws."""
