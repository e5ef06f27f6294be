"""How a model is trained: steps, checkpoints, files and processes. Knows no experiment."""
