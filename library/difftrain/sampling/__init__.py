"""Pictures from weights: prompts, samplers, grids."""

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
