"""Parquet data sets in Hugging Face's layout, as sources of tar shards."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image
from shard_files import files_of, keys, run_tool

import make_shards
from input_pipeline import parquet_images, tar_shards

pytestmark = pytest.mark.usefixtures("no_listing_kept")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

CLASSES = ["a, b", "c/d", "e"]
FEATURES = {"image": {"_type": "Image"}, "label": {"names": CLASSES, "_type": "ClassLabel"}}

OTHERS = {"label": {"names": ["z"], "_type": "ClassLabel"}}


def picture(colour, kind="PNG"):
    data = io.BytesIO()
    Image.new("RGB", (8, 6), (colour, 255 - colour, 7)).save(data, kind)
    return data.getvalue()


def row(i, **other):
    return {"image": {"bytes": picture(i), "path": f"{i}.png"}, "label": i % 3} | other


def write(file, rows, features=FEATURES, group=4):
    """A file as the library `datasets` writes it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    fields = [(name, image if about["_type"] == "Image" else pyarrow.int64()) for name, about in features.items()]
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    table = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(fields, metadata=about))
    parquet.write_table(table, file, row_group_size=group)
    return file


@pytest.fixture
def source(tmp_path):
    """13 training images in two files, 3 for validation."""
    for number, part in enumerate((range(9), range(9, 13))):
        write(tmp_path / f"source/data/train-{number:05d}-of-00002.parquet", [row(i) for i in part])
    write(tmp_path / "source/data/validation-00000-of-00001.parquet", [row(i) for i in range(3)])
    return tmp_path / "source"


def test_the_same_images_give_the_bytes_that_class_folders_give(image_folder, tmp_path, capsys):
    """Written in the folder's order, as `datasets` does, with the folders' names as classes."""
    for split, name in (("train", "train-0"), ("val", "validation-0")):
        folder = make_shards.scan(str(image_folder), split)
        features = {"image": {"_type": "Image"}, "label": {"names": list(folder.classes), "_type": "ClassLabel"}}
        rows = [
            {"image": {"bytes": Path(file).read_bytes(), "path": f"x/{Path(file).name}"}, "label": int(label)}
            for file, label in folder.samples
        ]
        for number, start in enumerate(range(0, len(rows), 25)):
            write(tmp_path / f"hf/{name}{number}.parquet", rows[start : start + 25], features, group=7)
    for source, target in ((image_folder, "folder"), (tmp_path / "hf", "parquet"), (tmp_path / "hf", "again")):
        assert run_tool(make_shards, source, tmp_path / target, "--samples-per-shard", 7) == 0, capsys.readouterr().err
    assert files_of(tmp_path / "parquet") == files_of(tmp_path / "folder")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "folder")
    assert not list((tmp_path / "parquet").glob(".unpacked*"))


def test_names_labels_and_classes_come_from_the_rows_and_the_features(source, tmp_path):
    odd = [
        row(0, image={"bytes": picture(0), "path": None}),
        row(1, image={"bytes": picture(1, "JPEG"), "path": "http://host/x.y.JPEG"}),
        row(2, image={"bytes": picture(2, "WEBP"), "path": "no ending"}),
    ]
    write(source / "data/validation-00000-of-00001.parquet", odd)
    assert run_tool(make_shards, source, tmp_path / "out") == 0
    train, val = (tar_shards.load(str(tmp_path / "out"), split, "raise") for split in ("train", "val"))
    assert train.classes == tuple(CLASSES)
    assert sorted((train.read(i), train.labels[i]) for i in range(13)) == sorted((picture(i), i % 3) for i in range(13))
    assert sorted(keys(val)) == ["a, b/00000000", "c_d/x_y", "e/no ending"]


def test_other_columns_and_the_test_split(tmp_path, capsys):
    features = {"img": {"_type": "Image"}} | dict.fromkeys(("fine_label", "coarse_label"), FEATURES["label"])
    rows = [{"img": row(i)["image"], "fine_label": i % 3, "coarse_label": 0} for i in range(5)]
    for name in ("train/0000", "test/0000"):
        write(tmp_path / f"source/{name}.parquet", rows, features)
    assert run_tool(make_shards, tmp_path / "source", tmp_path / "out") == 2
    assert "2 columns are ClassLabel, none is label" in capsys.readouterr().err
    assert run_tool(make_shards, tmp_path / "source", tmp_path / "out", "--columns", "img", "coarse_label") == 0
    assert "val: 1 Parquet files, the first is" in capsys.readouterr().out
    assert set(tar_shards.load(str(tmp_path / "out"), "val", "raise").labels) == {0}


def test_damaged_rows_are_named_by_file_and_row(source, tmp_path, capsys):
    rows = [row(i) for i in range(12)]
    rows[2] = row(2, image=None)
    rows[5] = row(5, image={"bytes": None, "path": "/elsewhere/5.png"})
    rows[6] = row(6, label=-1)
    rows[7] = row(7, label=3)
    rows[11] = row(11, image={"bytes": b"no image", "path": "11.png"})
    file = write(source / "data/train-00001-of-00002.parquet", rows)
    assert run_tool(make_shards, source, tmp_path / "out") == 2
    lines = capsys.readouterr().err.splitlines()
    want = (
        f"error: {file}: row 2 has no bytes in image, row 5 has no bytes in image, only the path /elsewhere/5.png, row "
        "6 has label=-1, there are 3 classes and 2 rows more: mend these rows or leave them out of the data set"
    )
    assert lines[-1] == want
    write(file, [row(i) for i in range(9, 13)])  # mended: what is there already is used
    assert run_tool(make_shards, source, tmp_path / "out") == 0
    assert len(tar_shards.load(str(tmp_path / "out"), "train", "raise")) == 13


def test_a_file_that_is_cut_or_damaged_is_named(source, tmp_path, capsys):
    file = source / "data/train-00001-of-00002.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    assert run_tool(make_shards, source, tmp_path / "out") == 2
    assert f"{file} is no Parquet file that can be read" in capsys.readouterr().err
    file.write_bytes(b"PAR1" + b"\xff" * 300 + whole[304:])
    assert run_tool(make_shards, source, tmp_path / "out") == 2
    assert f"{file}: row group 0, from row 0 on, cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda at: write(at / "data/train-1.parquet", [], FEATURES | OTHERS),
         "has other columns or classes than"),
        (lambda at: write(at / "train-1.parquet", [row(1)]), "train lies in more than one folder"),
        (lambda at: (at / "data/validation-00000-of-00001.parquet").unlink(), "none has the word val"),
        (lambda at: parquet.write_table(pyarrow.table({"label": [1]}), at / "data/train-00000-of-00002.parquet"),
         "its schema has no features under `huggingface`"),
        (lambda at: write(at / "data/train-00000-of-00002.parquet", [], {"image": FEATURES["image"]}),
         "0 columns are ClassLabel"),
    ],
)  # fmt: skip
def test_what_is_no_data_set_of_this_layout_is_refused(source, tmp_path, capsys, change, text):
    change(source)
    assert run_tool(make_shards, source, tmp_path / "out") == 2
    lines = capsys.readouterr().err.splitlines()
    assert text in lines[-1]


def test_options_of_parquet_are_refused_for_folders(image_folder, tmp_path, capsys):
    assert run_tool(make_shards, image_folder, tmp_path, "--columns", "a", "b") == 2
    assert "--columns is for Parquet" in capsys.readouterr().err


def test_memory_holds_no_more_than_a_few_rows(source, monkeypatch):
    """Of a file that is one row group."""
    file = write(source / "data/train-00000-of-00002.parquet", [row(i) for i in range(150)], group=10_000)
    columns = parquet_images.columns_of(file, None)
    seen = []
    original = parquet.ParquetFile.iter_batches

    def counted(*args, **kwargs):
        for batch in original(*args, **kwargs):
            seen.append(len(batch))
            yield batch

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", counted)
    assert [number for number, *_ in parquet_images._rows(file, columns)] == list(range(150))
    assert seen == [64, 64, 22]
