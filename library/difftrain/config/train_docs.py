"""Write docs/train_toml.md from the table: `python -m difftrain.config.train_docs > docs/train_toml.md`."""

from __future__ import annotations

from collections.abc import Mapping

from difftrain.config.names import OPTIMIZERS_LATER, OPTIMIZERS_NEAR
from difftrain.config.train_options import OPTIONS
from difftrain.config.train_rows import Row, every_table, nearest, not_built, rows, says
from difftrain.config.train_settle import DOOR_DEFAULTS
from difftrain.models.registry import FAMILIES, LATER, TRAINED, UNTRAINED

INTRO = """# The TOML of `sd_scripts_xl/train.py`

The tables of this page are written by `python -m difftrain.config.train_docs` from the one table in
`library/difftrain/config/toml_keys.py`; a test holds them together. `train.py --help` prints the same.

```
python sd_scripts_xl/train.py --config configs/sd3_light/tiny.toml --training.max_steps=8
deepspeed --num_gpus=8 sd_scripts_xl/train.py --deepspeed --config configs/sd3_light/base.toml --trust_cache
torchrun --nproc_per_node 8 sd_scripts_xl/sd3_light_pretrain.py --config configs/sd3_light/txt.toml
accelerate launch --multi_gpu --num_processes 8 sd_scripts_xl/train.py --config configs/sd3_light/base.toml
```

`sd3_light_pretrain.py` is `train.py` with `type = "sd3"` and `train_type = "sd3_light_pretrain"`.

## One trainer, two spellings
The sectioned spelling is the one that recipes and this page have; the flat one is what diffusion-pipe's users own: a key whose
row says "flat" may stand at the top of the file. Both may be mixed. A key of `[training]` may stand in `[optimization]` and the other
way round. The tables of `configs/sdxl/` and of a run's own `config.toml` are accepted too (their keys are in the tables below under
the section that has them), so a run's `config.toml` is a `--config` of `train.py`, and `type = "sdxl"` trains what `sdxl_pretrain.py`
trains: the same step losses to the last bit with the same settings.

- A file is read strictly: an unknown key, a value of the wrong type, and two places that say different things of one setting are
  faults that name file, table and key, and the key that was probably meant. All faults come at once, with exit code 2.
- What is known and not built yet (families, adapters, optimizers, pipeline stages, block swapping) is refused by its name.
- A key that means something else or nothing here says so at the start, once.
- What counts, lowest first: the default, the family's default, the TOML file, the command line.
- `--section.key value` and `--section.key=value` set any key of any table: the value is read as TOML has it (`--optimizer.betas='[0.9, 0.99]'`),
  else as text.
- A relative path of a file counts from the working directory, else from the file's own folder; where both exist and are two,
  that is a fault. What is in neither (an output folder that is still to be made) counts from the working directory.
- With `epochs` and `max_steps`, what comes first ends the run; one of them is needed. `warmup_steps` with `lr_scheduler = "constant"`
  is a linear warm-up.
- A key or token (`wandb_api_key`, `hf_token`, `huggingface_token`) is moved to the environment, with a warning, and is `***` in
  everything that is written. Any other name is an unknown key, whatever it ends in; its value is not printed.
- `[optimizer]`: what is not in its table below goes to the optimizer's constructor. Its source is read for what it takes, without
  importing it: an argument that it does not take, and a text where it has a number, are faults like all others.
- `[ema]` switches the average on, empty or with any key, unless `enable = false`.
- What `[demo] make` names is made when nothing else of the configuration is wrong; with `--dry_run` it is named and not made.
- `eval_before_first_step` is on where there are `eval_datasets`, as in diffusion-pipe.

## Precision
`dtype` is what is computed in. Frozen weights (VAE, text encoders) are kept in it; trained weights are fp32, with an optimizer state in
fp32: with AdamW 16 B a parameter (weight, gradient, two of state). `master_weights = false` keeps weights, gradients and state in `dtype`: 8 B,
and updates below half a unit of the last place are lost; `master_weights = "kahan"` (14 B) keeps them. `--dry_run` estimates the memory, and the
log says what it is behind the first update.
`transformer_dtype` and `diffusion_model_dtype` are for a denoiser that is not trained: here it is, so that they are named and left.

## Launchers
Plain python, `torchrun`, `accelerate launch` and `deepspeed` all work, from any folder. RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are
read as they are set; where some are missing that is a fault by name. `deepspeed` needs its package: `pip install "sd-scripts-xl[deepspeed]"`; it
starts as many processes as `--num_gpus` says, on a machine without cards too. `accelerate launch` starts several only with its `--multi_gpu`, or where
its own configuration or the cards that it finds say so; else it is one process.
`--deepspeed` is accepted and runs natively, and says so: DeepSpeed's own engine is not built yet. `--deepspeed_config FILE.json` with a zero stage of 1
to 3, or `[deepspeed] enable = true`, shards through accelerate's plugin (docs/engines.md); keys of the JSON that mean nothing here are named.

## What a run writes
`OUTPUT_DIR/YYYYmmdd_HH-MM-SS/` (UTC): `config.toml` (everything resolved), `dataset.toml` (the data set's file as it was given, without tokens),
metrics.jsonl, report.json and report.html, `tensorboard_logs/`, `epochN/` and `stepN/` (exports), `global_stepN/` (checkpoints). docs/resume.md has the rest.
"""


def render() -> str:
    """Return the whole page."""
    parts = [INTRO, "## Options\n\n" + _options()]
    for table in every_table():
        parts.append(f"## [{table}]\n\n{says(table)}\n\n" + _table(list(rows(table))))
    parts += [
        "## Defaults of this door and of a family\n\n" + _defaults(),
        "## Accepted, and without effect here (said once)\n\n"
        + _lines([f"`{key.place}`: {key.help}" for key in nearest()]),
        "## Not built yet\n\n"
        + _lines(
            [
                f"`[model] type`: {', '.join((*UNTRAINED, *LATER))}",
                "`[adapter]`: lora, lokr, ia3",
                f"`[optimizer] type`: {', '.join(OPTIMIZERS_LATER)}; "
                + "; ".join(f"{name} means {ours}, {why}" for name, (ours, why) in OPTIMIZERS_NEAR.items()),
                '`[optimization] pipeline_stages` above 1; `[engine] type = "deepspeed"` runs natively',
                *(f"`{key.place}`: {key.help}" + _passes(key.passes) for key in not_built()),
            ]
        ),
    ]
    return "\n".join(parts)


def _options() -> str:
    head = ["| option | meaning |", "|---|---|"]
    body = [f"| `--{name}{' ' + each.takes if each.takes else ''}` | {each.help} |" for name, each in OPTIONS.items()]
    return "\n".join([*head, *(line.replace("FOLDER|STEP", "FOLDER\\|STEP") for line in body)]) + "\n"


def _table(found: list[Row]) -> str:
    lines = ["| key | values | also in | meaning | default | field |", "|---|---|---|---|---|---|"]
    for row in found:
        others = ", ".join("flat" if table == "" else f"[{table}]" for table in row.others)
        cells = [
            f"`{row.name}`",
            f"`{row.values}`",
            others,
            row.help,
            f"`{row.default}`" if row.default else "",
            f"`{row.field}`" if row.field else "",
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _defaults() -> str:
    told = [f"every run of this door: {_pairs(DOOR_DEFAULTS)}"]
    told += [
        f"`{family}`: {_pairs(FAMILIES[family].defaults) if FAMILIES[family].defaults else 'as sdxl_pretrain.py'}"
        for family in TRAINED
    ]
    return _lines(told)


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(
        f"`{path} = {str(value).lower() if isinstance(value, bool) else value}`" for path, value in values.items()
    )


def _passes(values: tuple[object, ...]) -> str:
    said = [str(value) for value in values if value not in ("", None, [])]
    return f"; {' and '.join(dict.fromkeys(said))} passes" if said else ""


def _lines(sentences: list[str]) -> str:
    return "\n".join(f"- {each}" for each in sentences) + "\n"


if __name__ == "__main__":
    print(render(), end="")
