"""Imported into the process that ranks are forked from (`conftest.fork_context`): what the first run of each would do.

That is to import the rest, to list Pillow's formats and to read the config's files.
"""

import launch

import gc

import fsspec  # noqa: F401
import numpy.ma  # noqa: F401
import torchvision.transforms.v2  # noqa: F401
import worker  # noqa: F401
from PIL import Image

import train_ddp  # noqa: F401
import train_fsdp2  # noqa: F401

Image.init()
launch.load_config("L0_sanity", ["data.path=unused", "output_dir=unused"])
gc.freeze()  # what is there now stays: no collection of a rank need look at it
