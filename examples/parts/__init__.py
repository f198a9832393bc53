"""What the programs beside this folder are made of: models, data, checkpoints and metrics."""
