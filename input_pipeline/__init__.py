"""From files to batches: image folders, tar shards, decoding, augmentation, images kept on the device."""
