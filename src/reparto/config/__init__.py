"""Stage 1, L0: the run, the plan, the model and the cluster as frozen values that can be saved, diffed and replayed. No torch."""
