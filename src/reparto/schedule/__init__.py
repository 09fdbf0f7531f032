"""Stage 4, L1: the pipeline as data. Generated, lowered, checked, drawn and timed. No torch."""
