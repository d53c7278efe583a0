"""Say what a file of weights looks like, from its keys and shapes, when it is not what was asked for."""

from __future__ import annotations

import re

from difftrain.models.weights.infer import Shapes

# first match wins: a pattern that some key matches, and what such a file is
_MARKS = (
    (r"lora_(up|down|A|B)\.|\.lora_(A|B)\.|^lora_|hada_w1|lokr_w1", "a LoRA or another adapter, not a whole model"),
    (r"controlnet|control_model\.|input_hint_block", "a ControlNet"),
    (r"^model\.diffusion_model\.joint_blocks\.|^joint_blocks\.", "Stable Diffusion 3"),
    (r"^(model\.diffusion_model\.)?double_blocks\.", "Flux or a relative"),
    (r"^conditioner\.embedders\.1\.model\.", "SDXL"),
    (r"^conditioner\.embedders\.0\.model\.", "the SDXL refiner, which has one text encoder"),
    (r"^cond_stage_model\.model\.transformer\.resblocks\.", "Stable Diffusion 2"),
    (r"^cond_stage_model\.transformer\.", "Stable Diffusion 1"),
    (r"^model\.diffusion_model\.", "a UNet of the original layout without text encoders"),
    (r"^down_blocks\.\d+\.resnets\.", "a UNet of the diffusers layout alone"),
    (r"^(first_stage_model\.)?encoder\.(down|down_blocks)\.", "a VAE alone"),
    (r"text_model\.encoder\.layers\.|transformer\.resblocks\.", "a text encoder alone"),
)
_UNET_INPUT = "model.diffusion_model.input_blocks.0.0.weight"


def looks_like(shapes: Shapes) -> str:
    """Name the kind of model that these keys and shapes belong to."""
    if not shapes:
        return "an empty file"
    for pattern, name in _MARKS:
        if any(re.search(pattern, key) for key in shapes):
            if name == "SDXL" and shapes.get(_UNET_INPUT, (0, 4))[1] == 9:
                return "an SDXL inpainting model (9 input channels)"
            return name
    return f"no model known here; its first keys are {', '.join(sorted(shapes)[:3])}"


def differences(wanted: Shapes, found: Shapes, limit: int = 5) -> list[str]:
    """Describe missing, unexpected and differently shaped tensors, the first few of each by name."""
    lines = []
    missing = [key for key in wanted if key not in found]
    unknown = [key for key in found if key not in wanted]
    other = [
        f"{key} {found[key]} instead of {shape}"
        for key, shape in wanted.items()
        if key in found and found[key] != shape
    ]
    for title, names in (("missing", missing), ("unexpected", unknown), ("of another shape", other)):
        if names:
            more = f" and {len(names) - limit} more" if len(names) > limit else ""
            lines.append(f"{len(names)} {title}: {', '.join(names[:limit])}{more}")
    return lines
