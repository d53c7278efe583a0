"""Images from any weights: what a path to weights is, the model that they make, and drawing with it (`difftrain generate`).

1. `weights_path` says what lies at a path: a checkpoint, a run, a folder, a file.
2. `model` builds the parts, fills them and brings them to the device.
3. `generate` draws the prompts and writes the files.
"""
