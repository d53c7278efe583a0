"""What a PNG says of itself, as readers that know other programs' files take it apart."""

from __future__ import annotations

import io
import json
import re

import pytest
from PIL import Image

from difftrain.sampling.png import facts_of, parameters, png_bytes
from difftrain.sampling.prompts import Prompt

SETTING = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')


def settings(line: str) -> dict[str, str]:
    """Read `Name: value, ...` as web interfaces do."""
    return {name: json.loads(value) if value.startswith('"') else value for name, value in SETTING.findall(line)}


@pytest.mark.parametrize("negative", ["bad, blurred", "", None])
@pytest.mark.parametrize("prompt", ["a cat, sitting", "two lines\nSteps: 9, of a stair", "кот 猫: <b>"])
def test_prompt_negative_and_settings_are_taken_apart(prompt: str, negative: str | None) -> None:
    drawn = Prompt(prompt, negative_prompt=negative, sample_steps=12, scale=6.5)
    about = {"weights": "fox, v1: a.safetensors", "version": "1.2", "step": 400}
    text = parameters(facts_of(drawn, 7, "euler_a", (64, 96), about))
    # ComfyUI's way: the last line that begins with Steps, and before it the negative prompt, without which it stops
    steps = text.rindex("\nSteps: ")
    middle = text.rindex("\nNegative prompt: ", 0, steps + 1)
    assert text[:middle] == prompt and text[middle + 18 : steps] == (negative or "")
    read = settings(text[steps + 1 :])
    assert read | {"Version": ""} == {
        "Steps": "12",
        "Sampler": "Euler a",
        "CFG scale": "6.5",
        "Seed": "7",
        "Size": "64x96",
        "Model": "fox, v1: a",
        "Version": "",
    }
    image = Image.open(io.BytesIO(png_bytes(Image.new("RGB", (64, 96)), text, about)))
    assert image.info["parameters"] == text and json.loads(image.info["difftrain"])["step"] == 400
