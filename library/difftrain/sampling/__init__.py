"""Images from weights.

The way of an image:
 1. prompts.py      prompts of lines and files, with kohya's flags
 2. samplers.py     a sampler by name, with the noise schedule of the model
 3. draw.py         from noise to images in one loop; edits.py begins at an image instead
 4. png.py          the file, which says how it was drawn
"""

from difftrain.sampling.draw import draw_grid, draw_pictures
from difftrain.sampling.prompts import Prompt, PromptFile, parse_line, read_prompts
from difftrain.sampling.samplers import FLOW_SAMPLERS, SAMPLERS, make_sampler

__all__ = [
    "FLOW_SAMPLERS",
    "SAMPLERS",
    "Prompt",
    "PromptFile",
    "draw_grid",
    "draw_pictures",
    "make_sampler",
    "parse_line",
    "read_prompts",
]
