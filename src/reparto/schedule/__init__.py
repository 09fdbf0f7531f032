"""Stage 4, L1: the pipeline as data, who computes what and in which order. No torch.

| file | one subject |
|---|---|
| `actions` | the values: `Op`, `Action`, `Schedule`, their text form |
| `rules` | which requests are legal, and the nearest legal one |
| `generate`, `weights` | the six schedules, one generator each; where weight gradients go |
| `lower` | adds SEND / RECV, UNSHARD / RESHARD, REDUCE |
| `live` | how many activations a rank holds |
| `check`, `check_lists` | prove that the lists make a correct step, or name the fault |
| `timing` | when every action starts and ends, given times |
| `draw`, `svg` | the grid for the terminal and as a picture |
| `describe` | the figures of a schedule as one JSON-able value |
"""
