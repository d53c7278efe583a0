"""The page of a data set: its counts are those of the data, its crops and captions those that the loader draws."""

from __future__ import annotations

import base64
import errno
import io
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub_stub import point_here, serving
from PIL import Image
from rejects import kind

from difftrain.cli import main
from difftrain.config import TrainConfig
from difftrain.contracts import FeatureSpec, Parts
from difftrain.data.index import survey
from difftrain.data.loader import make_loader
from difftrain.data.prepare import make_plan, make_tables, open_data, prepare
from difftrain.models.registry import make_family
from difftrain.report.dataset_page import dataset_page
from difftrain.report.page import jpeg_address
from difftrain.testing.pictures import write_folder
from difftrain.testing.synthetic_index import write_synthetic_index
from difftrain.train.inspect import inspect
from difftrain.train.inspect.cards import TRIES
from difftrain.train.inspect.inspect import gather, look_at

SIZES = [(64, 64), (96, 48), (48, 96), (80, 80), (128, 64), (20, 20)]
ENLARGED = [(20, 20), (96, 48)]  # to 64x64 both: beside it there are 96x32, 32x96, 128x32 and 32x128


def hold(told: list[str], captions: list[str]) -> dict[str, torch.Tensor]:
    """Stand in for a tokenizer: keep the captions, and give each its number."""
    first = len(told)
    told += captions
    return {"number": torch.arange(first, len(told))}


def write_data(folder: Path) -> Path:
    """Write eighteen pictures into two of kohya's folders, a copy with a much too long caption, and no picture."""
    write_folder(folder / "2_a cat", SIZES * 2)
    write_folder(folder / "1_dog", SIZES, start=50)
    (folder / "1_dog" / "copy.png").write_bytes((folder / "2_a cat" / "0003.png").read_bytes())
    (folder / "1_dog" / "copy.txt").write_text("one, " * 90)
    (folder / "1_dog" / "broken.png").write_text("no picture")
    return folder


def configured(data: Path, cache: Path) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"init_from_config": "tiny"},
            "data": {
                "dirs": [str(data)],
                "resolution": (64, 64),
                "enable_bucket": True,
                "min_bucket_reso": 32,
                "max_bucket_reso": 128,
                "bucket_reso_steps": 32,
                "flip": True,
                "random_crop": True,
                "workers": 0,
                "cache_dir": str(cache),
            },
            "captions": {"shuffle": True, "dropout_rate": 0.2},
            "training": {"seed": 5, "batch_size": 3},
        }
    )


@pytest.fixture(scope="module")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """Configure data that no test changes."""
    root = tmp_path_factory.mktemp("shared")
    return configured(write_data(root / "data"), root / "cache")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write data that a test may change."""
    return write_data(tmp_path / "data")


@pytest.fixture
def own(data: Path, tmp_path: Path) -> TrainConfig:
    """Configure data that a test may change."""
    return configured(data, tmp_path / "cache")


def look(cfg: TrainConfig, tmp_path: Path, **more: Any) -> tuple[dict[str, Any], str]:
    """Return the facts and the page."""
    written = inspect(cfg, tmp_path / "page.html", facts=tmp_path / "facts.json", log=lambda line: None, **more)
    return json.loads((tmp_path / "facts.json").read_text()), written.read_text(encoding="utf-8")


def test_counts_are_complete(cfg: TrainConfig, tmp_path: Path) -> None:
    facts, text = look(cfg, tmp_path)
    assert facts["totals"] == {
        "records": 19, "trained": 19, "held_out": 0, "draws_per_epoch": 12 * 2 + 7, "buckets": len(facts["buckets"]),
        "rejected": 1, "copies": 1, "upscaled": 3 * len(ENLARGED),
    }  # fmt: skip
    first, second = sorted(facts["sources"], key=lambda source: -source["records"])
    assert (first["records"], first["repeats"], first["draws_per_epoch"], first["refused"]) == (12, 2, 24, 0)
    assert (second["records"], second["repeats"], second["draws_per_epoch"], second["refused"]) == (7, 1, 7, 1)
    assert first["folder"].endswith("data/2_a cat") and "captions.dropout_rate=0.2" in first["settings"]
    assert sum(bucket["draws_per_epoch"] for bucket in facts["buckets"]) == 31
    square = next(bucket for bucket in facts["buckets"] if bucket["bucket"] == "64x64")
    assert (square["records"], square["upscaled"]) == (16, 6)
    assert square["cut_away"] == pytest.approx(
        6 * 0.5 / 16
    )  # half of each 96 x 48, which becomes 128 x 64, and of each 128 x 64
    assert square["batches_per_epoch"] == pytest.approx(square["draws_per_epoch"] / 3)
    [rejected] = facts["rejected"]["reasons"]
    assert (rejected["source"], kind(rejected["reason"]), rejected["items"]) == (second["source"], "not image", 1)
    assert facts["copies"]["first"] == [{"pictures": 2, "names": ["data/1_dog/copy.png", "data/2_a cat/0003.png"]}]
    said = [finding["what"] for finding in facts["findings"]]
    assert any(re.match("6 .*, 3 .* 2 ", what) for what in said)
    assert any(re.match("1 of 19 captions .* 75 tokens", what) for what in said)
    assert any(what.startswith("1 of 20 items (5.0%) ") for what in said)
    assert any(what.startswith("1 image ") and "duplicated" in what for what in said)
    assert any(finding["what"].startswith("2 images look") for finding in facts["findings"])
    assert [[one["name"] for one in group["shown"]] for group in facts["similar"]["first"]] == [
        sorted(facts["copies"]["first"][0]["names"])
    ]
    assert "image" not in facts["similar"]["first"][0]["shown"][0]  # pictures are the page's
    assert sum(one["images"] for one in facts["resolutions"]) == 19
    assert "31" in text and "data/1_dog/copy.png" in text
    assert text.index('id="pictures"') < text.index('id="sources"')


def test_captions_are_counted(cfg: TrainConfig, tmp_path: Path) -> None:
    captions = look(cfg, tmp_path)[0]["captions"]
    assert captions["count"] == 19 and captions["empty"] == captions["several"] == 0
    assert [one["record"] for one in captions["longest"]][:1] == ["data/1_dog/copy.png"]
    assert len(captions["longest"]) == len(captions["shortest"]) == 10
    assert captions["shortest"][0]["characters"] == len("picture 0, second, third")
    assert ["picture", 18] in captions["words"] and ["second", 18] in captions["tags"] and captions["counted"] == 19
    tokens = captions["tokens"]
    assert (tokens["counted"], tokens["limit"], tokens["cut"]) == (19, 75, 1)
    assert sum(one["captions"] for one in tokens["bins"]) == 19
    assert tokens["longest_cut"][0]["tokens"] == tokens["most"] > 100
    wide = cfg.model_copy(update={"model": cfg.model.model_copy(update={"max_token_length": 225})})
    assert look(wide, tmp_path)[0]["captions"]["tokens"]["limit"] == 225


def test_crops_and_captions_are_those_of_the_loader(cfg: TrainConfig, tmp_path: Path) -> None:
    """Every use that the page shows is found in the batch of its step, with the same caption and the same pixels."""
    facts, text = look(cfg, tmp_path, epochs=2, pictures=19)
    data = open_data(cfg, prepare(cfg, log=lambda line: None))
    plan = make_plan(data, cfg, 3)
    told: list[str] = []
    loader = make_loader(
        data, plan, FeatureSpec({}, {}), lambda captions: hold(told, captions), cfg,
        dp_rank=0, dp_size=1, first_step=0, last_step=plan.total_steps(2),
    )  # fmt: skip
    drawn = {}
    for step, (batch,) in enumerate(loader):
        for i, record in enumerate(batch.record_id.tolist()):
            caption = told[int(batch.features["number"][i])]
            name = data.index.record(record).name
            drawn[name, step, int(batch.occurrence[i])] = (caption, batch.features["pixels"][i].numpy())
    shown = pictures(text)
    uses = [(card, one) for card in facts["cards"] for one in card["captions"]]
    assert len(uses) > 30 and len({card["name"] for card, _ in uses}) == 19
    for card, one in uses:
        assert drawn[card["name"], one["step"], one["use"]][0] == one["text"]
        assert one["epoch"] == 1 + plan.locate(one["step"])[0]
    assert {one["text"] == "" for _, one in uses} == {True, False}  # dropout was drawn
    for card in facts["cards"]:
        if not card["captions"]:
            continue
        first = card["captions"][0]
        pixels = grey(drawn[card["name"], first["step"], first["use"]][1].transpose(1, 2, 0).astype(float))
        result = grey(shown[f"{card['name']}, cut"])
        assert result.shape == pixels.shape and alike(result, pixels)
        (left, top, width, height), (wide, high) = card["crop"], card["resized"]
        assert 0 <= left <= wide - width and 0 <= top <= high - height and f"{width}x{height}" == card["bucket"]
        if card["size"] == card["resized"]:
            cut = grey(shown[card["name"]])[top : top + height, left : left + width]
            assert alike(cut[:, ::-1] if card["flipped"] else cut, pixels)
    assert {card["flipped"] for card in facts["cards"]} == {True, False}


def grey(picture: np.ndarray) -> np.ndarray:
    """Return the brightness, which JPEG keeps best. Shape: (h, w, 3) -> (h, w)."""
    return picture @ [0.299, 0.587, 0.114]


def alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Tell noise that went through JPEG from other noise, or from the same a pixel aside."""
    return bool(np.corrcoef(one.ravel(), other.ravel())[0, 1] > 0.9)


def pictures(page: str) -> dict[str, np.ndarray]:
    """Decode every picture of a page, by its alternative text."""
    found = {}

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            told = dict(attrs)
            if tag == "img":
                raw = base64.b64decode((told["src"] or "").partition("base64,")[2])
                found[told["alt"] or ""] = np.asarray(Image.open(io.BytesIO(raw)).convert("RGB"), dtype=float)

    Reader().feed(page)
    return found


def test_every_bucket_and_source_is_shown(cfg: TrainConfig, tmp_path: Path) -> None:
    facts, _ = look(cfg, tmp_path, pictures=8)
    assert {card["bucket"] for card in facts["cards"]} == {bucket["bucket"] for bucket in facts["buckets"]}
    assert {card["source"] for card in facts["cards"]} == {1, 2} and len(facts["cards"]) == 8
    assert look(cfg, tmp_path, pictures=0)[0]["cards"] == []


def test_a_bucket_that_waits_for_a_later_epoch_is_named(cfg: TrainConfig, tmp_path: Path) -> None:
    large = cfg.model_copy(update={"training": cfg.training.model_copy(update={"batch_size": 16})})
    facts, text = look(large, tmp_path, epochs=1, pictures=12)
    starved = next(
        finding for finding in facts["findings"] if re.match(r"\d of \d buckets .*global batch", finding["what"])
    )
    assert any(re.search(r"\b\d+ samples .* every [\d.]+ epochs", example) for example in starved["examples"])
    waiting = [card for card in facts["cards"] if not card["captions"]]
    assert waiting and all(card["unused"] == [1] for card in waiting)
    assert "not used" in text and "as it" in text


def test_nothing_in_the_data_becomes_markup(own: TrainConfig, data: Path, tmp_path: Path) -> None:
    folder = data / "1_dog"
    name = '"><img src=x onerror=alert(1)>&amp;'
    (folder / f"{name}.png").write_bytes((folder / "0050.png").read_bytes())
    (folder / f"{name}.txt").write_text('</td></table><script>alert("x")</script> <!-- \x07 ' + "z" * 300)
    (folder / f"{name}2.jpg").write_text("<b>bold</b>")
    plain = own.model_copy(update={"captions": own.captions.model_copy(update={"dropout_rate": 0.0, "shuffle": False})})
    _, text = look(plain, tmp_path, pictures=40)
    assert text.count("&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;") >= 3 and "\x07" not in text
    assert text.count("<script") == 1 and "<img src=x" not in text and "<b>bold" not in text and "<!--" not in text

    class Tags(HTMLParser):
        seen: set[str]

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.seen |= {tag}
            for key, value in attrs if tag != "link" else ():  # its icon
                assert not key.startswith("on") and (key != "href" or (value or "").startswith("#"))
                assert key != "src" or (value or "").startswith("data:image/jpeg;base64,")

    tags = Tags()
    tags.seen = set()
    tags.feed(text)
    assert not tags.seen & {"iframe", "object", "form", "base"}
    assert "default-src 'none'; img-src data:" in text


def test_half_characters_in_captions_do_not_stop_it(cfg: TrainConfig, tmp_path: Path) -> None:
    facts, _ = look(cfg, tmp_path)
    facts["captions"]["shortest"][0]["caption"] = "half \ud800 of one"
    facts["cards"] = []
    assert "half ? of one" in dataset_page(facts)


def test_too_many_rejects_are_shown_instead_of_stopping(cfg: TrainConfig, tmp_path: Path) -> None:
    strict = cfg.model_copy(update={"data": cfg.data.model_copy(update={"max_rejected_share": 0.01})})
    facts, text = look(strict, tmp_path)
    (finding,) = [one for one in facts["findings"] if one["level"] == "stop"]
    assert " --max_rejected_share=0.01 " in finding["what"]
    [example] = finding["examples"]
    assert re.match(rf"{cfg.data.dirs[0]}/1_dog/broken\.png: not .*: .*text", example)
    assert "not start" in text


def test_sizes_that_the_model_cannot_take_are_shown(cfg: TrainConfig, tmp_path: Path) -> None:
    odd = cfg.model_copy(update={"data": cfg.data.model_copy(update={"bucket_reso_steps": 8, "min_bucket_reso": 8})})
    facts, _ = look(odd, tmp_path)
    stops = [finding["what"] for finding in facts["findings"] if finding["level"] == "stop"]
    assert len(stops) == 1 and re.search(r"multiples of \d+, .*--bucket_reso_steps", stops[0])


@pytest.mark.parametrize("weighted", [False, True])
def test_tokens_are_counted_as_captions_are_encoded(weighted: bool) -> None:
    model = {"init_from_config": "tiny", "max_token_length": 225}
    family = make_family(TrainConfig.model_validate({"model": model, "captions": {"weighted": weighted}}))
    tokenize: Any = family.tokenizer(Parts(root=torch.nn.Module()))
    texts = [
        "",
        " ",
        "a cat, it's  a\tcat\n",
        "İstanbul's 12 straße\u00a0no-break",
        "don't (a:1.2)b [c] \x1f d",
        "🙂 日本語, ok\u2003x",
    ]
    ids = tokenize(texts)["input_ids_1"].flatten(1)
    bos, eos = ids[0, 0], ids[0, 1]
    first_end = [int((row == eos).nonzero()[0]) - 1 for row in ids]
    assert all(int(row[0]) == int(bos) for row in ids) and max(first_end) < 75
    assert tokenize.lengths(texts) == first_end and first_end[:2] == [0, 0] and first_end[2] > 5


def test_without_a_model_nothing_is_tokenized(cfg: TrainConfig, tmp_path: Path) -> None:
    bare = cfg.model_copy(update={"model": TrainConfig().model})
    facts, text = look(bare, tmp_path)
    assert facts["captions"]["tokens"] is None and re.search("Tokens .*--pretrained_model_name_or_path", text)
    assert all("tokens" not in one for card in facts["cards"] for one in card["captions"])


def test_a_seed_that_is_not_configured_is_said(cfg: TrainConfig, tmp_path: Path) -> None:
    unseeded = cfg.model_copy(update={"training": cfg.training.model_copy(update={"seed": None})})
    facts, text = look(unseeded, tmp_path)
    assert facts["seed"] == 0 and "none is" in text


def test_a_picture_that_is_gone_is_said_on_its_card(own: TrainConfig, data: Path) -> None:
    opened = look_at(own, 1, 19, lambda line: None)
    (data / "2_a cat" / "0000.png").unlink()
    facts = gather(opened)
    (card,) = [card for card in facts["cards"] if card["name"].endswith("2_a cat/0000.png")]
    assert (
        not card["images"]
        and os.strerror(errno.ENOENT) in card["fault"]
        and os.strerror(errno.ENOENT) in dataset_page(facts)
    )


def test_data_on_a_hub_is_fetched_and_weights_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_folder(tmp_path / "source", SIZES)
    with serving() as hub:
        point_here(monkeypatch, hub, tmp_path / "home")
        monkeypatch.chdir(tmp_path)
        hub.repo("acme/pictures", "dataset").push({path.name: path.read_bytes() for path in source.iterdir()})
        hub.repo("acme/model").push({"model_index.json": b"{}"})
        model = {"pretrained": "acme/model"}
        data = {"dirs": ("acme/pictures",), "resolution": (64, 64), "cache_dir": str(tmp_path / "cache")}
        cfg = TrainConfig.model_validate({"model": model, "data": data, "training": {"seed": 1}})
        said: list[str] = []
        inspect(cfg, tmp_path / "page.html", facts=tmp_path / "facts.json", log=said.append)
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["totals"]["records"] == len(SIZES) and facts["captions"]["tokens"] is None
    assert any(re.search("acme/model is not .*tokens", line) for line in said)
    assert not any("acme/model/resolve" in path for _, path in hub.requests)


def test_several_data_sets_and_regularisation_are_told_apart(data: Path, tmp_path: Path) -> None:
    table = tmp_path / "sets.toml"
    table.write_text(
        f"""
[[datasets]]
resolution = 64
batch_size = 2
[[datasets.subsets]]
image_dir = "{data / "2_a cat"}"
caption_extension = ".txt"
num_repeats = 2
[[datasets]]
resolution = 128
batch_size = 1
[[datasets.subsets]]
image_dir = "{data / "1_dog"}"
caption_extension = ".txt"
is_reg = true
[[datasets.subsets]]
image_dir = "{data / "2_a cat"}"
caption_extension = ".txt"
flip_aug = true
"""
    )
    facts = tmp_path / "facts.json"
    line = [f"--dataset_config={table}", f"--output={tmp_path / 'page.html'}", f"--json={facts}", "--seed=1"]
    assert main(["dataset", "inspect", *line, f"--cache_dir={tmp_path / 'cache'}"]) == 0
    told = json.loads(facts.read_text())
    rows = {(row["dataset"], row["kind"]): row for row in told["sources"]}
    assert rows[1, "folder"]["draws_per_epoch"] == 24 and rows[2, "folder"]["draws_per_epoch"] == 12
    assert "flip" in rows[2, "folder"]["settings"] and "flip" not in rows[1, "folder"]["settings"]
    reg = rows[2, "regularisation"]  # 7 records are used as often as there are others
    assert reg["records"] == 7 and reg["draws_per_epoch"] == 12
    assert told["global_batch"] == [2, 1]
    assert {tuple(re.findall(r"^\w+|\d+$", bucket["bucket"])) for bucket in told["buckets"]} == {
        ("64x64", "1"),
        ("128x128", "2"),
    }
    assert any(card["regularisation"] for card in told["cards"])
    assert "dataset" in (tmp_path / "page.html").read_text().lower()


def test_masks_are_shown(own: TrainConfig, data: Path, tmp_path: Path) -> None:
    masked = own.model_copy(update={"data": own.data.model_copy(update={"alpha_mask": True})})
    pixels = np.zeros((64, 64, 4), np.uint8)
    pixels[:, :32, 3] = 255
    for path in (data / "2_a cat").glob("*.png"):
        Image.fromarray(pixels).save(path)
    _, text = look(masked, tmp_path, pictures=20)
    masks = [picture for name, picture in pictures(text).items() if "mask" in name and "data/2_a cat" in name]
    assert len(masks) >= 8
    for mask in masks:  # half of each, left or mirrored
        halves = sorted([mask[:, :28].mean(), mask[:, 36:].mean()])
        assert halves[0] < 10 and halves[1] > 245


def test_sizes_of_many_records_are_fitted_as_training_fits_them(tmp_path: Path) -> None:
    index = write_synthetic_index(tmp_path / "index", 500, repeats=(3, 1))
    cfg = TrainConfig.model_validate(
        {
            "data": {"dirs": ["/nowhere"], "resolution": (512, 512), "enable_bucket": True, "max_bucket_reso": 1024},
            "validation": {"split": 0.2},
            "training": {"seed": 1},
        }
    )
    make_tables(cfg, index)
    data = open_data(cfg, index.folder)
    found = survey.placements(data)
    for i in range(0, 500, 7):
        record = data.index.record(i)
        fit = data.recipes[record.media.source].buckets.select((record.size_hw[1], record.size_hw[0]))
        assert found.scale[i] == pytest.approx(fit.resized_wh[0] / record.size_hw[1])
        area = fit.bucket.width * fit.bucket.height / (fit.resized_wh[0] * fit.resized_wh[1])
        assert found.kept[i] == pytest.approx(area)
    assert (found.part == survey.HELD_OUT).sum() == sum(rows.records for rows in data.tables.validation)
    assert found.repeats.sum() == sum(rows.uses for rows in data.tables.training)
    assert set(found.repeats[found.part == survey.TRAINED]) == {1, 3}


def test_pictures_keep_to_their_share_of_the_page() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (900, 1200, 3), np.uint8)
    for budget in (3_000, 40_000):
        raw = base64.b64decode(jpeg_address(Image.fromarray(noise), TRIES, budget).partition("base64,")[2])
        assert len(raw) <= budget


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("", ["--output: is missing", "--train_data_dir: is missing", "--resolution: is missing"]),
        (
            "--output=x.html --train_data_dir={here} --resolution=64 --epochs=0",
            ["--epochs: .* 1 to 20, got 0"],
        ),
        ("--output=x.html --train_data_dir={here} --resolution=64 --epochs=no", ["--epochs: .*whole number, got 'no'"]),
        ("--output={here} --train_data_dir={here} --resolution=64", [r"--output: .*a folder \(.*file"]),
        (
            "--output=x.html --train_data_dir={here}/none --resolution=65",
            ["--train_data_dir: .*/none", "--resolution: .*multiples of 32"],
        ),
        (
            "--output=x.html --train_data_dir={here} --resolution=64 --sed=1",
            [r"--sed: .*\(.* mean --seed\?\)"],
        ),
    ],
)
def test_faults_of_the_command_line(
    words: str, messages: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = words.format(here=tmp_path).split()
    assert main(["dataset", "inspect", *line]) == 2
    said = capsys.readouterr().err
    assert all(re.search(message, said) for message in messages), said
    assert "--output_dir" not in said and "--pretrained_model_name_or_path" not in said


@pytest.mark.flags("cache_dir")
def test_the_command_says_where_the_page_is(
    cfg: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [
        f"--train_data_dir={cfg.data.dirs[0]}",
        "--resolution=64,64",
        f"--cache_dir={tmp_path / 'cache'}",
        "--seed=5",
    ]
    output = tmp_path / "new" / "page.html"
    assert main(["dataset", "inspect", *line, f"--output={output}", "--epochs=1", "--max_pictures=3"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(output)
    assert sum(not name.endswith(", small") for name in pictures(output.read_text())) == 6 and list(
        (tmp_path / "cache" / "index").iterdir()
    )
    assert re.search("--output=FILE.html", _help(capsys))


def _help(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["dataset", "inspect", "--help"]) == 0 and main(["dataset"]) == 2 and main(["dataset", "inspct"]) == 2
    said = capsys.readouterr()
    assert "mean inspect?" in said.err and "--max_pictures" in said.out and "--random_crop" in said.out
    return said.out
