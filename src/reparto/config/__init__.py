"""Stage 1, L0: run, plan, model, data, cluster as frozen values, saved and replayed. No torch."""
