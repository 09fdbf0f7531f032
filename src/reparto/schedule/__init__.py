"""Stage 4, L1: the pipeline as data, who computes what and in which order. No torch.

| file | one subject |
|---|---|
| `actions` | the values: `Op`, `Action`, `Schedule`, their text form |
| `rules` | which requests are legal, and the nearest legal one |
| `generate` | the six schedules, one generator each |
| `lower` | adds SEND / RECV, UNSHARD / RESHARD, REDUCE |
| `live` | how many activations a rank holds |
| `check` | proves a list complete, ordered, matched and free of deadlock, or names the fault |
| `timing` | when every action starts and ends, given times |
| `draw`, `svg` | the grid for the terminal and as a picture |
| `describe` | the figures of a schedule as one JSON-able value |
"""
