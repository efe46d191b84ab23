diff runs/version_0/plan.yaml runs/version_2/plan.yaml
