roomier launch run.yaml --to jobset --image ghcr.io/me/language:1 --name language --hardware a100-40gb:8 --nodes 2
