"""What becomes of every file of a folder, as training and evaluation read it: pixels, or an error.

python tools/odd_files.py FOLDER --output benchmarks/odd_files.json
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import launch

import benchmark
import imagenet_dataset
import schema
from input_pipeline import decode


def outcome(path: Path, cfg: schema.Config) -> str:
    """Size and mean colour of the image, or why there is none."""
    try:
        data = path.read_bytes()
        decoder = decode.Decoder.of(cfg.data, in_chans=3)
        image = decoder.tensor(data)
        cropped = imagenet_dataset.eval_transform(cfg.data)(decode.crop_extreme_aspect(decoder.pillow(data)))
        assert cropped.shape == (3, 224, 224)
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror or error}"
    except decode.ImageError as error:
        return f"refused: {error}"
    colour = ", ".join(f"{value:.0f}" for value in image.double().mean(dim=(1, 2)).tolist())
    return f"{image.shape[2]} x {image.shape[1]}, mean colour {colour}"


def main() -> None:
    """Read all, each with both decoders and both ways of EXIF."""
    parser = launch.Parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for path in sorted(args.folder.rglob("*")):
        if path.name in ("MANIFEST.md", "LICENSE") or (path.is_dir() and not path.suffix):
            continue
        row: dict[str, Any] = {"file": str(path.relative_to(args.folder))}
        started = time.perf_counter()
        for exif in ("false", "true"):
            found = set()
            for decoder in ("pillow", "torchvision"):
                chosen = [f"data.decoder={decoder}", f"data.exif_orientation={exif}"]
                cfg = launch.load_config("vit_base_patch16_224", ["data.path=/", "output_dir=unused", *chosen])
                found.add(outcome(path, cfg))
            row["with EXIF" if exif == "true" else "plain"] = " | ".join(sorted(found))  # one, if decoders agree
        if row["with EXIF"] == row["plain"]:
            del row["with EXIF"]
        row["seconds"] = round((time.perf_counter() - started) / 4, 2)
        rows.append(row)
        print(row, flush=True)
    benchmark.write(args.output, rows)


if __name__ == "__main__":
    main()
