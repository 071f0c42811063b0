"""Tar shards: read at any place, in an order that follows from a seed, with an index that is kept.

References are Python's tarfile and the webdataset package.
"""

import launch

import collections
import fcntl
import hashlib
import itertools
import os
import pickle
import pty
import shutil
import struct
import sys
import tarfile
import tempfile
import termios
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, batches, error_of, loaders_of
from shard_files import FORK, content, keys, run_tool, sample, simple, tar_of
from torch.utils.data import DataLoader

import imagenet_dataset
import make_shards
import schema
from input_pipeline import tar_shards
from runtime import seeding

pytestmark = [
    pytest.mark.usefixtures("no_listing_kept"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
]


# The format


def test_webdataset_and_tarfile_read_what_make_shards_wrote(made_shards):
    found = tar_shards.load(str(made_shards), "train", "raise")
    ours = [(key, found.read(i), int(found.labels[i])) for i, key in enumerate(keys(found))]
    theirs = []
    for file in found.files:
        with tarfile.open(file) as tar:
            parts = {member.name: tar.extractfile(member).read() for member in tar}
        theirs += [(n[:-4], parts[n], int(parts[n[:-4] + ".cls"])) for n in parts if n.endswith(".jpg")]
    assert ours == theirs

    wds = pytest.importorskip("webdataset")
    samples = wds.WebDataset(list(found.files), shardshuffle=False)
    assert [(s["__key__"], s["jpg"], int(s["cls"])) for s in samples] == ours


def test_shards_that_webdataset_wrote(tmp_path):
    wds = pytest.importorskip("webdataset")
    (tmp_path / "train").mkdir()
    want = []
    with wds.ShardWriter(str(tmp_path / "train/%04d.tar"), maxcount=4, verbose=0) as writer:
        for i in range(10):
            want.append((f"n{i}" * 40 if i == 5 else f"n{i}", content(str(i), 10 + 600 * i), i % 4))  # a long name too
            writer.write({"__key__": want[-1][0], "jpg": want[-1][1], "cls": want[-1][2], "json": {"label": 9}})
    found = tar_shards.load(str(tmp_path), "train", "raise")
    assert [(key, found.read(i), found.labels[i]) for i, key in enumerate(keys(found))] == want
    assert len(found.files) == 3


def test_all_in_one_folder_as_timm_s_shards_are(tmp_path):
    for name, labels in (("train-0000", (0, 2)), ("train-0001", (1,)), ("validation-00", (2,))):
        tar_of(tmp_path / f"imagenet1k-{name}.tar", [e for n in labels for e in sample(f"{name}_{n}", n)])
    train, val = (tar_shards.load(str(tmp_path), split, "raise") for split in ("train", "val"))
    assert train.labels.tolist() == [0, 2, 1]
    assert keys(val) == ["validation-00_2"]
    assert (tmp_path / "train.index.npz").exists()
    assert (tmp_path / "val.index.npz").exists()


def test_entries_that_are_no_samples_are_left_alone(tmp_path):
    entries = [
        ("__MACOSX/._a.jpg", b"x"),
        ("README", b"x"),
        (".b.jpg", b"x"),
        *sample("./d.1/a", 0),
        ("./d.1/a.seg.png", b"m"),
        ("./d.1/a.txt", b"t"),
        ("b.CLS", b" 1\n"),
        ("c.cls", b"0"),
        ("c.jpg", b"p"),
        ("b.PNG", b"image"),
    ]
    tar_of(tmp_path / "train/0.tar", entries)
    tar_of(tmp_path / "train/._0.tar", [])
    with tarfile.open(tmp_path / "train/0.tar", "a") as tar:
        folder = tarfile.TarInfo("folder.jpg")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    found = tar_shards.load(str(tmp_path), "train", "raise")
    assert keys(found) == ["./d.1/a", "c", "b"]  # in the order of the images
    assert [found.read(i) for i in range(3)] == [content("./d.1/a"), b"p", b"image"]
    assert found.labels.tolist() == [0, 0, 1]
    assert found.skipped == {tar_shards.STRAY: 2}


def test_class_names(tmp_path):
    simple(simple(tmp_path, [4], classes=3), [2], "val")
    assert tar_shards.load(str(tmp_path), "train", "raise").classes == ("0", "1", "2")
    assert tar_shards.load(str(tmp_path), "val", "raise").classes == (
        "0",
        "1",
        "2",
    )  # of train, not of the two labels in val
    letters = ("a", "b", "c", "d")
    assert tar_shards.load(str(tmp_path), "val", "raise", default_classes=letters).classes == letters
    tar_shards.load.cache_clear()
    (tmp_path / "classes.txt").write_bytes("cat\r\ndog house\r\ncafé\r\n".encode())
    assert tar_shards.load(str(tmp_path), "val", "raise").classes == ("cat", "dog house", "café")
    assert tar_shards.load(str(tmp_path), "val", "raise", default_classes=letters).classes[0] == "cat"
    tar_shards.load.cache_clear()
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    text = error_of(tar_shards.load, str(tmp_path), "train", "raise")
    assert "train/train-0.tar: 0_2 has label 2, there are 2 classes" in text
    (tmp_path / "classes.txt").write_text("cat\ndog\ncat\n")
    assert "'cat' is no name of one class" in error_of(tar_shards.load, str(tmp_path), "val", "raise")


def test_no_shards(tmp_path):
    assert "there are no shards" in error_of(tar_shards.load, str(tmp_path / "none"), "train", "raise")
    (tmp_path / "train/class").mkdir(parents=True)
    (tmp_path / "train/class/a.jpg").write_bytes(b"x")
    (tmp_path / "train/0.tar.gz").write_bytes(b"x")
    assert "make_shards.py makes them from class folders" in error_of(tar_shards.load, str(tmp_path), "train", "raise")
    tar_of(tmp_path / "train/0.tar", [])
    (tmp_path / "train/1.tar").symlink_to("nowhere")
    assert "train/1.tar" in error_of(tar_shards.load, str(tmp_path), "train", "raise")
    (tmp_path / "train/1.tar").unlink()
    assert "hold no samples" in error_of(tar_shards.load, str(tmp_path), "train", "raise")


# Damage

WHOLE = [
    *sample("a", 0),
    *sample("b", 1),
    *sample("c", 2),
]  # 700 bytes of image each, 4 blocks: a header, 2, a header


def cut(at):
    return lambda file: os.truncate(file, at(tar_of(file, WHOLE)))


def overwrite(at, data):
    def damage(file):
        place = at(tar_of(file, WHOLE))
        with open(file, "r+b") as target:
            target.seek(place)
            target.write(data)

    return damage


def entries(*parts):
    return lambda file: tar_of(file, [*WHOLE[:4], *parts, *sample("d", 0)])


# What is wrong, how to make it, what the message names, the kind that is counted, the keys that are left
DAMAGE = {
    "cut within an image": (cut(lambda at: at[2] + 300), "ends within b.jpg", tar_shards.CUT, "a"),
    "cut within a header": (cut(lambda at: at[4] - 200), "is cut off after b.cls", tar_shards.CUT, "ab"),
    "cut between files": (cut(lambda at: at[4] - 512), "is cut off after b.cls", tar_shards.CUT, "ab"),
    "cut before the end mark": (cut(lambda at: at[5] + 512), "is cut off after c.cls", tar_shards.CUT, "abc"),
    "a damaged header": (
        overwrite(lambda at: at[2] - 512, b"\xff" * 40),
        "is cut off after a.cls",
        tar_shards.CUT,
        "a",
    ),
    "a wiped header": (overwrite(lambda at: at[2] - 512, bytes(40)), "is cut off after a.cls", tar_shards.CUT, "a"),
    "empty file": (lambda file: file.write_bytes(b""), "is no whole, plain tar", tar_shards.CUT, ""),
    "another file": (
        lambda file: file.write_bytes(b"\x1f\x8b" + bytes(900)),
        "is no whole, plain tar",
        tar_shards.CUT,
        "",
    ),
    "no label": (entries(("x.jpg", b"image")), "x has no label, x.cls", tar_shards.NO_LABEL, "abd"),
    "label in json": (
        entries(("x.jpg", b"p"), ("x.json", b'{"label": 1}')),
        "x has no label",
        tar_shards.NO_LABEL,
        "abd",
    ),
    "no image": (entries(("x.cls", b"1")), "x has no image", tar_shards.NO_IMAGE, "abd"),
    "label a name": (entries(("x.jpg", b"p"), ("x.cls", b"cat")), "x.cls holds b'cat'", tar_shards.NOT_A_NUMBER, "abd"),
    "label empty": (entries(("x.jpg", b"p"), ("x.cls", b"")), "x.cls holds b''", tar_shards.NOT_A_NUMBER, "abd"),
    "label negative": (entries(*sample("x", -1)), "x.cls holds b'-1'", tar_shards.NOT_A_NUMBER, "abd"),
    "label huge": (entries(*sample("x", 10**19)), "x.cls holds b'1000", tar_shards.NOT_A_NUMBER, "abd"),
    "label outside": (entries(*sample("x", 3)), "x has label 3, there are 3 classes", tar_shards.OUTSIDE, "abd"),
    "key twice": (entries(*sample("a", 1, 50)), "a is there twice", tar_shards.TWICE, "abd"),
    "two labels": (entries(("b.cls", b"2")), "b is there twice", tar_shards.TWICE, "abd"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_by_shard_and_key_or_left_out_and_counted(tmp_path, name, capsys):
    damage, text, kind, left = DAMAGE[name]
    (tmp_path / "classes.txt").write_text("x\ny\nz\n")
    simple(tmp_path, [2])
    damage(tmp_path / "train/odd.tar")
    message = error_of(tar_shards.load, str(tmp_path), "train", "raise")
    assert f"train/odd.tar: {text.split()[0]}" in message
    assert text in message
    assert "data.on_error=skip" in message

    found = tar_shards.load(str(tmp_path), "train", "skip")
    assert found.skipped == {kind: 1}
    assert keys(found) == [*left, "0_0", "0_1"]
    for i, key in enumerate(left):
        assert found.read(i) == content(key)
        assert found.labels[i] == {"a": 0, "b": 1, "c": 2, "d": 0}[key]

    simple(tmp_path, [1], "val")
    assert run_tool(make_shards, "--index", tmp_path) == 1
    printed = capsys.readouterr().out
    assert f"train: damaged: train/odd.tar: {text}"[:50] in printed
    assert f"train: left out: {{'{kind}': 1}}" in printed
    assert "val: 1 images of 3 classes in 1 shards" in printed


def test_a_shard_that_is_cut_after_it_was_listed_is_noticed(tmp_path):
    simple(tmp_path, [3])
    found = tar_shards.load(str(tmp_path), "train", "raise")
    os.truncate(found.files[0], os.path.getsize(found.files[0]) - 10240)
    with pytest.raises(OSError, match="the shard ends before the image does"):
        found.read(2)


# The index


def count_listings(monkeypatch, log):
    """Note in a file which shard was listed, in whichever process."""
    original = tar_shards.list_shard

    def listing(root, tar):
        with open(log, "a") as file:
            file.write(f"{tar.name}\n")
        time.sleep(0.05)
        return original(root, tar)

    monkeypatch.setattr(tar_shards, "list_shard", listing)
    return lambda: collections.Counter(log.read_text().split()) if log.exists() else {}


def test_only_new_and_changed_shards_are_listed_again(tmp_path, monkeypatch):
    root = simple(tmp_path / "root", [2, 3, 1])
    log = tmp_path / "log"
    listings = count_listings(monkeypatch, log)

    def load():
        log.unlink(missing_ok=True)
        tar_shards.load.cache_clear()
        return tar_shards.load(str(root), "train", "raise"), set(listings())

    names = [f"train/train-{i}.tar" for i in range(4)]
    first, listed = load()
    assert listed == set(names[:3])
    again, listed = load()
    assert listed == set()
    assert keys(again) == keys(first)
    assert again.labels.tolist() == first.labels.tolist()

    stats = os.stat(root / names[1])
    tar_of(root / names[1], itertools.chain(*(sample(f"1_{i}", 2, 100 + 97 * i) for i in range(3))))  # other labels
    assert os.stat(root / names[1]).st_size == stats.st_size
    found, listed = load()
    assert listed == {names[1]}
    assert found.labels.tolist() == [0, 1, 2, 2, 2, 0]

    entries = itertools.chain(*(sample(f"1_{i}", 1, 100 + 97 * i) for i in range(3)), [("more.txt", bytes(20_000))])
    tar_of(root / names[1], entries)  # another size, and a new shard
    os.utime(root / names[1], ns=(stats.st_mtime_ns, stats.st_mtime_ns))
    simple(tmp_path / "more", [1, 1, 1, 4])
    shutil.copy(tmp_path / "more" / names[3], root / names[3])
    found, listed = load()
    assert listed == {names[1], names[3]}
    assert found.labels.tolist() == [0, 1, 1, 1, 1, 0, 0, 1, 2, 0]
    assert found.read(9) == content("3_3", 100 + 97 * 3)

    (root / names[0]).unlink()
    found, listed = load()
    assert listed == set()
    assert keys(found)[0] == "1_0"


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[:-30], lambda data: b"x" * 50, lambda data: data[9:]]
)
def test_a_torn_index_is_made_again(tmp_path, damage):
    simple(tmp_path, [3, 2])
    want = keys(tar_shards.load(str(tmp_path), "train", "raise"))
    file = tmp_path / "train.index.npz"
    file.write_bytes(damage(file.read_bytes()))
    tar_shards.load.cache_clear()
    assert keys(tar_shards.load(str(tmp_path), "train", "raise")) == want
    tar_shards.load.cache_clear()
    assert len(tar_shards._read_index(file)) == 2


def test_processes_that_need_an_index_at_the_same_time_make_one(tmp_path, monkeypatch):
    root = simple(tmp_path / "root", [2] * 6)
    listings = count_listings(monkeypatch, tmp_path / "log")
    barrier, results = FORK.Barrier(4), FORK.Queue()

    def load():
        barrier.wait()
        results.put(keys(tar_shards.load(str(root), "train", "raise")))

    processes = [FORK.Process(target=load) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert len(found[0]) == 12
    assert found == [found[0]] * 4
    assert listings() == {f"train/train-{i}.tar": 1 for i in range(6)}


@pytest.fixture
def open_folder():
    """A folder that every user may look into; pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_read_only_folder_needs_an_index_and_is_enough_with_one(open_folder):
    root = simple(open_folder / "root", [3])

    def as_nobody(results):
        if os.geteuid() == 0:
            os.setuid(65534)  # a mode keeps nothing from root
        try:
            results.put(keys(tar_shards.load(str(root), "train", "raise")))
        except schema.ConfigError as error:
            results.put(str(error))

    def answer():
        results = FORK.Queue()
        process = FORK.Process(target=as_nobody, args=(results,))
        process.start()
        process.join()
        return results.get(timeout=10)

    root.chmod(0o555)
    text = answer()
    assert "train.index.npz is missing or older" in text
    assert "Permission denied" in text
    assert f"tools/make_shards.py --index {root}" in text
    root.chmod(0o755)
    simple(root, [1], "val")
    assert run_tool(make_shards, "--index", root) == 0
    root.chmod(0o555)
    assert answer() == ["0_0", "0_1", "0_2"]
    root.chmod(0o755)


def test_a_bar_on_a_terminal_alone(tmp_path, monkeypatch, capsys):
    simple(tmp_path / "a", [1, 1])
    tar_shards.load(str(tmp_path / "a"), "train", "raise")
    assert capsys.readouterr() == ("", "")
    simple(tmp_path / "b", [1, 1])
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        tar_shards.load(str(tmp_path / "b"), "train", "raise")
        text = os.read(ours, 100_000)
    os.close(ours)
    assert b"index of train: 100%" in text


# Reading


def test_few_files_are_open_and_copies_and_forks_read_on(tmp_path, monkeypatch):
    monkeypatch.setattr(tar_shards, "OPEN_SHARDS", 3)
    simple(tmp_path, [2] * 9)
    found = tar_shards.load(str(tmp_path), "train", "raise")
    want = [content(key, 100 + 97 * int(key[2:])) for key in keys(found)]

    def num_open():
        links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return sum(link.exists() and os.readlink(link).startswith(str(tmp_path)) for link in links)

    assert num_open() == 0
    assert [found.read(i) for i in range(18)] == want
    assert num_open() == 3
    copy = pickle.loads(pickle.dumps(found))
    assert [copy.read(i) for i in range(18)] == want
    assert (copy.name(17), copy.classes, copy.labels.tolist()) == (found.name(17), found.classes, found.labels.tolist())
    del copy
    results = FORK.Queue()
    child = FORK.Process(target=lambda: results.put([found.read(i) for i in range(17, -1, -1)]))
    child.start()
    assert [found.read(i) for i in range(18)] == want  # at the same time, through the same open files
    assert results.get(timeout=30) == want[::-1]
    child.join()


def test_a_million_samples_are_arrays(tmp_path):
    """Nothing that grows with the samples is a Python object of its own, which forked workers would copy."""
    simple(tmp_path, [50, 50])
    found = tar_shards.load(str(tmp_path), "train", "raise")
    assert len(vars(found)["_keys"]) == sum(map(len, keys(found)))
    for name, value in vars(found).items():
        if name not in ("classes", "skipped", "files", "_open", "_keys"):
            assert isinstance(value, np.ndarray), name
            assert value.dtype != object
            assert len(value) == 100


# The order


def order_by_hand(found, seed, epoch, streams):
    """The rule of `epoch_order` in lists: shards in some order, end to end, cut into pieces, dealt in turn."""
    order = seeding.permutation(len(found.files), seed, epoch).tolist()
    tape = [i for shard in order for i in range(len(found)) if found.shard[i] == shard]
    sizes = [len(part) for part in np.array_split(np.arange(len(tape)), streams)]
    pieces, start = [], 0
    for size in sizes:
        pieces.append(tape[start : start + size])
        start += size
    dealt = itertools.zip_longest(*pieces)
    return [i for row in dealt for i in row if i is not None]


@pytest.mark.parametrize("counts", [[5, 3], [4, 4, 4], [1, 9, 2, 0, 7], [1]])
@pytest.mark.parametrize("streams", [1, 2, 3, 7, 19, 64])
def test_an_epoch_is_every_sample_once_and_reads_every_shard_forward(tmp_path, counts, streams):
    simple(tmp_path, counts)
    found = tar_shards.load(str(tmp_path), "train", "raise")
    orders = {}
    for seed, epoch in itertools.product(range(3), range(3)):
        order = tar_shards.epoch_order(found, seed=seed, epoch=epoch, streams=streams)
        assert order.tolist() == order_by_hand(found, seed, epoch, streams)
        assert sorted(order.tolist()) == list(range(sum(counts)))
        for stream in range(streams):  # each stream: within a shard one after another
            mine = order[stream::streams]
            for now, then in itertools.pairwise(mine):
                assert then == now + 1 or found.shard[now] != found.shard[then]
        orders[seed, epoch] = tuple(order)
    if len(counts) > 3:
        assert len(set(orders.values())) > 6


class Numbered(torch.utils.data.Dataset):
    """(sample, checksum of its bytes, label) of Shards, as a loader's workers read them."""

    def __init__(self, found):
        self.found = found

    def __getitem__(self, index):
        digest = hashlib.sha256(self.found.read(index)).digest()[:6]
        return index, int.from_bytes(digest, "big"), int(self.found.labels[index])


def stream(found, *, batch, steps, workers, world, streams=3):
    """Steps `steps` of a run as `world` ranks see them: sample n of the run is place n % N of epoch n // N."""
    ranks = []
    for rank in range(world):
        share = batch // world
        places = [range(step * batch + rank * share, step * batch + (rank + 1) * share) for step in steps]

        def sample(n):
            order = tar_shards.epoch_order(found, seed=3, epoch=n // len(found), streams=streams)
            return int(order[n % len(found)])

        loader = DataLoader(
            Numbered(found),
            batch_sampler=[[sample(n) for n in part] for part in places],
            num_workers=workers,
        )
        ranks.append([torch.stack(parts, dim=1) for parts in loader])
    assert len({len(part) for part in ranks}) == 1  # equal steps on every rank
    return torch.cat([torch.cat(parts) for parts in zip(*ranks, strict=True)])


def test_two_uneven_shards_feed_any_ranks_and_workers_the_same_and_resume_anywhere(tmp_path):
    simple(tmp_path, [5, 3])
    found = tar_shards.load(str(tmp_path), "train", "raise")
    straight = stream(found, batch=6, steps=range(4), workers=0, world=1)  # 24 = 3 epochs of 8
    for epoch in range(3):
        assert sorted(straight[8 * epoch : 8 * epoch + 8, 0].tolist()) == list(range(8))  # 0 lost, 0 repeated
    want = [int.from_bytes(hashlib.sha256(found.read(i)).digest()[:6], "big") for i in straight[:, 0].tolist()]
    assert straight[:, 1].tolist() == want
    for workers, world in ((4, 2), (1, 3), (0, 3)):
        assert torch.equal(stream(found, batch=6, steps=range(4), workers=workers, world=world), straight)
    for workers, world in ((0, 2), (3, 1)):  # from step 1 and from step 3, elsewhere
        for start in (1, 3):
            rest = stream(found, batch=6, steps=range(start, 4), workers=workers, world=world)
            assert torch.equal(rest, straight[6 * start :])
            assert rest[:6, 0].tolist() != straight[:6, 0].tolist()


# Through the loaders


def config(path, *overrides):
    base = [*TINY, "data.source=webdataset", f"data.path={path}", "data.num_workers=0", "data.shard_streams=5"]
    return launch.load_config("L0_sanity", [*base, *overrides, "output_dir=unused"], script="train_ddp")


def test_training_stream_is_the_same_for_any_workers_ranks_and_resume(made_shards):
    """Pixels too, over more than three epochs of 60; every sample once an epoch, every val image once."""
    want = list(batches(config(made_shards, "num_train_steps=8")))
    for workers, world_size, start_step in ((1, 1, 0), (3, 2, 0), (0, 3, 3), (1, 2, 5)):
        found = list(
            batches(
                config(made_shards, "num_train_steps=8", f"data.num_workers={workers}"),
                world_size=world_size,
                start_step=start_step,
            )
        )
        assert len(found) == 8 - start_step
        for (images, labels), (images_, labels_) in zip(found, want[start_step:], strict=True):
            assert torch.equal(images, images_)
            assert torch.equal(labels, labels_)
    loader = loaders_of(config(made_shards, "num_train_steps=8"), rank=0, world_size=1, start_step=0)
    indices = [index for batch in loader[0].batch_sampler for _, index in batch]
    for epoch in range(3):
        assert sorted(indices[60 * epoch : 60 * epoch + 60]) == list(range(60))
    labels = torch.cat([labels for _, labels in loader[1]])
    assert sorted(labels[labels != imagenet_dataset.PADDING].tolist()) == sorted(
        tar_shards.load(str(made_shards), "val", "raise").labels
    )


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_image_that_does_not_decode_is_named_by_shard_and_key(made_shards, tmp_path, policy):
    """The index is right, the image is not."""
    shutil.copytree(made_shards, tmp_path / "shards")
    found = tar_shards.load(str(tmp_path / "shards"), "train", policy)
    name, offset = found.name(10), found._offsets[10]
    times = os.stat(found.files[found.shard[10]])
    with open(found.files[found.shard[10]], "r+b") as file:
        file.seek(offset + 2)
        file.write(b"\0" * 200)
    os.utime(found.files[found.shard[10]], ns=(times.st_atime_ns, times.st_mtime_ns))
    cfg = config(tmp_path / "shards", "num_train_steps=3", f"data.on_error={policy}")
    if policy == "raise":
        with pytest.raises(OSError, match=f"cannot read {name}: "):
            list(batches(cfg))
    else:
        assert sum(len(labels) for _, labels in batches(cfg)) == 72
