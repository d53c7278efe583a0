"""Settings that nobody reads: what is recorded, what counts as given, and what is named."""

from __future__ import annotations

import pytest

from difftrain.config.parse_flags import parse
from difftrain.config.reads import LATER, explicit_fields, is_read_later, recorded, refuse_unread
from difftrain.config.schema.section import Section
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.toml import dump
from difftrain.contracts import ConfigFault

LINE = ["--init_from_config=tiny", "--train_data_dir=.", "--output_dir=out", "--resolution=64", "--max_train_steps=4"]


def test_reads_are_noted_while_they_are_recorded_and_no_longer() -> None:
    cfg = TrainConfig()
    with recorded() as reads:
        assert cfg.optimizer.learning_rate and cfg.model.vae is None
        copy = cfg.training.model_copy(update={"seed": 3})
        assert copy.seed == 3
        dump(cfg)  # writes every field, and uses none
    assert reads == {"optimizer.learning_rate", "model.vae", "training.seed"}
    assert cfg.ema.enable is False and "ema.enable" not in reads
    assert "__getattribute__" not in vars(Section)


def test_recording_ends_where_a_run_fails() -> None:
    with pytest.raises(RuntimeError), recorded():
        raise RuntimeError
    assert "__getattribute__" not in vars(Section)


def test_what_is_given_is_what_somebody_said_and_is_no_default() -> None:
    parsed = parse([*LINE, "--learning_rate=1e-4", "--seed=3", "--clip_skip=1"])
    given = {"model.init_from_config", "data.dirs", "save.output_dir", "data.resolution", "training.max_steps"}
    default = TrainConfig().optimizer.learning_rate
    assert parsed.explicit.keys() - {"optimizer.learning_rate"} == given | {"training.seed", "model.clip_skip"}
    assert ("optimizer.learning_rate" in parsed.explicit) == (default != 1e-4)
    assert parsed.explicit["model.clip_skip"] == "--clip_skip"
    assert explicit_fields(parsed.config, parsed.explicit, {"training.seed"}).keys() == parsed.explicit.keys() - {
        "training.seed"
    }


def test_what_nothing_reads_is_named_all_at_once() -> None:
    given = {
        "model.guidance": "run.toml [model] guidance",
        "training.threads": "--threads",
        "save.state": "--save_state",
    }
    refuse_unread(given, {"model.guidance", "training.threads"})
    with pytest.raises(ConfigFault) as found:
        refuse_unread(given, {"training.seed"})
    assert [fault.where for fault in found.value.faults] == ["run.toml [model] guidance", "--threads"]
    assert is_read_later("save.state") and not is_read_later("training.threads") and "save" in LATER
