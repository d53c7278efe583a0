"""The embedded demo: pictures, a small model with a VAE that draws, and the scores of what a run has learned."""
