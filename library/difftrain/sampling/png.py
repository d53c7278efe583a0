"""Pictures as PNG files that say how they were drawn: "parameters", which viewers and web interfaces read, and JSON."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

    from difftrain.sampling.prompts import Prompt

# what AUTOMATIC1111's web interface and its readers call the samplers of ours that they know
KNOWN_AS = {
    "ddim": "DDIM",
    "pndm": "PLMS",
    "lms": "LMS",
    "k_lms": "LMS",
    "euler": "Euler",
    "k_euler": "Euler",
    "flow_euler": "Euler",
    "euler_a": "Euler a",
    "k_euler_a": "Euler a",
    "heun": "Heun",
    "flow_heun": "Heun",
    "dpm_2": "DPM2",
    "k_dpm_2": "DPM2",
    "dpm_2_a": "DPM2 a",
    "k_dpm_2_a": "DPM2 a",
    "dpmsolver++": "DPM++ 2M",
}
PARAMETERS, OURS = "parameters", "difftrain"


def facts_of(
    prompt: Prompt, seed: int, sampler: str, size: tuple[int, int], about: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return how a picture was drawn, as JSON. size: (width, height). about: what holds for all pictures of a call."""
    facts: dict[str, Any] = {
        "prompt": prompt.prompt,
        "negative_prompt": prompt.negative_prompt,
        "seed": seed,
        "steps": prompt.sample_steps,
        "cfg": prompt.scale,
        "sampler": sampler,
        "width": size[0],
        "height": size[1],
    }
    shown = [Path(file).name for file in prompt.control_image] or None
    optional = {"flow_shift": prompt.flow_shift, "guidance": prompt.guidance_scale, "control_image": shown}
    facts |= {name: value for name, value in optional.items() if value is not None}
    return facts | dict(about or {})


def parameters(facts: Mapping[str, Any]) -> str:
    """Write facts in the layout of AUTOMATIC1111's web interface: prompt, negative prompt, and a line of settings."""
    settings: dict[str, Any] = {
        "Steps": facts["steps"],
        "Sampler": KNOWN_AS.get(facts["sampler"], facts["sampler"]),
        "CFG scale": _number(facts["cfg"]),
        "Seed": facts["seed"],
        "Size": f"{facts['width']}x{facts['height']}",
        "Model": _model(str(facts.get("weights", ""))),
    }
    if facts.get("guidance") is not None:
        settings["Distilled CFG Scale"] = _number(facts["guidance"])
    if facts.get("strength") is not None:
        settings["Denoising strength"] = _number(facts["strength"])
    settings["Version"] = f"difftrain {facts.get('version', '')}".strip()
    # ComfyUI takes nothing from a text without this line, an empty one included
    negative = f"Negative prompt: {facts['negative_prompt'] or ''}"
    line = ", ".join(f"{name}: {_quoted(value)}" for name, value in settings.items() if value != "")
    return "\n".join([facts["prompt"], negative, line])


def _model(weights: str) -> str:
    """Name a model as the web interface does: by its file's name without the ending."""
    return weights.removesuffix(".safetensors").removesuffix(".ckpt")


def _number(value: float) -> int | float:
    return int(value) if math.isfinite(value) and value == int(value) else value


def _quoted(value: Any) -> str:
    """Quote what readers would cut at a comma or a colon."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if any(mark in text for mark in ",:\n") else text


def png_bytes(image: Image, text: str, content: Any) -> bytes:
    """Return a picture as a PNG file, with its text and JSON of ours in chunks; texts beyond Latin-1 as iTXt."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text(PARAMETERS, text)
    info.add_text(OURS, json.dumps(content, ensure_ascii=False))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", pnginfo=info)
    return buffer.getvalue()
