"""What a run reports about itself: metrics, trackers, profiles."""
