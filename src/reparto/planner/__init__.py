"""Beside the layers: which plan, how fast, how much memory, and why not the others. No torch.

| file | one subject |
|---|---|
| `hardware` | named accelerators and clusters, and files of the user |
| `model_spec` | the sizes a prediction needs, from presets, TOML or a `config.json` |
| `constants` | the few fitted numbers, with what each was fitted on |
| `links` | which tier a group crosses, seconds of a collective |
| `kernels` | seconds of a matmul, an attention kernel, a pass over memory |
| `cost` | seconds of one layer and of the ends of the model: F, B and W apart |
| `job`, `stages` | what is asked; which layers stand where |
| `step` | one plan's whole step from those parts |
| `memory` | bytes of one rank, item by item |
| `simulate` | the timeline, action by action |
| `candidates` | every legal plan, in groups that share what is decided early |
| `search`, `answer` | all plans of a cluster, ranked, each other one with its reason |
| `interval` | how far a prediction may be off |
| `what_if` | the same question with one thing changed |
| `goodput` | failures, checkpoint interval, time and cost of a whole run |
| `published`, `validate`, `calibrate` | published runs: read, scored, fitted |
| `render` | tables, memory bars, the timeline as SVG |
"""
