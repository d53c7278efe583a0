"""What a denoiser learns: flow.py (rectified flows) and edm.py (Karras et al.); each makes inputs of latents and draws."""
