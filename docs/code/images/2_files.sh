ls runs/version_0 runs/version_0/images/samples
head -n 1 runs/version_0/images.jsonl
