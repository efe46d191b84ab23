ls runs/version_0
cat runs/version_0/metrics.csv
