"""Print the keys whose values differ between two configs, one line each: `key: a -> b`.

    python tools/diff_config.py vit_base_patch16_224 deit_b16
    python tools/diff_config.py defaults deit_b16 data.path=/data/imagenet     # all that a recipe changes
    python tools/diff_config.py deit_b16 runs/deit_b16-train_ddp               # a run's folder, or its config.yaml

A and B are names from config/ or what runs wrote. KEY=VALUE is an override as on a run's command line, and applies to
names. Values are resolved: a data.path that a config leaves open is `(not given)`; a key of one side only is `(absent)`
on the other. No output is no difference.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch import CONFIG_DIR, Parser, exit_with, load_config

import yaml

from schema import ConfigError, to_plain


def is_name(config: str) -> bool:
    """Whether it is a primary config's."""
    return Path(config).name == config and (CONFIG_DIR / f"{config}.yaml").is_file()


def load(config: str, overrides: list[str]) -> dict[str, Any]:
    """A config of config/ as it would run, or one that a run wrote."""
    if is_name(config):
        try:
            return to_plain(load_config(config, overrides, script="train_ddp"))
        except ConfigError as error:
            if not str(error).startswith("data.path is missing"):
                raise
        return to_plain(load_config(config, [*overrides, "data.path='(not given)'"], script="train_ddp"))
    source = Path(config)
    try:
        content = yaml.safe_load((source / "config.yaml" if source.is_dir() else source).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        content = None
    if not isinstance(content, dict) or "defaults" in content:
        raise ConfigError(f"{config} is neither a name from {CONFIG_DIR} nor a run's folder or config.yaml: give one")
    return content


def flatten(section: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted key -> value as it is printed."""
    flat = {}
    for key, value in section.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return flat


def main(argv: list[str] | None = None) -> None:
    """Parse, load both, print."""
    parser = Parser(__doc__)
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args(argv)
    if args.overrides and not (is_name(args.a) or is_name(args.b)):
        exit_with(f"{' '.join(args.overrides)}: what runs wrote takes no overrides; leave them out")
    try:
        a, b = (flatten(load(config, args.overrides)) for config in (args.a, args.b))
    except ConfigError as error:
        exit_with(str(error))
    for key in a | b:
        if (old := a.get(key, "(absent)")) != (new := b.get(key, "(absent)")):
            print(f"{key}: {old} -> {new}")


if __name__ == "__main__":
    main()
