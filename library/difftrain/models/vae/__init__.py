"""VAEs: latents of pictures, what of them is cached, and the small one that the tiny sizes ship."""
