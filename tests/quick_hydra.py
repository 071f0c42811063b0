"""Hydra, which reads each file of a config once a process: tests compose many, each in a quarter of the time.

Of 0.16 s for a config 0.12 s are for the same dozen YAML files again, parsed in Python, and their merging.
"""

import copy
import os
import pickle
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository


def install():
    """Keep what Hydra read and merged. It has no setting for that, so these are its own functions."""
    loaded, merged = {}, {}
    load, merge, load_single = (
        ConfigRepository.load_config,
        ConfigLoaderImpl._compose_config_from_defaults_list,
        ConfigLoaderImpl._load_single_config,
    )

    def places(repository):
        return tuple((source.scheme(), source.path) for source in repository.get_sources())

    def load_once(self, config_path):
        name = f"{config_path.removesuffix('.yaml')}.yaml"
        files = [Path(source.path, name) for source in self.sources if source.scheme() == "file"]
        key = places(self), config_path, tuple(os.stat(file).st_mtime_ns for file in files if file.exists())
        if key not in loaded:
            loaded[key] = load(self, config_path)
        return loaded[key]

    def load_single_copied(self, default, repo):
        result = copy.copy(load_single(self, default, repo))
        result.config = copy.deepcopy(result.config)  # Hydra merges the next ones into the first one's nodes
        return result

    def merge_once(self, defaults, repo):
        files = [default.config_path and repo.load_config(default.config_path) for default in defaults]
        key = places(repo), repr(defaults), tuple(map(id, files))
        if key not in merged:
            merged[key] = files, pickle.dumps(merge(self, defaults, repo))  # a tenth of the time of a deepcopy
        return pickle.loads(merged[key][1])

    ConfigRepository.load_config = load_once
    ConfigLoaderImpl._load_single_config = load_single_copied
    ConfigLoaderImpl._compose_config_from_defaults_list = merge_once
