"""Stage 3, L2: the only callers of torch.distributed."""
