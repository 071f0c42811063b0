"""Write a checkpoint of ours as a folder that timm or Hugging Face's transformers load.

    python tools/convert_checkpoint.py runs/demo/checkpoints demo_timm --format timm
    python tools/convert_checkpoint.py runs/demo/checkpoints/step_00000833 demo_hf --format hugging-face

SOURCE is a step_XXXXXXXX folder, or a folder that holds some: of those the newest complete one is taken. One process,
no GPU; weights are read, the optimizer's state is not. TARGET must not be there yet. A run with EMA gives its averaged
weights, with --raw the others.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch import Parser, exit_with

import os

from interop import weights_out
from runtime.checkpoint_places import model_path
from runtime.step_folders import newest_step
from schema import ConfigError

EXPORTS = {"timm": weights_out.export_timm, "hugging-face": weights_out.export_hugging_face}


def main() -> None:
    """Parse, convert, say what was written."""
    parser = Parser(__doc__)
    parser.add_argument("source", type=model_path, metavar="SOURCE")
    parser.add_argument("target", type=Path, metavar="TARGET")
    parser.add_argument("--format", choices=EXPORTS, required=True)
    parser.add_argument("--raw", action="store_true", help="the weights themselves, not their moving average")
    args = parser.parse_args()
    if os.path.lexists(args.target):
        exit_with(f"{args.target} is there already: give a new folder")
    step_folder = newest_step(args.source)
    if step_folder is None:
        exit_with(f"{args.source} is no complete step_XXXXXXXX folder and holds none: give one, or a run's checkpoints")
    try:
        kind = EXPORTS[args.format](step_folder, args.target, raw=args.raw)
    except ConfigError as error:
        exit_with(str(error))
    except OSError as error:
        if str(error.filename or "").startswith(str(step_folder)):
            exit_with(f"SOURCE={args.source} cannot be read ({error}): mend its rights, or give a whole copy")
        exit_with(
            f"TARGET={args.target} cannot be written ({error.strerror}): give a folder that can be made, on a disk "
            "with room"
        )
    size = sum(file.stat().st_size for file in args.target.iterdir())
    print(f"wrote {args.target} ({args.format}, {size / 2**20:.1f} MiB, {kind}) from {step_folder}")


if __name__ == "__main__":
    main()
