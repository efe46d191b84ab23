roomier launch run.yaml --to skypilot --hardware t4:1 --model.width 4096 --trainer.strategy single
