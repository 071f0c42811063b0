"""What a run tells about itself: metrics, trackers, profiles."""
