"""Stage 2, L3: single-device models that know nothing of ranks."""
