"""Pictures from weights: prompts, samplers, grids."""

from difftrain.sampling.grid import draw_grid, draw_pictures
from difftrain.sampling.prompts import Prompt, parse_line, parse_prompts
from difftrain.sampling.samplers import SAMPLERS, make_sampler

__all__ = [
    "SAMPLERS",
    "Prompt",
    "draw_grid",
    "draw_pictures",
    "make_sampler",
    "parse_line",
    "parse_prompts",
]
