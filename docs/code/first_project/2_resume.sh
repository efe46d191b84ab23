roomier fit --model project.Model --data project.Code --trainer.max_steps 300 --ckpt_path last
