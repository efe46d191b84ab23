roomier fit --model project.Classifier --data project.Points --seed_everything 0 --trainer.max_epochs 2 --trainer.log_every_n_steps 10 \
    --trainer.enable_plan_table false --trainer.enable_model_summary false --trainer.enable_progress_bar false
