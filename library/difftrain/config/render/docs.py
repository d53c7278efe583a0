"""Write docs/flags.md and docs/train_toml.md from the tables.

python -m difftrain.config.render.docs flags > docs/flags.md
python -m difftrain.config.render.docs keys > docs/train_toml.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from difftrain.config.render.help import WORDS, default_text
from difftrain.config.render.keys import Row, every_table, nearest, not_built, rows, says
from difftrain.config.resolve import DOOR_DEFAULTS
from difftrain.config.schema.names import OPTIMIZERS_LATER, OPTIMIZERS_NEAR
from difftrain.config.schema.validate import choices_of
from difftrain.config.spellings.flag import AS_OURS, Flag
from difftrain.config.spellings.flags import KOHYA, OURS
from difftrain.config.spellings.keys import OPTIONS
from difftrain.models.registry import FAMILIES, LATER, TRAINED, UNTRAINED

FLAGS_INTRO = """# Flags of `sd_scripts_xl/sdxl_pretrain.py`

This page is written by `python -m difftrain.config.render.docs flags` from the one table in `library/difftrain/config/spellings/flags.py`;
a test holds them together. The names of kohya's `sdxl_train.py` are all known ({kohya} of them, {offered} offered so far):
a flag either has its meaning, or stops the run with a message that says why. None is ignored.

`--key=value` and `--key value` both work; no prefix of a name stands for it. What counts, lowest first: the default, the
file of `--config`, the one of `--config_file`, the flag. A flag given twice counts with its last value; `--train_data_dir` adds up. All faults are
reported together, with exit code 2, before any device is touched.

Differences to kohya on purpose
- Epochs win over steps, as there. Warm-up and decay count optimizer updates here; under accelerate they run
  as many times faster as there are processes.
- `--caption_extension` unset tries `.caption`, then `.txt`, and prints its choice; `N_class` folders without a caption
  file use the class words.
- Transparent pictures are laid over white before they are resized; kohya drops the alpha channel, as `--alpha_mask` does.
- `--keep_tokens_separator`: the mark never reaches the text encoder; kohya leaves it in where nothing moves.
- `--weighted_captions` and `--clip_skip` work; kohya's SDXL script refuses the one and ignores the other.
- `--token_warmup_step` counts optimizer updates of the run, exactly; there it lags by what the loader has read ahead.
- `--conditioning_data_dir` works without a data set TOML; a picture without a mask is rejected, and one of another size
  than its mask is taken where their shapes agree.
- `--save_model_as` unset writes safetensors; kohya takes the layout that the weights came in.
- A `--min_bucket_reso` that is no multiple of `--bucket_reso_steps` is rounded down and a `--max_bucket_reso` up, as
  there; a minimum below one step stays as it is, where kohya's becomes 0 and fails.
- With both `--sample_every_n_steps` and `--sample_every_n_epochs` pictures are drawn at either (there the epochs win),
  and wherever there are prompts at the last step too. A prompt without `--d` draws with `--seed`, so that pictures of one
  run can be compared; kohya's takes another seed every time.
- `--cache_latents` keeps mean and deviation, so that every use draws its latent anew, as online; kohya keeps one that was
  drawn once, which is `--cache_latents_as=sample` here. `--cache_text_encoder_outputs` goes with `--shuffle_caption`,
  `--enable_wildcard`, `--weighted_captions` and every dropout of captions, which kohya refuses or knows nothing of: of what is
  drawn, `--cache_shuffle_num` captions of a record are encoded. Files lie in a cache of their own, not beside the pictures.
- `--skip_cache_check` leaves out checksums; whether an entry is there and is of this encoder is always known.
- A masked sample's loss is its mean over its mask; kohya takes the mean of loss times mask over the whole picture, so
  that there a small mask weighs little. Either way every sample counts alike, whatever the batch.
- Random strengths of `--noise_offset` and `--ip_noise_gamma` and the levels of `--multires_noise_iterations` are drawn for
  each sample, and multi-resolution noise is divided by the deviation of the sample's own; kohya takes one draw and one
  deviation for a batch, which would make a sample's noise depend on its neighbours.
- Weights by SNR take that of the plain schedule with `--zero_terminal_snr` too, as there. Pictures during training and
  diffusers exports then use the schedule that was trained; kohya draws them with the plain one.
- A `--min_timestep` at or above `--max_timestep` is a fault; kohya trains the single step `--max_timestep` then.
- The validation loss has the same noises, loss and weights as training, as in kohya's scripts that have one.
- `--dataset_config` together with `--train_data_dir`, `--reg_data_dir` or `--in_json` is a fault; kohya passes those over.
  A flag whose value every table of the file overrides is named. docs/data_sets.md has the rest.
- Whatever `--save_last_n_*` say, the last two good saves are kept.
- `--use_safetensors` counts only where `--save_model_as` is not given, as there.
- Rates of 0 in `--block_lr` freeze a block: no gradient is computed for it. There it is only left out of the optimizer.
  `--block_lr` with `--learning_rate=0` is a fault; there it freezes the UNet in silence.
- D-Adaptation and Prodigy with several rates are refused where the package would stop at the first update; the others
  are warned about, as there.
- `--optimizer_schedulefree_wrapper`, which is commented out there, works around any optimizer, and follows a schedule.
- A repository of `--huggingface_repo_id` is looked at before training, and one that is there keeps its visibility; an upload is
  one commit and tried again, and one that fails is counted in the report. Without `--huggingface_path_in_repo` uploads go to
  the top. Tokenizers of a hub are kept as they are in `--tokenizer_cache_dir`, under kohya's names. docs/hub.md has the rest.
- `--full_bf16` keeps what bf16 lacks beside the weights (`--master_weights=kahan`) and the optimizer's state in fp32; kohya's
  is `--master_weights=none`. `--full_fp16` is kohya's; with D-Adaptation and Prodigy, whose first estimate fp16 cannot
  hold so that nothing is trained, it needs `--master_weights=fp32`.
- `--fused_backward_pass` takes any optimizer that updates each parameter by itself, there Adafactor alone; on several
  cards gradients are summed before they are used, which there they are not. `--fused_optimizer_groups` steps one optimizer
  in parts, there one for each group; with gradient accumulation it waits for the last micro batch. Neither goes with fp16.
- `--fp8_base` and `--fp8_base_unet`, of kohya's LoRA scripts, are for frozen layers; what is trained is never rounded so.
- `--cpu_offload_checkpointing` needs `--gradient_checkpointing`. docs/precision_and_memory.md has the rest.
- `--deepspeed` gives the losses of other engines, whatever the number of cards and micro batches; `--zero_stage=0`, which shards
  nothing, and flags of DeepSpeed that would do nothing are faults. docs/engines.md has the rest.
- Tokens on the command line are moved to the environment and redacted in everything that is written.
"""


def flags_page() -> str:
    """Return the whole page."""
    offered = [flag for flag in KOHYA if flag.status in ("implemented", "nearest")]
    return "\n".join(
        [
            FLAGS_INTRO.format(kohya=len(KOHYA), offered=len(offered)),
            "## Implemented, kohya's names\n\n" + _flag_table(flag for flag in KOHYA if flag.status == "implemented"),
            "## Implemented, ours\n\n" + _flag_table(flag for flag in OURS if flag.status == "implemented"),
            "## Accepted, meaning the nearest thing here (said once)\n\n"
            + _reasons("what it means", (flag for flag in (*KOHYA, *OURS) if flag.status == "nearest")),
            "## Not built yet\n\nGiven, each is a fault of its own. Values in the last column ask for what is done anyway"
            " and pass.\n\n" + _waiting(flag for flag in (*KOHYA, *OURS) if flag.status == "later"),
            "## Not offered\n\n" + _reasons("reason", (flag for flag in (*KOHYA, *OURS) if flag.status == "refused")),
        ]
    )


def _flag_table(flags: Iterable[Flag]) -> str:
    rows = ["| flag | meaning | default | kohya's, where another | TOML |", "|---|---|---|---|---|"]
    for flag in flags:
        choices = choices_of(flag.to) if flag.to else ()
        word = "" if flag.kind == "switch" else "=" + ("\\|".join(map(str, choices)) or WORDS[flag.kind])
        kohya = "" if flag.kohya is AS_OURS else f"`{flag.kohya}`" if flag.kohya not in (None, "") else "unset"
        toml = f"`[{flag.to.split('.')[0]}] {flag.to.split('.')[1]}`" if flag.to else ""
        default = default_text(flag).strip(" []") if flag.kind != "switch" else "off"
        rows.append(f"| `{flag.option}{word}` | {_cell(flag.help)} | {_cell(default)} | {kohya} | {toml} |")
    return "\n".join(rows) + "\n"


def _reasons(title: str, flags: Iterable[Flag]) -> str:
    rows = [f"| flag | {title} |", "|---|---|", *(f"| `{flag.option}` | {_cell(flag.help)} |" for flag in flags)]
    return "\n".join(rows) + "\n"


def _waiting(flags: Iterable[Flag]) -> str:
    rows = ["| flag | what it is for; what to use meanwhile | passes |", "|---|---|---|"]
    for flag in flags:
        passes = ", ".join(f"`{value}`" for value in flag.same if value)
        rows.append(f"| `{flag.option}` | {_cell(flag.help)} | {passes} |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


KEYS_INTRO = """# The TOML of `sd_scripts_xl/train.py`

The tables of this page are written by `python -m difftrain.config.render.docs keys` from the one table in
`library/difftrain/config/spellings/keys.py`; a test holds them together. `train.py --help` prints the same.

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


def keys_page() -> str:
    """Return the whole page."""
    parts = [KEYS_INTRO, "## Options\n\n" + _options()]
    for table in every_table():
        parts.append(f"## [{table}]\n\n{says(table)}\n\n" + _key_table(list(rows(table))))
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


def _key_table(found: list[Row]) -> str:
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
    print({"flags": flags_page, "keys": keys_page}[sys.argv[1]](), end="")
