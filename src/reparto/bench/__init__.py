"""Side by side with the peers, in one run, as ratios. May import anything but cli."""
