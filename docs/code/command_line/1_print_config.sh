roomier fit --model project.Classifier --model.width 32 --data project.Points --trainer.max_epochs 3 \
    --print_config > run.yaml
cat run.yaml
