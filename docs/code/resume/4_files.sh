ls runs/version_0 runs/version_0/checkpoints/*
