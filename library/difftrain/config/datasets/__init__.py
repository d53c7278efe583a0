"""The data sets of a run: from flags, from the TOML of kohya, from the TOML of diffusion-pipe."""
