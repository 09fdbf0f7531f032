"""Stage 5, L5: state on disk, free of the layout that wrote it."""
