"""Plan, run, measure and recover distributed training. See docs/READING.md for a reading order."""
