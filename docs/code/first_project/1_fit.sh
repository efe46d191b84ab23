roomier fit --model project.Model --data project.Code --trainer.max_steps 200 --seed_everything 1
