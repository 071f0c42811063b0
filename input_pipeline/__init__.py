"""From files to batches: listings of image folders and tar shards, decoding, augmentation, images kept on the device."""
