"""Pictures from weights: prompts, samplers, grids."""

from difftrain.sampling.grid import draw_grid, draw_pictures
from difftrain.sampling.prompt_files import PromptFile, read_prompts
from difftrain.sampling.prompts import Prompt, parse_line
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
