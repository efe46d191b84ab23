roomier fit --model project.Classifier --data project.Points --seed_everything 0 --trainer.max_epochs 3 --trainer.precision bf16-mixed \
    --trainer.enable_model_summary false
