"""Write docs/flags.md from the table: `python -m difftrain.config.flag_docs > docs/flags.md`."""

from __future__ import annotations

from collections.abc import Iterable

from difftrain.config.flag import AS_OURS, Flag
from difftrain.config.flags import KOHYA, OURS
from difftrain.config.help import WORDS, default_text
from difftrain.config.validate import choices_of

INTRO = """# Flags of `sd_scripts_xl/sdxl_pretrain.py`

This page is written by `python -m difftrain.config.flag_docs` from the one table in `library/difftrain/config/flags.py`;
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


def render() -> str:
    """Return the whole page."""
    offered = [flag for flag in KOHYA if flag.status in ("implemented", "nearest")]
    return "\n".join(
        [
            INTRO.format(kohya=len(KOHYA), offered=len(offered)),
            "## Implemented, kohya's names\n\n" + _table(flag for flag in KOHYA if flag.status == "implemented"),
            "## Implemented, ours\n\n" + _table(flag for flag in OURS if flag.status == "implemented"),
            "## Accepted, meaning the nearest thing here (said once)\n\n"
            + _reasons("what it means", (flag for flag in (*KOHYA, *OURS) if flag.status == "nearest")),
            "## Not built yet\n\nGiven, each is a fault of its own. Values in the last column ask for what is done anyway"
            " and pass.\n\n" + _waiting(flag for flag in (*KOHYA, *OURS) if flag.status == "later"),
            "## Not offered\n\n" + _reasons("reason", (flag for flag in (*KOHYA, *OURS) if flag.status == "refused")),
        ]
    )


def _table(flags: Iterable[Flag]) -> str:
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


if __name__ == "__main__":
    print(render(), end="")
