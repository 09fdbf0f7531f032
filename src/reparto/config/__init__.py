"""Stage 1, L0: run, plan, model, data and cluster as frozen values that can be saved and replayed."""
